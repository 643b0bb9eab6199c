"""Why `_keras/operation_classes.py` is needed. See `_keras/__init__.py`."""

import keras

from keras_policy_ext._keras import symbolic


def test_keras_ops_has_functions_and_no_classes():
    """But for the base class."""
    classes = {x for x in vars(keras.ops).values() if isinstance(x, type)}
    assert classes <= {keras.Operation}


def test_a_saved_graph_names_the_class():
    x = keras.Input((2,))
    config = keras.Model(x, keras.ops.add(x, x)).get_config()
    (add,) = (each for each in config["layers"] if each["name"] == "add")
    assert add["class_name"] == "Add"
    assert symbolic.operation_class(keras.ops.add, 2).__name__ == "Add"
