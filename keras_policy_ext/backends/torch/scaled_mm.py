"""PyTorch: kernels that call `scaled_mm` on float8 operands with scales.

There is one kernel for each kind of scales. Quantized operands are padded with
zeros to sizes that the hardware accepts. The requirements of devices are from
PyTorch's `aten/src/ATen/native/cuda/ScaledBlas.cpp`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.emulated import times_scales
from keras_policy_ext.backends.matmuls import (
    E8M0,
    MX_BLOCK,
    NativeMatmul,
    Request,
)
from keras_policy_ext.backends.torch import backend as torch_devices
from keras_policy_ext.backends.torch import casts
from keras_policy_ext.numerics.casting import encode_scales
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import Tile

ALIGNMENT = 16
"""Sizes must be multiples of this for `scaled_mm` on CUDA."""

BLOCK = 128
"""The number of elements along an edge of a block of `ScaledMMOfBlocks`."""

HALVES = (torch.bfloat16, torch.float16)
"""The result dtypes for which `scaled_mm` adds a bias of the same dtype."""


class ScaledMM(NativeMatmul):
    """A kernel: `scaled_mm` of two float8 matrices with one scale each.

    PyTorch's own tests (`test_scaled_matmul_cuda.py`) cover float32 results,
    and a bias in the dtype of a 16-bit result, on every GPU that has it.

    Args:
        bias: One value per column, added before rounding; or None.
    """

    def __init__(self, bias: Tensor | None = None):
        self._bias = bias

    @property
    def writes_float32(self) -> bool:
        """True if a float32 output is cheap; False on a CPU."""
        # On a CPU, results are rounded as those of emulated matmuls are: before
        # they become float32, and before the bias of `with_bias` is added.
        return torch_devices.here().maker != "cpu"

    def with_bias(self, bias: Tensor) -> ScaledMM | None:
        """Return a matmul kernel that adds a bias before it rounds.

        None on a CPU, and for a bias that is not in 16 bits.
        """
        on_cpu = torch_devices.here().maker == "cpu"
        return None if on_cpu or bias.dtype not in HALVES else ScaledMM(bias)

    @override
    def refusal(self, request: Request) -> str | None:
        # On CUDA devices with float8, and on a CPU if it is asked for.
        return _refusal(request) or _slower_on_a_cpu(request)

    @override
    def reason(self, request: Request) -> str:
        """Return, for reports, which operation multiplies float8."""
        if torch_devices.here().maker == "cpu":
            return "scaled_mm on a CPU, asked for"
        if devices.pretended() is not None:
            return "scaled_mm on CUDA"
        lacking = casts.lacking()
        by = "Triton" if lacking is None else f"PyTorch: {lacking}"
        return f"scaled_mm on CUDA, of operands cast by {by}"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply two operands with one scale each."""
        x, y = _matrices(a, b)
        scales = a.scale.reshape(()), b.scale.reshape(())
        out_dtype = getattr(torch, dtype)
        product = _scaled_mm(x, y, *scales, out_dtype, fast, self._bias)
        return product.unsqueeze(0)


class ScaledMMOfMatrices(NativeMatmul):
    """A kernel: `scaled_mm` of one matrix of a bank after the other.

    It was not run on a GPU in this release.
    """

    @override
    def reads(self, request: Request) -> bool:
        return request.of_matrices

    @override
    def refusal(self, request: Request) -> str | None:
        return _lacking(request) or _slower_on_a_cpu(request)

    @override
    def reason(self, request: Request) -> str:
        """Return, for reports, which operation multiplies float8."""
        on_cpu = torch_devices.here().maker == "cpu"
        place = "a CPU, asked for" if on_cpu else "CUDA"
        return f"scaled_mm on {place}, of each matrix"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply the matrices of two batches one by one."""
        out_dtype = getattr(torch, dtype)
        scales = a.scale.reshape(-1), b.scale.reshape(-1)  # One per matrix.
        matrices = zip(a.values, b.values, *scales, strict=True)
        return torch.stack(
            [
                _scaled_mm(x, y.t(), x_scale, y_scale, out_dtype, fast)
                for x, y, x_scale, y_scale in matrices
            ]
        )


class ScaledMMOfRows(NativeMatmul):
    """A kernel: `scaled_mm` with row scales for one operand or both.

    Scales that PyTorch does not take multiply the output in float32. The bias
    is that of `ScaledMM`, in bfloat16.
    """

    def __init__(self, bias: Tensor | None = None):
        self._bias = bias

    def with_bias(self, bias: Tensor) -> ScaledMMOfRows | None:
        """Return a kernel that adds a bias before it rounds, or None.

        None if PyTorch takes no row scales, and on a CPU: see `ScaledMM`.
        """
        adds = bias.dtype == torch.bfloat16 and bias.device.type != "cpu"
        adds = adds and torch_devices.scales_rows(bias.device)
        return ScaledMMOfRows(bias) if adds else None

    @override
    def reads(self, request: Request) -> bool:
        return request.of_rows

    @override
    def refusal(self, request: Request) -> str | None:
        # Nothing about scales: `multiply` applies those that PyTorch lacks.
        return _refusal(request) or _slower_on_a_cpu(request)

    @override
    def reason(self, request: Request) -> str:
        """Return, for reports, which operation multiplies float8."""
        if torch_devices.here().maker == "cpu":
            return "scaled_mm on a CPU, with scales of rows, asked for"
        return "scaled_mm on CUDA, with scales of rows"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply; scale the rows in the matmul if it can, or after it."""
        x, y = _matrices(a, b)
        # With row scales: bfloat16 outputs, and e4m3fn as second operand.
        takes_scales = dtype == "bfloat16" and y.dtype == torch.float8_e4m3fn
        if takes_scales and torch_devices.scales_rows(x.device):
            scales = _row_scales(a), _row_scales(b)
            output = _scaled_mm(x, y, *scales, torch.bfloat16, fast, self._bias)
            return output.unsqueeze(0)
        one = a.scale.new_ones(())
        product = _scaled_mm(x, y, one, one, torch.float32, fast).unsqueeze(0)
        product = times_scales(product, a, b, torch.Tensor.mul_)
        product = product if self._bias is None else product + self._bias
        return product.to(getattr(torch, dtype))


