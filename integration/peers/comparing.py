"""What is compared with packages of others, and how nearly it is the same."""

import numpy as np
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.numerics.quantized import quantize
from steps import gradients, numpy

SHAPES = {"wide": (48, 64, 160), "tall": (256, 32, 16), "long": (16, 512, 48)}
"""Rows, inputs and units."""


def numbers(shape, seed, spread=0):
    """Float32 normal numbers, the rows of magnitudes up to 2**±spread."""
    rng = np.random.default_rng(seed)
    powers = rng.uniform(-spread, spread, (shape[0], 1))
    return np.float32(rng.normal(size=shape) * 2.0**powers)


def operands(shape, seed, spread=4):
    """Inputs, kernel and output gradient."""
    rows, inputs, units = shape
    return (
        numbers((rows, inputs), seed, spread),
        numbers((inputs, units), seed + 1, spread),
        numbers((rows, units), seed + 2, spread),
    )


def products(recipe, x, kernel, g):
    """Outputs of a Dense and the gradients of its inputs and kernel."""
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    layer = kpe.layers.Dense(kernel.shape[1], use_bias=False, dtype=policy)
    layer.build((None, len(kernel)))
    layer.kernel.assign(kernel)
    weights = ops.convert_to_tensor(g)
    y, dx, (dw, *_) = gradients(
        layer, x, lambda y: ops.sum(ops.multiply(y, weights))
    )
    return numpy(y), numpy(dx), numpy(dw)


def quantized(x, asked):
    """Codes as numbers and scales of a matrix, summed over its last axis."""
    found, _ = quantize(ops.convert_to_tensor(x[np.newaxis]), asked)
    return found, numpy(found.values)[0], numpy(found.scale)[0]


def error(found, expected):
    """The RMS of an error, of that of what is expected."""
    rms = np.sqrt(np.mean(np.square(np.float64(found) - expected)))
    return rms / np.sqrt(np.mean(np.square(np.float64(expected))))
