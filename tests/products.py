"""The three products of a contraction, of operands that are quantized."""

import keras
import numpy as np

import keras_policy_ext as kpe
from keras_policy_ext import contractions, reference
from keras_policy_ext.contractions import equations
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import Quantization


class Contract(kpe.layers.Float8Mixin, keras.layers.Layer):
    """A layer of one einsum, any equation."""

    def __init__(self, equation, shape, **kwargs):
        super().__init__(**kwargs)
        self.equation, self.shape = equation, shape

    def build(self, input_shape):
        self.kernel = self.add_weight(name="kernel", shape=self.shape)

    def call(self, inputs, training=None):
        return self.float8_einsum(self.equation, inputs, self.kernel, training)


def quantized(x, operand, recipe, apart=()):
    """What float8 keeps of an array under current scaling, in float64.

    Each index of the axes `apart` has its own scale.
    """
    dtype = recipe.format_of(operand)
    amax = reference.amax(x)
    if apart:
        others = tuple(i for i in range(x.ndim) if i not in apart)
        amax = np.abs(x).max(axis=others, keepdims=True)
    scale = reference.scale_from_amax(amax, dtype, **recipe.scale_options)
    codes = reference.quantize(x, scale, dtype)
    return codes.astype("float64") * scale.astype("float64")


def whole(values, scale, dtype="float8_e4m3fn"):
    """An operand with one scale, (1, 1, 1), in the axes of its tensor."""
    return Quantized(values, scale, Quantization(format=dtype))


def read(equation, operand, quantized, second=False):
    """What the first or the second matmul reads of an operand."""
    contraction = contractions.Einsum(equation)
    home = contraction.read(operand, quantized)
    return contraction.transposed(home) if second else home


def three_products(equation, kernel, x, w, g, dtypes):
    """Forward and both gradients, of the dtypes.

    Args:
        equation: Explicit.
        kernel: What multiplies.
        x: The quantized inputs, in the axes of their tensor.
        w: The quantized kernel, likewise.
        g: The quantized output gradient, likewise.
        dtypes: Of the three results.
    """
    contraction = contractions.Einsum(equation)
    shapes = tuple(x.values.shape), tuple(w.values.shape)

    def product(matmul, a, b, dtype):
        return contraction.product(matmul, kernel, a, b, shapes, dtype)

    def of(operand, quantized, second=False):
        return read(equation, operand, quantized, second)

    return (
        product("forward", of("inputs", x), of("kernel", w), dtypes[0]),
        product(
            "inputs_grad",
            of("outputs_grad", g),
            of("kernel", w, second=True),
            dtypes[1],
        ),
        product(
            "kernel_grad",
            of("inputs", x, second=True),
            of("outputs_grad", g, second=True),
            dtypes[2],
        ),
    )


def forward_product(equation, kernel, x, w, dtype):
    """The forward product alone."""
    shapes = tuple(x.values.shape), tuple(w.values.shape)
    a, b = read(equation, "inputs", x), read(equation, "kernel", w)
    contraction = contractions.Einsum(equation)
    return contraction.product("forward", kernel, a, b, shapes, dtype)


def shapes_of(equation, sizes):
    """The shapes of the three terms."""
    terms = equations.split(equation)
    return [tuple(sizes[c] for c in term) for term in terms]
