"""What `_keras/calls.py` relies on."""

import threading

import keras
import numpy as np
import pytest

from keras_policy_ext._keras.calls import (
    after_each_build,
    before_each_variable,
)


class Outer(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="outer")
        self.inner = keras.layers.Dense(2, name="inner")

    def build(self, shape):
        self.inner.build(shape)


def nothing(layer, name):
    """No weight is replaced."""
    return False


def test_each_layer_is_handed_over_with_its_weights_inner_first():
    seen = []

    def note(layer):
        seen.append((layer.name, layer.path, len(layer.weights)))

    with after_each_build(note, nothing):
        Outer().build((None, 3))
    assert seen == [("inner", "outer/inner", 2), ("outer", "outer", 2)]
    keras.layers.Dense(1).build((None, 1))
    assert len(seen) == 2


def test_layers_of_other_threads_are_left_alone():
    seen = []
    with after_each_build(seen.append, nothing):
        thread = threading.Thread(
            target=lambda: keras.layers.Dense(1).build((None, 1))
        )
        thread.start()
        thread.join()
    assert not seen


def test_what_was_replaced_is_put_back_after_an_error():
    before = dict(vars(keras.Layer))
    with pytest.raises(ZeroDivisionError):  # noqa: SIM117
        with after_each_build(print, nothing):
            1 / 0  # noqa: B018
    assert dict(vars(keras.Layer)) == before


def test_initial_values_are_not_computed_for_what_is_wanted():
    def wanted(layer, name):
        return name == "kernel"

    with after_each_build(lambda layer: None, wanted):
        dense = keras.layers.Dense(
            3, kernel_initializer="ones", bias_initializer="ones"
        )
        dense.build((None, 2))
    kernel, bias = map(keras.ops.convert_to_numpy, dense.weights)
    np.testing.assert_array_equal(kernel, np.zeros((2, 3)))
    np.testing.assert_array_equal(bias, np.ones(3))


def test_keras_computes_initial_values_that_are_replaced():
    """Why it is needed: a kernel takes memory before it is frozen."""
    dense = keras.layers.Dense(3)
    dense.build((None, 2))
    assert np.any(keras.ops.convert_to_numpy(dense.kernel))


def test_keras_makes_a_weight_of_any_size_that_a_config_asks_for():
    asked = []
    with before_each_variable(asked.append):
        keras.layers.Dense(3).build((None, 2))
        keras.Variable(1.0)
    assert asked == [(2, 3), (3,)]  # Why it is needed: Keras has no limit.

    def refuse(shape):
        raise ValueError(shape)

    layer = keras.layers.Dense(10**12)
    with (
        before_each_variable(refuse),
        pytest.raises(ValueError, match="1000000000000"),
    ):
        layer.build((None, 2))
    assert layer.weights == []
