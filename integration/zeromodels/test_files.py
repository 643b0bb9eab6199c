"""Files of models in float8, and of frozen ones."""

import numpy as np
import pytest
import zoo_models as zoo

import keras_policy_ext as kpe


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("change", [kpe.convert, kpe.freeze])
def test_saved_model_is_loaded_as_it_was(change, family, tmp_path):
    model = zoo.model_of(family)
    inputs = zoo.data(model)
    change(model)
    expected = zoo.outputs(model, inputs)
    model.save(tmp_path / "model.keras")

    loaded = kpe.load_model(tmp_path / "model.keras")

    zoo.assert_same_arrays(zoo.arrays(loaded), zoo.arrays(model))
    np.testing.assert_array_equal(zoo.outputs(loaded, inputs), expected)
