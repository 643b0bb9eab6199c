"""The truth of recipes with finer scales, judged by peers and by itself."""

import dataclasses

import numpy as np
import pytest

from keras_policy_ext import reference
from keras_policy_ext.ext.reference import contraction
from keras_policy_ext.recipes import (
    MATMULS,
    OPERANDS,
    BlockScaling,
    CurrentScaling,
    MXFP8Scaling,
    NVFP4Scaling,
    Quantization,
    RowwiseScaling,
    Tile,
    matmuls_of,
    read_transposed,
)
from reference_numbers import GOLDENS

pytestmark = pytest.mark.any_backend

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
FINER = [
    RowwiseScaling(),
    RowwiseScaling(power_of_two=True),
    RowwiseScaling(kernel_grad="high_precision"),
    BlockScaling(),
    BlockScaling(power_of_two=True),
    MXFP8Scaling(),
    MXFP8Scaling(rounding="floor"),
    NVFP4Scaling(),
    NVFP4Scaling(hadamard=False, stochastic_rounding=False),
    NVFP4Scaling(four_over_six=True),
]
finer = pytest.mark.parametrize("recipe", FINER, ids=lambda r: r.spec)


@pytest.fixture(scope="module")
def te():
    with np.load(GOLDENS / "block_quantizers_te.npz") as file:
        return dict(file)


def tensors(seed=0, batch=40, inputs=33, outputs=50):
    rng = np.random.default_rng(seed)
    shapes = (batch, inputs), (inputs, outputs), (batch, outputs)
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


def relative_rms(a, b):
    a, b = np.float64(a), np.float64(b)
    return np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))


def asked(x, key=None, **options):
    """The quantization of one matrix, without a batch."""
    return reference.quantize_matrices(
        np.float32(x)[None], Quantization(**options), key
    )


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Peers


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("tensorwise", CurrentScaling()),
        ("rowwise", RowwiseScaling(power_of_two=True)),
        (
            "rowwise_with_gw_hp",
            RowwiseScaling(power_of_two=True, kernel_grad="high_precision"),
        ),
    ],
)
def test_all_three_matmuls_are_those_of_torchao(name, recipe):
    with np.load(GOLDENS / "linear_torchao.npz") as golden:
        result = reference.linear(
            golden["x"], golden["kernel"], golden["g"], recipe
        )
        pairs = zip(("y", "dx", "dkernel"), result[:3], strict=True)
        for key, value in pairs:
            # What is left is the order in which it adds up in float32.
            assert relative_rms(value, golden[f"{name}/{key}"]) < 3e-7


@pytest.mark.parametrize("tile", [(1, 128), (128, 128)])
@pytest.mark.parametrize("rounding", ["up", "nearest"])
def test_blocks_are_those_of_transformer_engine_to_the_bit(te, tile, rounding):
    found = asked(
        te["x_256x384"], format=E4M3, tile=Tile(*tile), scale_rounding=rounding
    )
    up = rounding == "up"
    key = f"blk_256x384_float8_e4m3fn_{tile[0]}x{tile[1]}_p{up:d}"
    same(found.codes[0].view(np.uint8), te[f"{key}_q"])
    same(found.scales[0], te[f"{key}_sinv"])
    plain = reference.quantize_block(te["x_256x384"], E4M3, tile, up)
    same(plain.scales, te[f"{key}_sinv"])


@pytest.mark.parametrize(
    ("rounding", "key"), [("up", "mx"), ("floor", "mxfloor")]
)
def test_mx_is_that_of_transformer_engine_to_the_bit(te, rounding, key):
    found = asked(
        te["x_256x384"],
        format=E4M3,
        tile=Tile(1, 32),
        scale_format="float8_e8m0fnu",
        scale_rounding=rounding,
    )
    same(found.codes[0].view(np.uint8), te[f"{key}_q"])
    same(found.scales[0].view(np.uint8), te[f"{key}_s"])


NVFP4 = {"format": E2M1, "scale_format": E4M3}


