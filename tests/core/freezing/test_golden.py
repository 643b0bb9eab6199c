"""A file of format version 1 gives what it gave (see tests/saved_files.py)."""

import pathlib

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from frozen_models import frozen_layers
from saved_files import words_for
from steps import numpy

FILES = pathlib.Path(__file__).parents[2] / "goldens" / "files"
RECIPES = {
    "words": dict(per="tensor"),
    "conv": dict(weights="float8_e5m2"),
    "lstm_cell": dict(activations="dynamic"),
    "head": dict(per="block", activations="static"),
}


@pytest.mark.parametrize(
    "load", [kpe.load_model, keras.saving.load_model], ids=["kpe", "keras"]
)
@pytest.mark.extension("recurrent")
def test_the_file_of_version_1_loads(load):
    model = load(FILES / "frozen.keras")
    found = {x.name: x.float8_policy.recipe for x in frozen_layers(model)}
    expected = {
        name: kpe.recipes.FrozenKernels(**fields)
        for name, fields in RECIPES.items()
    }
    assert {k: v for k, v in found.items() if k in expected} == expected
    with np.load(FILES / "frozen.npz") as numbers:
        for kind, variables in (
            ("weight", model.weights),
            ("slot", model.optimizer.variables),
        ):
            names = sorted(x for x in numbers.files if x.startswith(kind))
            assert len(names) == len(variables)
            for name, variable in zip(names, variables, strict=True):
                held = getattr(variable, "codes", variable)
                np.testing.assert_array_equal(numbers[name], numpy(held))
        outputs = numbers["outputs"]
    # An ulp of float32 may move one of the inputs of a product over the
    # boundary of two numbers of e4m3fn: one of four to the last layer, by 2^-3.
    found = numpy(model(words_for(model)[0], training=False))
    error = np.linalg.norm(found - outputs)
    assert error < 2.0**-3 / 2 * np.linalg.norm(outputs)