class ScaledMMOfBlocks(NativeMatmul):
    """A kernel: `scaled_mm` with a scale for 1 x 128 or 128 x 128 elements.

    The second operand may have scales of squares. The checks that ran on an
    H200 do not use it. The layouts are those of PyTorch's own test
    (`test_scaled_matmul_cuda.py`). They are checked on tensors without data.
    """

    @override
    def reads(self, request: Request) -> bool:
        row, square = Tile(1, BLOCK), Tile(BLOCK, BLOCK)
        return request.tiles in ((row, row), (row, square))

    @override
    def refusal(self, request: Request) -> str | None:
        """Return why a matmul with scales of blocks cannot run here."""
        return (
            _refusal(request)
            or torch_devices.lacking_scales("blocks", BLOCK)
            or _refusal_of_formats(request)
        )

    @override
    def reason(self, request: Request) -> str:
        return "scaled_mm on CUDA, with scales of blocks"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply two operands with a scale per block of 128."""
        # `fast` is ignored: PyTorch's own test covers exact sums only.
        x, y = (_padded(each.values.squeeze(0), BLOCK) for each in (a, b))
        if b.tile.free == BLOCK:
            # A row of scales for 128 rows of `b`, padded to a multiple of 4.
            b_scales = _contiguous(b.scale.squeeze(0))
            padding = 0, -b_scales.shape[1] % 4
            b_scales = F.pad(b_scales, padding, value=1.0).t()
            b_scaling = F.ScalingType.BlockWise128x128
        else:
            b_scales = _block_scales(b, y.shape[0])
            b_scaling = F.ScalingType.BlockWise1x128
        product = F.scaled_mm(
            _contiguous(x),
            _contiguous(y).t(),
            _block_scales(a, x.shape[0]),
            F.ScalingType.BlockWise1x128,
            b_scales,
            b_scaling,
            output_dtype=_output_dtype(dtype),
        )
        return _cropped(product, a, b, dtype)


class ScaledMMOfMX(NativeMatmul):
    """A kernel: `scaled_mm` with a power of two per 32 elements of a row.

    It was not run in this release, for want of a Blackwell GPU. PyTorch's
    argument checks are run on tensors without data, and the order of the
    scales is checked against cuBLAS's formula.
    """

    @override
    def reads(self, request: Request) -> bool:
        return request.of_mx

    @override
    def refusal(self, request: Request) -> str | None:
        """Return why a matmul with scales of MX blocks cannot run here."""
        return (
            _refusal(request)
            or torch_devices.lacking_scales("mx", MX_BLOCK)
            or _refusal_of_formats(request)
            or request.refused_as_mx
        )

    @override
    def reason(self, request: Request) -> str:
        return "scaled_mm on CUDA, with scales of MX blocks"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply two operands with a scale per block of 32."""
        # `fast` is ignored: PyTorch's own test covers exact sums only.
        x, y = (_padded(each.values.squeeze(0), MX_BLOCK) for each in (a, b))
        a_scales, b_scales = (
            swizzled(encode_scales(each.scale.squeeze(0), E8M0))
            for each in (a, b)
        )
        product = F.scaled_mm(
            _contiguous(x),
            _contiguous(y).t(),
            a_scales.view(torch.float8_e8m0fnu),
            F.ScalingType.BlockWise1x32,
            b_scales.view(torch.float8_e8m0fnu),
            F.ScalingType.BlockWise1x32,
            F.SwizzleType.SWIZZLE_32_4_4,
            F.SwizzleType.SWIZZLE_32_4_4,
            output_dtype=_output_dtype(dtype),
        )
        return _cropped(product, a, b, dtype)


