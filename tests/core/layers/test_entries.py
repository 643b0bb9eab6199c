"""The schema of the entries of a layer: its keys and its errors."""

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.files import entries


@pytest.mark.parametrize("schema", [entries.STATE, entries.FROZEN])
def test_errors_have_all_parts(schema):
    group = entries.Group(schema, "model/dense", {})
    damaged = str(group.damaged("it lacks 'x'"))
    parts = ("'model/dense'", "not changed. Received: it lacks 'x'. Allowed: ")
    assert all(part in damaged for part in (*parts, f". {schema.advice}"))
    group.check_version(1)
    with pytest.raises(ValueError, match=r"newer.*format 2. Allowed: up to 1"):
        group.check_version(2)


def test_an_error_names_a_layer_without_states(tmp_path):
    def model():
        layer = kpe.layers.Dense(2, dtype="float8/current_from_float32")
        return keras.Sequential([keras.Input((3,)), layer], name="model")

    path = tmp_path / "model.weights.h5"
    model().save_weights(path)
    with h5py.File(path, "a") as file:
        group = file["layers/dense/float8_state/vars"]
        group["given"] = np.array([255], "uint8")
    with pytest.raises(ValueError, match=r"state of 'model/dense.*'given'"):
        model().load_weights(path)
