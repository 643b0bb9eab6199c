"""Why `ext/migration/_keras/` is needed."""

import keras
import pytest

from hidden_names import hidden
from keras_policy_ext.ext.migration._keras import operation_class


def test_keras_ops_has_functions_and_no_classes():
    """But for the base class."""
    classes = {x for x in vars(keras.ops).values() if isinstance(x, type)}
    assert classes <= {keras.Operation}


def test_a_saved_graph_names_the_class():
    x = keras.Input((2,))
    config = keras.Model(x, keras.ops.add(x, x)).get_config()
    (add,) = (each for each in config["layers"] if each["name"] == "add")
    assert add["class_name"] == "Add"
    assert operation_class(keras.ops.add, 2).__name__ == "Add"


def test_what_needs_a_history_is_refused():
    with (
        hidden(keras.KerasTensor, "_keras_history"),
        pytest.raises(ImportError, match=r"KerasTensor\._keras_history"),
    ):
        operation_class(keras.ops.add, 2)