def swizzled(scales: Tensor) -> Tensor:
    """Reorder the scales of MX blocks into the layout that cuBLAS reads.

    The scales, uint8 (rows, blocks), are padded with zeros and become a vector:
    tiles of 128 rows by 4 blocks, one row of tiles after another. A tile starts
    with the 4 scales of row 0, then of rows 32, 64 and 96, then of row 1, and
    so on. Source: cuBLAS, "1D block scaling factors layout".
    """
    rows, blocks = scales.shape
    scales = F.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = scales.view(-(-rows // 128), 4, 32, -(-blocks // 4), 4)
    return _contiguous(tiles.permute(0, 3, 2, 1, 4)).view(-1)


def _refusal(request: Request) -> str | None:
    """Return why PyTorch has no float8 matmul for a request, or None."""
    if request.batched:
        return "torch has no batched float8 matmul"
    return _lacking(request)


def _lacking(request: Request) -> str | None:
    """Return why PyTorch has no float8 matmul of two matrices, or None."""
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm"
    return torch_devices.lacking(*request.formats)


def _slower_on_a_cpu(request: Request) -> str | None:
    """Return why a CPU does not take this kernel, or None."""
    on_cpu = torch_devices.here().maker == "cpu"
    if not on_cpu or request.prefer == "native":
        return None
    # 256x512x2048, 2 cores, torch 2.13: 4.8 ms against 2.8 ms.
    return "scaled_mm is slower than float32 on a CPU"


def _refusal_of_formats(request: Request) -> str | None:
    """Return why matmuls with block scales do not read these formats."""
    if request.a.format == request.b.format == "float8_e4m3fn":
        return None
    return "torch's matmuls with scales of blocks read float8_e4m3fn only"


def _matrices(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """Return the values of both operands as (m, k) and (k, n)."""
    return a.values.squeeze(0), b.values.squeeze(0).t()


def _row_scales(operand: Quantized) -> Tensor:
    """Return an operand's scales as a vector with one scale per row."""
    rows = operand.values.shape[1]
    return _contiguous(operand.scale.reshape(-1).expand(rows))


def _block_scales(operand: Quantized, rows: int) -> Tensor:
    """Return the scales of 1 x 128 blocks padded to `rows`, column-major."""
    scale = operand.scale.squeeze(0)
    scale = F.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0)
    return _contiguous(scale.t()).t()


def _output_dtype(dtype: str) -> torch.dtype:
    """Return the output dtype of a matmul with block scales."""
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def _cropped(product: Tensor, a: Quantized, b: Quantized, dtype: str) -> Tensor:
    """Remove what padding added to a matmul's output; cast it to `dtype`."""
    rows, columns = a.values.shape[1], b.values.shape[1]
    product = product.narrow(0, 0, rows).narrow(1, 0, columns)
    return product.to(getattr(torch, dtype)).unsqueeze(0)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `a @ b` of float8 matrices with scales, by `scaled_mm`."""
    # Both scales are scalars, or vectors of the rows of `a` and of the columns
    # of `b`. CUDA requires the first operand row-major and the second
    # column-major, both contiguous along the contracted axis.
    rows, columns = a.shape[0], b.shape[1]
    if a.device.type == "cuda":
        a, b = _padded(a), _padded(b)
    more_rows, more_columns = a.shape[0] - rows, b.shape[1] - columns
    if bias is not None and more_columns:
        bias = F.pad(bias, (0, more_columns))
    if scale_a.dim():
        scale_a = F.pad(scale_a, (0, more_rows), value=1.0).unsqueeze(1)
        scale_b = F.pad(scale_b, (0, more_columns), value=1.0).unsqueeze(0)
    # `F.scaled_mm` is not there on a CPU (torch 2.11), and its checks are slow.
    product = torch._scaled_mm(
        _contiguous(a),
        _contiguous(b.t()).t(),
        _aligned(scale_a),
        _aligned(scale_b),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast and a.device.type == "cuda",
    )
    return product.narrow(0, 0, rows).narrow(1, 0, columns)


def _aligned(scale: Tensor) -> Tensor:
    """Return a scale at an address that 16 divides."""
    # In some sizes cuBLASLt refuses a scale that is part of a tensor (2.11).
    offset = scale.storage_offset() * scale.element_size()
    return scale.clone() if offset % 16 else scale


def _contiguous(x: Tensor) -> Tensor:
    """Return a tensor, cloned if it is not contiguous."""
    # Tests pass fake CUDA tensors without CUDA: `clone` and `narrow` take them,
    # `contiguous` and slices do not (torch 2.13).
    if x.is_contiguous():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """Pad both axes of a matrix with zeros to multiples of a number."""
    rows, columns = (-size % multiple for size in x.shape)
    if not rows and not columns:
        return x
    # `F.pad` takes no float8: the code of 0 is 0.
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)
