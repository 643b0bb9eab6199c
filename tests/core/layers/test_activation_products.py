"""Products of two activations, as the two of an attention."""

import operator

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from attention_layers import (
    FLOAT32_TOLERANCE,
    SCORES,
    WEIGHTED_SUM,
    float32,
    half,
    policy,
)
from keras_policy_ext.recipes import CurrentScaling
from products import quantized
from steps import gradients, normal, numpy, relative_rms


class Product(kpe.layers.Float8Mixin, keras.layers.Layer):
    """An einsum of the two halves of its inputs, flattened."""

    def __init__(self, equation, shapes, **kwargs):
        super().__init__(**kwargs)
        self.equation = equation
        self.shapes = shapes
        self.built = True

    def call(self, inputs, training=None):
        size = np.prod(self.shapes[0])
        first = ops.reshape(inputs[:size], self.shapes[0])
        second = ops.reshape(inputs[size:], self.shapes[1])
        return self.float8_activations_einsum(self.equation, first, second)


SHAPES = {
    SCORES: ((2, 5, 3, 4), (2, 6, 3, 4)),
    WEIGHTED_SUM: ((2, 3, 6, 5), (2, 5, 3, 4)),
}

ACTIVATION_RECIPES = {
    "": CurrentScaling(),
    "delayed(fp8_format='e4m3')": CurrentScaling(fp8_format="e4m3"),
    "current(power_of_two=True)": CurrentScaling(power_of_two=True),
}


def product(equation, dtype, a, b, g):
    """Outputs and both gradients of the einsum, for the outputs' gradient."""
    layer = Product(equation, (a.shape, b.shape), dtype=dtype)
    x = np.concatenate([a.ravel(), b.ravel()])
    g = ops.convert_to_tensor(g)

    def loss(y):
        return ops.sum(ops.multiply(ops.cast(y, "float32"), g))

    y, dx, _ = gradients(layer, x, loss, compiled=True)
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    dx = float32(dx)
    da, db = dx[: a.size].reshape(a.shape), dx[a.size :].reshape(b.shape)
    return float32(y), da, db


def operands(equation):
    a, b = SHAPES[equation]
    a, b = normal(*a, seed=1), normal(*b, seed=2)
    # Tails that saturate under any scale but the tensor's own.
    return 30 * a, 1e-3 * b, normal(*np.einsum(equation, a, b).shape, seed=3)


@pytest.mark.full_except("-acbe,aecd->abcd-mixed_bfloat16")
@pytest.mark.parametrize(
    "spec, equation, source",
    [
        ("", SCORES, "float32"),
        ("", WEIGHTED_SUM, "mixed_bfloat16"),
        ("delayed(fp8_format='e4m3')", WEIGHTED_SUM, "float32"),
        ("current(power_of_two=True)", SCORES, "float32"),
    ],
)
def test_two_activations_are_contracted_as_numpy_says(spec, equation, source):
    recipe = ACTIVATION_RECIPES[spec]
    a, b, g = operands(equation)
    tolerance = FLOAT32_TOLERANCE
    if source == "mixed_bfloat16":
        a, b, g = half(a), half(b), half(g)
        tolerance = 2.0**-8  # the outputs are rounded to 8 bits
    dtype = policy(source, recipe=spec)
    found = product(equation, dtype, a, b, g)
    x = quantized(a, "inputs", recipe)
    w = quantized(b, "kernel", recipe)
    z = quantized(g, "outputs_grad", recipe)
    first, second, out = equation.replace("->", ",").split(",")
    expected = (
        np.einsum(equation, x, w),
        np.einsum(f"{out},{second}->{first}", z, w),
        np.einsum(f"{first},{out}->{second}", x, z),
    )
    for actual, wanted in zip(found, expected, strict=True):
        assert relative_rms(actual, wanted) < tolerance
    plain = np.einsum(equation, a, b)
    assert relative_rms(found[0], plain) > 100 * FLOAT32_TOLERANCE


def test_an_infinite_gradient_reaches_both_activations():
    a, b, g = operands(SCORES)
    g[0, 0, 0, 0] = np.inf
    _, da, db = product(SCORES, policy(), a, b, g)
    assert np.all(np.isnan(da)) and np.all(np.isnan(db))


def test_outputs_may_be_changed_in_place():
    found = []
    for change in (operator.add, operator.iadd):
        layer = Product(SCORES, SHAPES[SCORES], dtype=policy("float32"))
        x = normal(sum(map(np.prod, SHAPES[SCORES])))

        def loss(y, change=change):
            return ops.sum(ops.square(change(y, 1.0)))

        found.append(numpy(gradients(layer, x, loss, compiled=True)[1]))
    np.testing.assert_array_equal(*found)


def test_activations_that_do_not_fit_are_refused():
    layer = Product(SCORES, ((1, 2, 3, 4), (1, 2, 3, 5)), dtype=policy())
    with pytest.raises(ValueError, match="differ in axis 'd'"):
        layer(normal(24 + 30))
