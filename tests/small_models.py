"""Small models to convert, and whether they stayed the same."""

import keras
import numpy as np
from keras import ops

from keras_policy_ext.layers.state_of import is_state
from steps import numpy

POLICY = "float8/4_from_float32"
LITTLE = "ignore:(None|Only .*) of the multiplications:UserWarning"


def weights(model):
    return {v.path: numpy(v) for v in model.weights if not is_state(v)}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], path)


@keras.saving.register_keras_serializable("test_convert")
class Block(keras.layers.Layer):
    """A user's block that makes stock layers, in a list and a dict."""

    def build(self, input_shape):
        units = input_shape[-1]
        self.stack = [keras.layers.Dense(units) for _ in range(2)]
        self.named = {
            "out": keras.layers.EinsumDense("abc,cd->abd", (4, units))
        }
        for layer in (*self.stack, self.named["out"]):
            layer.build(input_shape)

    def call(self, x):
        for layer in self.stack:
            x = ops.tanh(layer(x))
        return x + self.named["out"](x)


def sequential():
    return keras.Sequential(
        [
            keras.Input((4, 6)),
            keras.layers.Conv1D(5, 3, activation="relu"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(2),
        ]
    )
