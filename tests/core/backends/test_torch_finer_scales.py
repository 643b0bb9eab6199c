"""PyTorch's matmuls with scales finer than a tensor.

Those of rows run on a CPU. Those of blocks want a GPU: a stand-in reads their
arguments as PyTorch documents them, and tensors without data are checked as
those of a GPU are.
"""

import keras
import pytest

from keras_policy_ext import kernels
from keras_policy_ext.numerics.quantized import Quantized

if keras.backend.backend() != "torch":
    pytest.skip(
        f"torch's kernels; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F

from fake_gpus import fake, fake_cuda
from finer_scales import (
    E5M2,
    MX,
    PAIRS,
    ROW,
    SIZES,
    SQUARE,
    THIN,
    UNIT,
    WHOLE,
    asked,
    matrix,
)
from keras_policy_ext.backends import devices, emulated
from keras_policy_ext.backends.matmuls import Request
from keras_policy_ext.backends.torch import backend as torch_devices
from keras_policy_ext.backends.torch import casts
from keras_policy_ext.backends.torch import engine as torch_kernels
from keras_policy_ext.backends.torch.engine import ENGINE
from keras_policy_ext.backends.torch.scaled_mm import (
    ScaledMMOfBlocks,
    ScaledMMOfMX,
    ScaledMMOfRows,
    swizzled,
)
from keras_policy_ext.numerics.casting import encode_scales
from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import Tile

EMULATED = ENGINE.matmuls[-1]
ROWS = [name for name in PAIRS if name.startswith("rows")]
BLOCKS = ["blocks with squares", "blocks"]


def kernel_of(pair):
    if pair == "MX":
        return ScaledMMOfMX()
    return ScaledMMOfBlocks() if pair in BLOCKS else ScaledMMOfRows()


def operand(rows, terms, asked, seed):
    x = torch.tensor(matrix(rows, terms, seed))
    return quantize(x, asked, cast=casts.narrow_cast)[0]


def operands(pair, sizes):
    rows, terms, columns = sizes
    a, b = PAIRS[pair]
    made = operand(rows, terms, a, 0), operand(columns, terms, b, 1)
    return *made, kernel_of(pair)


def same_product(pair, sizes, dtype):
    """Fail unless the native product is the emulated one, but for its sum."""
    a, b, kernel = operands(pair, sizes)
    native = kernel.multiply(a, b, dtype, fast=True)
    assert native.dtype == getattr(torch, dtype)
    wide = [x.with_values(x.values.float()) for x in (a, b)]
    expected = EMULATED.multiply(*wide, "float32", fast=True).double()
    assert native.shape == expected.shape
    error = (native.double() - expected).abs()
    exact = expected.abs() * UNIT[dtype] + expected.abs().max() * 2.0**-20
    assert torch.all(error <= exact)


# Rows


@pytest.mark.parametrize("pair", ROWS)
def test_scales_of_rows_that_torch_does_not_take_come_after(monkeypatch, pair):
    monkeypatch.setattr(torch_devices, "scales_rows", lambda device: False)
    same_product(pair, (17, 260, 33), "bfloat16")


def kinds_of_calls(monkeypatch):
    """What `_scaled_mm` is asked for, from here on."""
    seen, scaled_mm = [], torch._scaled_mm

    def watched(a, b, *scales, **kwargs):
        kinds = ["RowWise" if each.dim() else "TensorWise" for each in scales]
        seen.append((*kinds, kwargs["out_dtype"]))
        return scaled_mm(a, b, *scales, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    return seen


def test_torch_takes_scales_of_rows_for_bfloat16_and_e4m3(monkeypatch):
    seen = kinds_of_calls(monkeypatch)
    for pair, dtype in (
        ("rows", "bfloat16"),
        ("rows, e5m2 first", "bfloat16"),
        ("rows with a tensor", "bfloat16"),
        ("rows, e5m2 second", "bfloat16"),
        ("rows", "float32"),
        ("rows", "float16"),
    ):
        a, b, kernel = operands(pair, (4, 16, 8))
        kernel.multiply(a, b, dtype, fast=False)
    rows = ("RowWise", "RowWise", torch.bfloat16)
    tensors = ("TensorWise", "TensorWise", torch.float32)
    assert seen == [rows] * 3 + [tensors] * 3


@pytest.mark.parametrize("row", [True, False])
def test_a_scale_that_is_not_finite_spoils_its_row_alone(monkeypatch, row):
    monkeypatch.setattr(torch_devices, "scales_rows", lambda device: row)
    a, b, kernel = operands("rows", (4, 16, 8))
    a.scale[0, 2] = float("nan")
    y = kernel.multiply(a, b, "bfloat16", fast=False)
    assert torch.isnan(y[0, 2]).all()
    assert torch.isfinite(y[0, [0, 1, 3]]).all()


CAPABILITIES = {  # Whether `scaled_mm` takes scales of rows there.
    (8, 9): True,
    (9, 0): True,
    (10, 0): True,
    (12, 0): True,
    (10, 3): False,
    (12, 1): False,
}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_where_torch_takes_scales_of_rows(monkeypatch, capability):
    fake(monkeypatch, capability)
    takes = torch_devices.scales_rows(torch.device("cuda"))
    assert takes == CAPABILITIES[capability]
    assert kernels.select("ab,bc->ac", "current").kind == "native"
    fake(monkeypatch, capability, architecture="gfx950")
    assert not torch_devices.scales_rows(torch.device("cuda"))


# Emulated in bfloat16


@pytest.fixture
def on_amx():
    with devices.pretend("cpu_bf16"):
        yield


@pytest.mark.parametrize("sizes", SIZES[2:], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_powers_of_two_are_emulated_in_bfloat16(monkeypatch, pair, sizes):
    read, product = [], EMULATED.product

    def watched(a, b):
        read.extend((a.dtype, b.dtype))
        return product(a, b)

    monkeypatch.setattr(EMULATED, "product", watched)
    a, b = (x.with_values(x.values.float()) for x in operands(pair, sizes)[:2])
    with devices.pretend("cpu_bf16"):
        found = EMULATED.multiply(a, b, "bfloat16", fast=True)
    wide = torch.float32 if "any scale" in pair else torch.bfloat16
    assert set(read) == {wide}
    exact = a.dequantize().double() @ b.dequantize().double().mT
    ideal = exact.float().bfloat16()
    error = (found.double() - exact).abs()
    allowed = exact.abs() * 2.0**-8 + exact.abs().max() * 2.0**-20
    assert torch.all(error <= allowed)
    # Rounded once: that sums have another order changes few of them.
    assert (found != ideal).double().mean() < 0.01


@pytest.mark.parametrize("pair", [*BLOCKS, "MX"])
def test_scales_of_blocks_in_the_values_are_emulated_alike(on_amx, pair):
    """As a plan hands operands over: their scales are multiplied in."""
    a, b = (
        emulated.folded(x.with_values(x.values.float()), False)
        for x in operands(pair, (17, 260, 33))[:2]
    )
    assert torch_kernels._fits_bfloat16(a, b)
    found = EMULATED.multiply(a, b, "bfloat16", fast=True).double()
    exact = a.values.double() @ b.values.double().mT
    allowed = exact.abs() * 2.0**-8 + exact.abs().max() * 2.0**-20
    assert torch.all((found - exact).abs() <= allowed)
    nearest = asked(Tile(1, 4), scale_rounding="nearest")
    x = quantize(torch.ones(1, 4, 8), nearest)[0]
    x = emulated.folded(x, False)
    assert not torch_kernels._fits_bfloat16(x, x)


# Blocks, read as PyTorch documents them


def stand_in(x, y, scale_a, kind_a, scale_b, kind_b, *swizzles, output_dtype):
    """`scaled_mm` with scales of blocks, as its documentation has it."""
    assert x.is_contiguous()
    assert y.t().is_contiguous()
    assert all(size % 16 == 0 for size in (*x.shape, *y.shape))
    readers = {
        "BlockWise1x128": thin_blocks,
        "BlockWise128x128": square_blocks,
        "BlockWise1x32": mx_blocks,
    }
    first = readers[kind_a.name](scale_a, x)
    second = readers[kind_b.name](scale_b, y.t())
    if kind_a.name == "BlockWise1x32":
        assert [each.name for each in swizzles] == ["SWIZZLE_32_4_4"] * 2
    return ((x.double() * first) @ (y.double() * second.t())).to(output_dtype)


def thin_blocks(scale, x):
    rows, terms = x.shape
    assert scale.shape == (rows, terms // 128)
    assert scale.stride(0) == 1
    return scale.double().repeat_interleave(128, 1)


def square_blocks(scale, x):
    rows, terms = x.shape
    assert scale.shape == (-(-terms // 512) * 4, rows // 128)
    assert scale.stride(0) == 1
    spread = scale.double().repeat_interleave(128, 0)[:terms]
    return spread.repeat_interleave(128, 1).t()


def mx_blocks(scale, x):
    rows, terms = x.shape
    assert terms % 32 == 0
    tiles = -(-terms // 128)
    codes = scale.view(torch.uint8).numpy()
    assert codes.size == -(-rows // 128) * 128 * tiles * 4
    found = np.empty((rows, terms // 32), "float64")
    for i, j in np.ndindex(*found.shape):
        at = byte_of(i, j, tiles)
        found[i, j] = 2.0 ** (int(codes[at]) - 127)
    return torch.tensor(found).repeat_interleave(32, 1)


def byte_of(row, block, tiles):
    """Where cuBLAS looks for a scale, by the formula of its documentation."""
    tile = (row // 128) * tiles + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("pair", ["blocks with squares", "blocks", "MX"])
def test_scales_of_blocks_are_where_torch_reads_them(
    monkeypatch, pair, sizes, dtype
):
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    same_product(pair, sizes, dtype)


def test_scales_of_a_kernel_read_transposed(monkeypatch):
    """As `inputs_grad` reads a kernel that was quantized once."""
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    a, _, kernel = operands("blocks with squares", (17, 260, 700))
    w = operand(260, 700, SQUARE, 1).transposed
    found = kernel.multiply(a, w, "float32", fast=False)
    expected = a.dequantize() @ w.dequantize().mT
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_a_block_that_is_not_finite_spoils_its_row_alone(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    a, b, kernel = operands("blocks", (4, 260, 8))
    a.scale[0, 2, 1] = float("nan")
    y = kernel.multiply(a, b, "float32", fast=False)
    assert torch.isnan(y[0, 2]).all()
    assert torch.isfinite(y[0, [0, 1, 3]]).all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (300, 9)])
def test_scales_of_mx_blocks_lie_as_cublas_wants_them(shape):
    rows, blocks = shape
    scales = torch.arange(rows * blocks).reshape(shape) % 255 + 1
    found = swizzled(scales.to(torch.uint8)).numpy()
    assert found.size == -(-rows // 128) * -(-blocks // 4) * 512
    for i, j in np.ndindex(*shape):
        assert found[byte_of(i, j, -(-blocks // 4))] == scales[i, j]
    assert np.count_nonzero(found) == rows * blocks


def test_powers_of_two_are_their_exponents():
    codes = np.arange(256).astype("uint8")
    powers = codes.view(ml_dtypes.float8_e8m0fnu).astype("float32")
    found = encode_scales(torch.tensor(powers), "float8_e8m0fnu")
    np.testing.assert_array_equal(found.numpy(), codes)
    negative = torch.tensor(np.float32(-np.nan))
    assert encode_scales(negative, "float8_e8m0fnu") == 255


# Blocks, as tensors without data are checked


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_accepts_the_arguments_for_cuda(monkeypatch, pair, sizes, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    real = operands(pair, sizes)
    with fake_cuda() as empty:
        a, b = (
            Quantized(
                empty(*x.values.shape, dtype=x.quantization.format),
                empty(*x.scale.shape, dtype="float32"),
                x.quantization,
            )
            for x in real[:2]
        )
        y = real[2].multiply(a, b, dtype, fast=True)
        rows, _, columns = sizes
        assert y.shape == (1, rows, columns)
        assert y.dtype == getattr(torch, dtype)


WRONG = {
    "rows": lambda e: (e(32, 1), e(1, 47), "RowWise", "Float elements"),
    "blocks": lambda e: (
        *(e(32, 1), e(48, 1)),
        *("BlockWise1x128", "must have shape"),
    ),
    "MX": lambda e: (
        *(e(32, 2), e(48, 2)),
        *("BlockWise1x32", "for MX scaling"),
    ),
}


@pytest.mark.skipif(
    torch.__version__ >= (2, 14),
    reason="PyTorch 2.14 looks at the scales of tensors with data alone",
)
@pytest.mark.parametrize("pair", WRONG)
def test_fake_cuda_refuses_other_scales(pair):
    """Or else the test above would show nothing."""
    with fake_cuda() as empty:
        first, second, kind, message = WRONG[pair](
            lambda *shape: empty(*shape, dtype="float32")
        )
        kind = getattr(F.ScalingType, kind)
        x, y = empty(32, 256), empty(48, 256).t()
        with pytest.raises((RuntimeError, ValueError), match=message):
            F.scaled_mm(x, y, first, kind, second, kind)


# Which device has them


def choice(a, b, prefer="auto", batched=False):
    return ENGINE.select(Request("forward", a, b, batched, prefer, False))[1]


DEVICES = {  # capability and CUDA: why blocks and MX are not native there
    ((9, 0), "12.9"): (None, "(9, 0) has no matmul with scales of 32"),
    ((9, 0), "13.0"): (None, "(9, 0) has no matmul with scales of 32"),
    ((9, 0), "12.8"): (
        "want CUDA 12.9; torch is built for 12.8",
        "(9, 0) has no matmul with scales of 32",
    ),
    ((10, 0), "12.8"): ("(10, 0) has no matmul with scales of 128", None),
    ((10, 3), "13.0"): ("(10, 3) has no matmul with scales of 128", None),
    ((12, 0), "13.0"): ("of 128 numbers", "of 32 numbers"),
    ((8, 9), "13.0"): ("of 128 numbers", "of 32 numbers"),
    ((8, 0), "13.0"): ("has no float8 matmul", "has no float8 matmul"),
}


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_cards_have_their_scales_of_blocks(monkeypatch, device):
    fake(monkeypatch, device[0], cuda=device[1])
    of_blocks, of_mx = DEVICES[device]
    for pair in (*BLOCKS, "MX"):
        why = of_mx if pair == "MX" else of_blocks
        found = choice(*PAIRS[pair])
        assert found.native == (why is None)
        assert (why or "scaled_mm on CUDA, with scales of") in found.reason
    assert choice(ROW, WHOLE).native == (device[0] != (8, 0))


def test_a_cpu_has_scales_of_rows_if_asked_for():
    assert choice(ROW, WHOLE).reason == (
        "scaled_mm is slower than float32 on a CPU"
    )
    assert choice(ROW, WHOLE, "native").native
    for pair in ("blocks", "MX"):
        found = choice(*PAIRS[pair][:2], "native")
        assert not found.native
        assert "CUDA" in found.reason


def test_what_no_kernel_is_for_is_told(monkeypatch):
    fake(monkeypatch, (9, 0), cuda="13.0")
    assert choice(SQUARE, SQUARE).reason == (
        "no float8 matmul of torch has scales of blocks"
    )
    assert "scales of rows with" in choice(ROW, THIN).reason
    assert "a scale for a tensor" in choice(WHOLE, MX).reason
    assert "read float8_e4m3fn" in choice(asked(THIN.tile, E5M2), THIN).reason
    assert "no batched" in choice(ROW, ROW, batched=True).reason
    assert "kernels.prefer" in choice(THIN, THIN, "emulated").reason
    fake(monkeypatch, (10, 0), cuda="13.0")
    nearest = asked(Tile(1, 32), scale_rounding="nearest")
    assert "powers of two" in choice(nearest, MX).reason
