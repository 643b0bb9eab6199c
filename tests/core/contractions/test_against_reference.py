"""Layers give what NumPy says, under each recipe and in each equation."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from keras_policy_ext import recipes, reference
from keras_policy_ext.ext.stochastic.counting import number_in_call
from keras_policy_ext.ext.stochastic.rounding import key_of_use
from keras_policy_ext.recipes import Quantization, Tile
from products import Contract
from steps import gradients, no_grad, numpy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(recipes.Recipe):
    """Tiles so small that the order of merged axes tells."""

    name: ClassVar[str] = "small_tiles_of_a_test"
    granularity: ClassVar[str] = "blockwise"

    def quantization(self, operand, matmul):
        return Quantization(format="float8_e4m3fn", tile=Tile(2, 4))


SIZES = {"a": 3, "b": 5, "c": 33, "d": 40, "g": 2, "k": 18}
EQUATIONS = [
    "ac,cd->ad",
    "abc,cd->abd",
    "abc,cd->bad",
    "abc,cdk->abkd",
    "abck,kcd->abd",
    "gac,gcd->gad",
    "abc,cd->ad",
    "ac,cbd->ad",
]
RECIPES = [
    recipes.CurrentScaling(),
    recipes.RowwiseScaling(),
    recipes.RowwiseScaling(power_of_two=True),
    recipes.RowwiseScaling(kernel_grad="high_precision"),
    recipes.BlockScaling(),
    recipes.BlockScaling(power_of_two=True),
    recipes.MXFP8Scaling(),
    recipes.MXFP8Scaling(rounding="floor"),
    recipes.NVFP4Scaling(stochastic_rounding=False),
    recipes.NVFP4Scaling(seed=5),
    recipes.NVFP4Scaling(four_over_six=True, seed=5),
    Small(),
]


def operands(equation):
    """Of few bits, so that an axis has one sum in any order.

    Not integers: among their quotients are many ties, which tell whether a
    compiler divides exactly and not what this test is about.
    """
    first, second, result = equation.replace("->", ",").split(",")
    rng = np.random.default_rng(0)
    return [
        np.float32(np.rint(rng.normal(0, 999, [SIZES[c] for c in term])))
        / np.float32(1024)
        for term in (first, second, result)
    ]


@pytest.mark.full_except(
    "abc,cdk->abkd-current", "abc,cdk->abkd-rowwise", "gac,gcd->gad-current"
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.spec)
@pytest.mark.parametrize(
    "equation", mostly(EQUATIONS, "abc,cdk->abkd", "gac,gcd->gad")
)
def test_all_three_products_are_those_of_the_reference(equation, recipe):
    x, w, g = operands(equation)
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    layer = Contract(equation, w.shape, dtype=policy)
    layer.build(x.shape)
    with no_grad():
        layer.kernel.assign(w)
    weights = ops.convert_to_tensor(g)
    # Compiled as a whole, g would be a constant, and XLA multiplies by the
    # reciprocal of a constant scale: these integers are full of ties.
    y, dx, (dw, *_) = gradients(
        layer, x, lambda y: ops.sum(ops.multiply(y, weights))
    )
    zero = ops.convert_to_tensor(0, "int32")
    states = layer.float8_state.matrices
    kernel = number_in_call(states[0]) if states else 0
    key = int(key_of_use(zero, 5, 0, kernel))  # of the first step
    is_bank = equation.startswith("g") and recipe.granularity == "tensorwise"
    how = recipe, key, is_bank
    expected = reference.einsum(equation, x, w, g, *how)[:3]
    for got, exact in zip((y, dx, dw), expected, strict=True):
        found = np.float64(numpy(ops.cast(got, "float32")))
        noise = np.mean((found - exact) ** 2)
        # One wrong code of a hundred thousand is more than that.
        assert np.sqrt(noise / np.mean(np.float64(exact) ** 2)) < 1e-6
