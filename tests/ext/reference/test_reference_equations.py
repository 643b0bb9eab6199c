"""The truth of equations: matrices, batches and axes of one operand."""

import numpy as np
import pytest

from keras_policy_ext import reference
from keras_policy_ext.recipes import (
    BlockScaling,
    CurrentScaling,
    MXFP8Scaling,
    NVFP4Scaling,
    Quantization,
    RowwiseScaling,
    Tile,
)

pytestmark = pytest.mark.any_backend

SIZES = {"a": 3, "b": 4, "c": 5, "d": 6, "h": 2, "k": 7, "s": 3, "t": 4}

EQUATIONS = [
    "ab,bc->ac",
    "abd,dk->abk",
    "abd,dk->bak",
    "abd,dhk->abhk",
    "abhk,hkd->abd",
    "abhk,khd->adb",
    "bhsd,bhtd->bhst",
    "bshd,bthd->bhst",
    "bhst,bhtd->bhsd",
    "ab,ab->ab",
    "ab,cd->abcd",
    "ab,ab->",
    "abc,bd->ad",
    "ab,bcd->ac",
    "hab,hbc->hac",
]
equations = pytest.mark.parametrize("equation", EQUATIONS)
RECIPES = [
    CurrentScaling(),
    RowwiseScaling(power_of_two=True),
    BlockScaling(power_of_two=False),
    MXFP8Scaling(),
    NVFP4Scaling(),
]


class Nothing:
    """No matmul is quantized."""

    history_length = 0

    def quantization(self, operand, matmul):
        return None


class Own(Nothing):
    def __init__(self, q):
        self.q = q

    def quantization(self, operand, matmul):
        return self.q


def operands(equation, seed=0, whole=False):
    first, _, rest = equation.partition(",")
    second, _, result = rest.partition("->")
    rng = np.random.default_rng(seed)
    draw = rng.integers if whole else rng.normal
    arguments = (-9, 9) if whole else (0, 1)
    return [
        np.float32(draw(*arguments, [SIZES[c] for c in letters]))
        for letters in (first, second, result)
    ]


def gradients(equation, x, kernel, g):
    """By the adjoint: numpy.einsum, and axes of one operand broadcast."""
    left, right = equation.split("->")
    first, second = left.split(",")
    ones = {c: np.ones(SIZES[c]) for c in first + second}

    def gradient(wanted, other, value):
        alone = [c for c in wanted if c not in other + right]
        inputs = ",".join([right, other, *alone])
        return np.einsum(
            f"{inputs}->{wanted}", g, value, *(ones[c] for c in alone)
        )

    return gradient(first, second, kernel), gradient(second, first, x)


@equations
def test_without_quantization_it_is_the_equation_and_its_gradients(equation):
    x, kernel, g = operands(equation, whole=True)
    result = reference.einsum(equation, x, kernel, g, Nothing())
    exact = np.einsum(equation, x, kernel)
    np.testing.assert_array_equal(result.y, exact)
    dx, dw = gradients(equation, *map(np.float64, (x, kernel, g)))
    np.testing.assert_array_equal(result.inputs_grad, dx)
    np.testing.assert_array_equal(result.kernel_grad, dw)
    assert result.y.dtype == np.float32
    assert not result.matrices


@equations
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_recipe_is_near_the_equation(equation, recipe):
    x, kernel, g = operands(equation)
    result = reference.einsum(equation, x, kernel, g, recipe, key=1)
    exact = [np.einsum(equation, x, kernel), *gradients(equation, x, kernel, g)]
    least = 6 if recipe.name == "nvfp4" else 17
    for got, wanted in zip(result[:3], exact, strict=True):
        assert got.shape == wanted.shape
        assert reference.sqnr_db(wanted, got) > least


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_a_batch_is_its_members_one_by_one(recipe):
    """Where their tensors have one scale, and nothing is random."""
    if recipe.name == "nvfp4":
        recipe = NVFP4Scaling(stochastic_rounding=False, hadamard=False)
    x, kernel, g = operands("bhsd,bhtd->bhst")
    for tensor in (x, kernel, g):
        tensor[:, :, 0, 0] = 8.0
    whole = reference.einsum("bhsd,bhtd->bhst", x, kernel, g, recipe)
    for b, h in np.ndindex(*x.shape[:2]):
        one = reference.einsum(
            "sd,td->st", x[b, h], kernel[b, h], g[b, h], recipe
        )
        np.testing.assert_array_equal(whole.y[b, h], one.y)
        np.testing.assert_array_equal(whole.inputs_grad[b, h], one.inputs_grad)
        np.testing.assert_array_equal(whole.kernel_grad[b, h], one.kernel_grad)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_merged_axes_are_those_of_a_dense_on_reshaped_tensors(recipe):
    x, kernel, g = operands("abd,dhk->abhk")
    result = reference.einsum("abd,dhk->abhk", x, kernel, g, recipe, key=3)
    flat = reference.linear(
        x.reshape(12, 6), kernel.reshape(6, 14), g.reshape(12, 14), recipe, 3
    )
    np.testing.assert_array_equal(result.y.reshape(12, 14), flat.y)
    np.testing.assert_array_equal(
        result.inputs_grad.reshape(12, 6), flat.inputs_grad
    )
    np.testing.assert_array_equal(
        result.kernel_grad.reshape(6, 14), flat.kernel_grad
    )


