"""Layers in Keras's own float8, and their scales and histories."""

import keras
import numpy as np

from keras_policy_ext.recipes import OPERANDS
from steps import normal, numpy, state_of

LENGTH = 6
KINDS = ("scale", "amax_history")
NAMES = [f"{operand}_{kind}" for operand in OPERANDS for kind in KINDS]


def short(length=LENGTH):
    cls = keras.dtype_policies.QuantizedFloat8DTypePolicy
    return cls("float8", "float32", length)


def dense(layers, policy, **kwargs):
    layer = layers.Dense(5, dtype=policy, **kwargs)
    return keras.Sequential([keras.Input((4,)), layer])


def einsum_dense(layers, policy, **kwargs):
    layer = layers.EinsumDense(
        "abc,cde->abde", (3, 2, 2), dtype=policy, **kwargs
    )
    return keras.Sequential([keras.Input((3, 4)), layer])


def inputs_for(model, seed=0):
    return normal(8, *model.input_shape[1:], seed=seed)


def trained(model, batches=(0, 1, 2), rate=0.01):
    """A model after some steps; with a rate of 0 its weights stay."""
    model.compile(keras.optimizers.SGD(rate), "mse")
    for seed in batches:
        y = normal(8, *model.output_shape[1:], seed=100 + seed)
        model.train_on_batch(inputs_for(model, seed), y)
    return model


def stock_numbers(layer):
    return {name: numpy(getattr(layer, name)) for name in NAMES}


def own_numbers(layer):
    state = state_of(layer)
    return {
        f"{operand}_{kind}": value
        for operand in OPERANDS
        for kind, value in zip(KINDS, state[operand], strict=True)
    }


def assert_same_numbers(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], name)
