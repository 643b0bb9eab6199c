"""Why `_keras/while_building.py` is needed. See `_keras/__init__.py`."""

import threading

import keras

from keras_policy_ext._keras import while_building
from public_api import functions_about, members_about


def test_keras_tells_nobody_that_a_layer_was_built():
    assert members_about(keras.layers.Layer, "post_build", "on_build") == []
    assert functions_about("after_build", "on_build", "post_build") == []


def test_a_function_is_called_with_each_layer_once_it_is_built():
    found = []
    before = vars(keras.Layer).get("_post_build")
    with while_building.after_each_build(found.append):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    (dense,) = model.layers
    assert sum(each is dense for each in found) == 1
    assert dense.built
    keras.layers.Dense(3).build((None, 2))
    assert len([x for x in found if isinstance(x, keras.layers.Dense)]) == 1
    assert vars(keras.Layer).get("_post_build") is before


def test_layers_of_other_threads_are_left_alone():
    found = []
    with while_building.after_each_build(found.append):
        thread = threading.Thread(
            target=lambda: keras.layers.Dense(3).build((None, 2))
        )
        thread.start()
        thread.join()
    assert found == []


def test_inner_layers_come_first():
    found = []
    with while_building.after_each_build(found.append):
        keras.layers.MultiHeadAttention(1, 2).build((1, 2, 3), (1, 2, 3))
    names = [each.name for each in found]
    assert names.index("query") < len(names) - 1
    assert "attention" in names[-1]
