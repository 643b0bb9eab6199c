"""Matmuls that a recipe leaves out of float8, and those that it does not."""

import contextlib
import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from keras_policy_ext import contractions, recipes
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import MATMULS, Tile
from steps import gradients, no_grad, numpy
from ways import BACKEND, FASTEST, array, compiled

RECIPES = [
    recipes.DelayedScaling(amax_history_length=2),
    recipes.CurrentScaling(),
    recipes.RowwiseScaling(),
    recipes.BlockScaling(),
    recipes.MXFP8Scaling(),
    recipes.NVFP4Scaling(),
]
HIGH = "high_precision"


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# One matmul in high precision, the others as before


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeInInputsGrad(recipes.RowwiseScaling):
    """Rows, but for the kernel in `inputs_grad`."""

    name: ClassVar[str] = "whole_in_inputs_grad_of_a_test"

    def quantization(self, operand, matmul):
        asked = super().quantization(operand, matmul)
        if (operand, matmul) == ("kernel", "inputs_grad"):
            return dataclasses.replace(asked, tile=Tile())
        return asked


def products(recipe):
    """Outputs and gradients, by matmul; all of the same numbers."""
    plan = contractions.make_plan(
        contractions.Einsum("ab,bc->ac"), recipe, "float32", "float32", True
    )
    state, shape = [], source_of(recipe).state_shape
    if shape is not None:
        state = [np.zeros(shape, "float32")]
        state[0][:, 0] = VALID_MARK

    def run(x, w, g, *state):
        y, residuals = plan.bound.forward(x, w, state, observe=True)
        return (y, *plan.bound.backward(residuals, g, state)[:2])

    arrays = normal(0, 24, 40), normal(1, 40, 20), normal(2, 24, 20)
    found = compiled(run, FASTEST)(
        *map(ops.convert_to_tensor, [*arrays, *state])
    )
    return dict(zip(MATMULS, map(array, found), strict=True))


def exact():
    x, w, g = (
        each.astype("float64")
        for each in (normal(0, 24, 40), normal(1, 40, 20), normal(2, 24, 20))
    )
    return dict(zip(MATMULS, (x @ w, g @ w.T, x.T @ g), strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    mostly(RECIPES, RECIPES[2], RECIPES[5]),
    ids=lambda recipe: recipe.name,
)
@pytest.mark.slow_except("rowwise")
def test_only_the_named_matmul_changes(recipe):
    before = products(recipe)
    for named in MATMULS:
        found = products(dataclasses.replace(recipe, **{named: HIGH}))
        for matmul in MATMULS:
            expected = before[matmul]
            in_rows = isinstance(recipe, recipes.RowwiseScaling)
            if matmul == named:
                plain = exact()[matmul]
                np.testing.assert_allclose(found[matmul], plain, atol=2e-5)
                assert np.abs(expected - plain).max() > 1e-3
                continue
            if in_rows and (named, matmul) == ("kernel_grad", "inputs_grad"):
                assert np.any(found[matmul] != expected)
                expected = products(WholeInInputsGrad())[matmul]
            np.testing.assert_array_equal(found[matmul], expected)


# None of them in float8


@contextlib.contextmanager
def float64():
    """JAX has it only if asked for."""
    if BACKEND != "jax":
        yield
        return
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def wide(x):
    return ops.convert_to_tensor(x, "float64")


NONE_OF_THEM = dict.fromkeys(MATMULS, HIGH)


def einsum_dense(equation, shape, policy):
    return kpe.layers.EinsumDense(equation, shape, dtype=policy)


LAYERS = {
    "dense": (lambda p: kpe.layers.Dense(3, use_bias=False, dtype=p), (4, 5)),
    "heads": (lambda p: einsum_dense("abc,cde->abde", (3, 2, 2), p), (2, 3, 4)),
    "turned": (lambda p: einsum_dense("abc,cd->adb", (3, 3), p), (2, 3, 4)),
    "summed": (lambda p: einsum_dense("abc,cd->ad", (3,), p), (2, 3, 4)),
}


@pytest.mark.parametrize("name", mostly(LAYERS, "turned"))
def test_gradients_are_central_differences(name):
    """In float64, where nothing is quantized."""
    make, shape = LAYERS[name]
    plain = recipes.CurrentScaling(**NONE_OF_THEM)
    policy = kpe.Float8DTypePolicy("float64", recipe=plain)
    with float64():
        x = normal(0, *shape).astype("float64")
        layer = make(policy)
        layer.build(shape)
        w = normal(1, *layer.kernel.shape).astype("float64")
        with no_grad():
            layer.kernel.assign(w)
        outputs = numpy(layer(wide(x)))
        assert outputs.dtype == "float64"
        g = normal(2, *outputs.shape).astype("float64")
        g_ = wide(g)
        _, dx, (dw, *_) = gradients(layer, wide(x), lambda y: ops.sum(y * g_))

        def loss(x, w):
            with no_grad():
                layer.kernel.assign(w)
                y = layer(wide(x), training=False)
            return np.sum(numpy(y) * g)

        rng = np.random.default_rng(3)
        for _ in range(3):
            u, v = rng.normal(size=x.shape), rng.normal(size=w.shape)
            step = 2.0**-10
            along_x = loss(x + step * u, w) - loss(x - step * u, w)
            along_w = loss(x, w + step * v) - loss(x, w - step * v)
            slope_x = np.sum(numpy(dx) * u) * 2 * step
            slope_w = np.sum(numpy(dw) * v) * 2 * step
            np.testing.assert_allclose(along_x, slope_x, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(along_w, slope_w, rtol=1e-9, atol=1e-12)


# The forward pass alone in float8


@pytest.mark.full
@pytest.mark.parametrize(
    "recipe",
    mostly(RECIPES, RECIPES[5]),
    ids=lambda recipe: recipe.name,
)
def test_gradients_in_high_precision_are_those_of_the_operands(recipe):
    """As they are, not as the forward pass read them."""
    forward_only = dataclasses.replace(
        recipe, inputs_grad=HIGH, kernel_grad=HIGH
    )
    found = products(forward_only)
    plain = products(recipes.CurrentScaling(**NONE_OF_THEM))
    for matmul in ("inputs_grad", "kernel_grad"):
        np.testing.assert_array_equal(found[matmul], plain[matmul])
    np.testing.assert_array_equal(found["forward"], products(recipe)["forward"])