@pytest.mark.parametrize("rows", [1, 16])
def test_nvfp4_is_that_of_transformer_engine_to_the_bit(te, rows):
    found = asked(te["x_nv"], tile=Tile(rows, 16), **NVFP4)
    same(found.codes[0].astype(np.float32), te[f"nv_{rows}_val"])
    sf = found.scales[0].view(np.uint8).repeat(rows, axis=0)
    same(sf, te[f"nv_{rows}_sf"])
    assert found.tensor_scale == te[f"nv_{rows}_amax"][0] / np.float32(2688)


def test_the_transform_before_nvfp4_is_that_of_transformer_engine(te):
    same(reference.hadamard(np.eye(16)), te["nv_rht_H"] / 4)
    found = asked(te["x_nv"].T, tile=Tile(1, 16), hadamard=16, **NVFP4)
    same(found.codes[0].astype(np.float32), te["nv_rht_col_val"])
    same(found.scales[0].view(np.uint8), te["nv_rht_col_sf"])


# Once or twice


def kinds(recipe):
    return {
        (o, m): recipe.quantization(o, m)
        for m, operands in MATMULS.items()
        for o in operands
    }


@finer
def test_an_operand_is_quantized_once_where_the_rule_says(recipe, monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        return reference.quantize_matrices(*args)

    monkeypatch.setattr(contraction, "quantize_matrices", counted)
    result = reference.linear(*tensors(), recipe, key=5)
    wanted = {k for k, q in kinds(recipe).items() if q is not None}
    assert set(result.matrices) == wanted
    once = [
        read_transposed(*(recipe.quantization(o, m) for m in matmuls_of(o)))
        for o in OPERANDS
    ]
    assert len(calls) == len(wanted) - sum(once)


def test_a_kernel_of_square_tiles_is_quantized_once():
    for recipe, number in ((BlockScaling(), 128), (NVFP4Scaling(), 16)):
        result = reference.linear(*tensors(), recipe, key=5)
        forward = result.matrices["kernel", "forward"]
        grad = result.matrices["kernel", "inputs_grad"]
        same(forward.codes[0].T, grad.codes[0])
        same(forward.scales[0].T, grad.scales[0])
        assert forward.tile == Tile(number, number)


class Own:
    """A recipe of one quantization, as anyone may write one."""

    history_length = 0

    def __init__(self, quantization):
        self.all = quantization

    def quantization(self, operand, matmul):
        q = self.all
        return q(operand, matmul) if callable(q) else q


def test_stochastic_values_that_are_quantized_once_have_one_set_of_bits():
    q = Quantization(format=E4M3, rounding="stochastic")
    result = reference.linear(*tensors(), Own(q), key=1)
    one = result.matrices["outputs_grad", "inputs_grad"]
    two = result.matrices["outputs_grad", "kernel_grad"]
    same(one.codes[0].T, two.codes[0])
    square = dataclasses.replace(q, tile=Tile(1, 8))
    result = reference.linear(*tensors(), Own(square), key=1)
    one = result.matrices["outputs_grad", "inputs_grad"]
    two = result.matrices["outputs_grad", "kernel_grad"]
    assert np.any(two.codes[0] != one.codes[0].T)


def test_a_transform_before_each_matmul_is_along_the_axis_that_it_sums():
    q = Quantization(format=E4M3, tile=Tile(16, 16), hadamard=16)
    result = reference.linear(*tensors(), Own(q))
    shapes = {k: v.codes.shape[1:] for k, v in result.matrices.items()}
    assert shapes["kernel", "forward"] == (50, 48)
    assert shapes["kernel", "inputs_grad"] == (33, 64)


def test_every_operand_of_rowwise_has_scales_along_the_axis_that_is_summed():
    result = reference.linear(*tensors(), RowwiseScaling())
    shapes = {k: v.scales.shape for k, v in result.matrices.items()}
    assert shapes == {
        ("inputs", "forward"): (1, 40, 1),
        ("kernel", "forward"): (1, 50, 1),
        ("outputs_grad", "inputs_grad"): (1, 40, 1),
        ("kernel", "inputs_grad"): (1, 33, 1),
        ("inputs", "kernel_grad"): (1, 33, 1),
        ("outputs_grad", "kernel_grad"): (1, 50, 1),
    }


def test_a_matmul_in_high_precision_multiplies_what_was_given():
    x, kernel, g = tensors()
    recipe = RowwiseScaling(kernel_grad="high_precision")
    result = reference.linear(x, kernel, g, recipe)
    exact = np.float64(x).T @ np.float64(g)
    same(result.kernel_grad, exact.astype(np.float32))
    assert result.matrices["kernel", "inputs_grad"].scales.shape == (1, 1, 1)
    assert relative_rms(result.y, x @ kernel) > 1e-3


@finer
def test_a_matmul_is_the_product_of_what_it_reads(recipe):
    x, kernel, g = tensors()
    result = reference.linear(x, kernel, g, recipe, key=9)
    m = {k: v.dequantize()[0] for k, v in result.matrices.items()}
    y = m["inputs", "forward"] @ m["kernel", "forward"].T
    dx = m["outputs_grad", "inputs_grad"] @ m["kernel", "inputs_grad"].T
    assert relative_rms(result.y, y) < 1e-7
    assert relative_rms(result.inputs_grad, dx) < 1e-7
    if ("inputs", "kernel_grad") in m:
        dw = m["inputs", "kernel_grad"] @ m["outputs_grad", "kernel_grad"].T
        assert relative_rms(result.kernel_grad, dw) < 1e-7


@finer
def test_each_matmul_is_as_near_as_its_format_allows(recipe):
    x, kernel, g = tensors(1, 64, 64, 64)
    result = reference.linear(x, kernel, g, recipe, key=9)
    least = 13 if recipe.name == "nvfp4" else 25
    for got, exact in zip(
        result[:3], (x @ kernel, g @ kernel.T, x.T @ g), strict=True
    ):
        assert reference.sqnr_db(exact, got) > least


def test_codes_and_scales_by_operand_are_those_of_whole_tensors():
    result = reference.linear(*tensors(), CurrentScaling())
    assert result.quantized["kernel"].shape == (33, 50)
    same(
        result.scales["inputs"],
        result.matrices["inputs", "forward"].scales[0, 0, 0],
    )
    assert not reference.linear(*tensors(), BlockScaling()).quantized
    left_out = CurrentScaling(forward="high_precision")
    again = reference.linear(*tensors(), left_out)
    for operand in OPERANDS:
        same(again.quantized[operand], result.quantized[operand])


# Not finite


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@finer
def test_what_is_not_finite_saturates_forward_and_marks_gradients(
    recipe, value
):
    x, kernel, g = tensors()
    x[3, 5] = value
    result = reference.linear(x, kernel, g, recipe, key=9)
    assert np.isnan(result.y[3]).all() == np.isnan(value)
    others = np.delete(result.y, 3, axis=0)
    assert np.isfinite(others).all()
    assert np.isnan(result.kernel_grad).any() or (
        recipe.kernel_grad == "high_precision"
    )
    assert np.isfinite(result.inputs_grad).all()
    finite = result.matrices["inputs", "forward"]
    assert np.isfinite(finite.scales.astype(np.float32)).all()


@pytest.mark.parametrize("recipe", [CurrentScaling(), *FINER], ids=str)
def test_a_gradient_that_is_not_finite_reaches_both_others(recipe):
    x, kernel, g = tensors()
    g[3, 5] = np.inf
    result = reference.linear(x, kernel, g, recipe, key=9)
    assert np.isfinite(result.y).all()
    assert np.isnan(result.inputs_grad[3]).all()
    bad = ~np.isfinite(result.kernel_grad)
    assert bad[:, 5].all()


def test_a_kernel_that_is_quantized_once_is_marked_where_it_is_read_again():
    x, kernel, g = tensors()
    kernel[0, 0] = np.inf
    for recipe in (CurrentScaling(), BlockScaling(), NVFP4Scaling()):
        result = reference.linear(x, kernel, g, recipe, key=9)
        assert np.isfinite(result.y).all()
        assert np.isnan(result.inputs_grad[:, 0]).all()
        assert np.isfinite(result.kernel_grad).all()
