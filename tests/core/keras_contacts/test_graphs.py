"""Why `_keras/walking.py` is needed. See `_keras/__init__.py`."""

import keras
import pytest

from keras_policy_ext._keras import walking
from public_api import functions_about, members_about


def model_with_a_layer_called_twice():
    dense = keras.layers.Dense(2, name="dense")
    x = keras.Input((2,), name="x")
    y = keras.layers.Concatenate(axis=1)([dense(x), dense(dense(x))])
    return keras.Model(x, keras.ops.transpose(y, axes=(1, 0)))


def test_keras_does_not_tell_what_operations_are_called_on():
    model = model_with_a_layer_called_twice()
    for each in (type(model), keras.Function, keras.Operation):
        assert members_about(each, "node", "graph", "argument", "calls") == []
    assert functions_about("walk", "graph", "node") == []
    names = [operation.name for operation in model.operations]
    assert names.count("dense") == 1


def test_calls_of_a_graph_are_followed_with_other_values():
    calls = []

    def call(operation, *args):
        calls.append((type(operation).__name__, *args))
        return str(len(calls))

    found = walking.follow_graph(model_with_a_layer_called_twice(), ["x"], call)
    names = [name for name, _ in calls]
    assert names == ["Dense", "Dense", "Dense", "Concatenate", "Transpose"]
    dense = [value for name, value in calls if name == "Dense"]
    assert sorted(dense)[1:] == ["x", "x"]
    assert len(calls[3][1]) == 2
    assert (calls[4][1], found) == ("4", ["5"])


def test_models_without_a_graph_are_refused():
    class Model(keras.Model):
        pass

    with pytest.raises(ImportError, match="_nodes_by_depth"):
        walking.follow_graph(Model(), [], None)