def test_rows_are_in_the_order_of_the_inputs_in_all_three_matmuls():
    q = Quantization(format="float8_e4m3fn", tile=Tile(4, 4))
    x, kernel, g = operands("abd,dk->bak")
    result = reference.einsum("abd,dk->bak", x, kernel, g, Own(q))
    g = g.transpose(1, 0, 2)
    flat = reference.linear(x.reshape(12, 6), kernel, g.reshape(12, 7), Own(q))
    y = result.y.transpose(1, 0, 2).reshape(12, 7)
    np.testing.assert_array_equal(y, flat.y)
    np.testing.assert_array_equal(
        result.inputs_grad.reshape(12, 6), flat.inputs_grad
    )
    np.testing.assert_array_equal(result.kernel_grad, flat.kernel_grad)


def test_columns_are_in_the_order_of_the_result():
    q = Quantization(format="float8_e4m3fn", tile=Tile(4, 4))
    x, kernel, g = operands("abd,dhk->abkh")
    result = reference.einsum("abd,dhk->abkh", x, kernel, g, Own(q))
    flat = reference.linear(
        x.reshape(12, 6),
        kernel.transpose(0, 2, 1).reshape(6, 14),
        g.reshape(12, 14),
        Own(q),
    )
    np.testing.assert_array_equal(result.y.reshape(12, 14), flat.y)
    dw = result.kernel_grad.transpose(0, 2, 1).reshape(6, 14)
    np.testing.assert_array_equal(dw, flat.kernel_grad)


def test_contracted_axes_are_in_the_order_of_the_inputs():
    q = Quantization(format="float8_e4m3fn", tile=Tile(1, 4))
    x, kernel, g = operands("abhk,khd->abd")
    result = reference.einsum("abhk,khd->abd", x, kernel, g, Own(q))
    flat = reference.linear(
        x.reshape(12, 14),
        kernel.transpose(1, 0, 2).reshape(14, 6),
        g.reshape(12, 6),
        Own(q),
    )
    np.testing.assert_array_equal(result.y.reshape(12, 6), flat.y)


def test_a_tile_never_runs_across_the_batch():
    q = Quantization(format="float8_e4m3fn", tile=Tile(None, 128))
    x, kernel, g = operands("hab,hbc->hac")
    result = reference.einsum("hab,hbc->hac", x, kernel, g, Own(q))
    for found in result.matrices.values():
        assert found.scales.shape == (2, 1, 1)
    whole = reference.einsum(
        "hab,hbc->hac", x, kernel, g, Own(Quantization(format="float8_e4m3fn"))
    )
    for found in whole.matrices.values():
        assert found.scales.shape == (1, 1, 1)


def test_an_axis_of_one_operand_is_summed_before_it_is_quantized():
    x, kernel, g = operands("abc,bd->ad")
    recipe = CurrentScaling()
    result = reference.einsum("abc,bd->ad", x, kernel, g, recipe)
    x = np.float32(x.sum(2, dtype=np.float64))
    summed = reference.einsum("ab,bd->ad", x, kernel, g, recipe)
    np.testing.assert_array_equal(result.y, summed.y)
    np.testing.assert_array_equal(result.kernel_grad, summed.kernel_grad)
    for c in range(SIZES["c"]):
        np.testing.assert_array_equal(
            result.inputs_grad[:, :, c], summed.inputs_grad
        )
    assert set(result.quantized) == {"kernel", "outputs_grad"}


@equations
def test_codes_and_scales_by_operand_give_the_operand(equation):
    x, kernel, g = operands(equation)
    result = reference.einsum(equation, x, kernel, g, CurrentScaling())
    given = {"inputs": x, "kernel": kernel, "outputs_grad": g}
    for operand, codes in result.quantized.items():
        scale = result.scales[operand]
        expected = reference.quantize(
            given[operand], scale, CurrentScaling().format_of(operand)
        )
        np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize(
    "equation",
    ["ab,bc", "ab->ab", "aab,bc->ac", "ab,bc->ad", "...a,ab->...b", "a,b->c,d"],
)
def test_what_is_no_equation_is_refused(equation):
    with pytest.raises(ValueError, match=r"Replace .* by letters"):
        reference.einsum(equation, [[1.0]], [[1.0]], [[1.0]], Nothing())


@pytest.mark.parametrize(
    ("x", "kernel", "g", "operand"),
    [
        ((2, 3), (4, 5), (2, 5), "kernel"),
        ((2, 3), (3, 5), (2, 1), "outputs_grad"),
        ((2, 3, 1), (3, 5), (2, 5), "inputs"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, kernel, g, operand):
    arrays = (np.ones(shape) for shape in (x, kernel, g))
    with pytest.raises(ValueError, match=f"{operand}' does not fit"):
        reference.einsum("ab,bc->ac", *arrays, Nothing())
