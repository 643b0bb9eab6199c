"""PyTorch: codes read by integer operations, and products by parts of them."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.parts import Parts, StoredMatrix
from keras_policy_ext.numerics.primitives import DECODED
from keras_policy_ext.stored_kernels import BLOCK

PARTS = Parts(threaded=1 << 17)

_KEEPS = ~0x4000
"""Clears the bit below the sign, which a shift by 7 makes equal to it."""


def numbers(codes: Tensor, format_name: str) -> Tensor:
    """Convert uint8 codes to float32 values, on a CPU; see `Primitives`.

    PyTorch casts float8 by scalar code: 20 ms for 4 million codes on one core,
    and this takes 4.6 ms, compiled 4.0 ms (torch 2.13).
    """
    shift, factor = DECODED[format_name]
    # A conversion from int8 repeats the sign bit in all higher bits, so that
    # the sign of the shifted code is where float16 has it.
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift)
    if shift == 7:
        bits.bitwise_and_(_KEEPS)
    values = bits.view(torch.float16).float()
    return values if factor == 1 else values.mul_(factor)


class _Buffers(threading.local):
    """The memory of the parts of products, used again by each thread."""

    size = 0

    def of(self, size: int) -> tuple[Tensor, Tensor]:
        """Return `size` int16 and float32 numbers, of any values."""
        if size > self.size:
            # Tensors that `inference_mode` makes cannot be written outside.
            with torch.inference_mode(False):
                bits = torch.empty(size, dtype=torch.int16, device="cpu")
                floats = torch.empty(size, dtype=torch.float32, device="cpu")
            # Larger parts are for many rows, which hide their allocation.
            if size > PARTS.numbers * torch.get_num_threads():
                return bits, floats
            self.size, self.bits, self.floats = size, bits, floats
        return self.bits[:size], self.floats[:size]


_BUFFERS = _Buffers()


class _Decoder:
    """Converts parts of codes, or of numbers in float16, to float32.

    Codes become their values divided by `factor`. The next call overwrites
    what a call returns.

    Args:
        codes: Uint8 or float16; its first axis is cut.
        size: The entries of a part along that axis.
        format_name: The format of the codes.
    """

    def __init__(self, codes: Tensor, size: int, format_name: str):
        shift, factor = DECODED[format_name]
        self.reads_codes = codes.dtype == torch.uint8
        self.weight = 1 << shift
        self.factor = factor if self.reads_codes else 1.0
        self.shape = size, *codes.shape[1:]
        bits, wide = _BUFFERS.of(math.prod(self.shape))
        self.bits, self.wide = bits.view(self.shape), wide.view(self.shape)
        self.halves = self.bits.view(torch.float16)
        whole = codes.view(torch.int8) if self.reads_codes else codes
        self.parts = whole.split(size)

    def __call__(self, part: Tensor) -> Tensor:
        """Return one of `parts` as float32, in a buffer."""
        count = len(part)
        is_last = count < len(self.wide)
        wide = self.wide[:count] if is_last else self.wide
        if not self.reads_codes:
            return wide.copy_(part)
        bits = self.bits[:count] if is_last else self.bits
        # PyTorch multiplies in less time than it shifts (torch 2.13).
        bits.copy_(part).mul_(self.weight)
        if self.weight == 128:
            bits.bitwise_and_(_KEEPS)
        return wide.copy_(self.halves[:count] if is_last else self.halves)


def dequantized(
    codes: Tensor, scale: Tensor, format_name: str, dtype: str
) -> Tensor:
    """Dequantize a kernel on a CPU by parts; see `Primitives.dequantized`."""
    result = codes.new_empty(codes.shape, dtype=getattr(torch, dtype))
    size = max(PARTS.numbers * len(codes) // codes.numel(), 1)
    decode = _Decoder(codes, size, format_name)
    # Exact: the factor is a power of two, and no scale is near an end of the
    # range of float32.
    scale = (scale * decode.factor).expand(len(codes), *scale.shape[1:])
    for part, of_part, out in zip(
        decode.parts, scale.split(size), result.split(size), strict=True
    ):
        out.copy_(decode(part).mul_(of_part))
    return result


def product_by_parts(
    x: Tensor, codes: Tensor, matrix: StoredMatrix, blocks: Tensor | None
) -> Tensor:
    """Multiply on a CPU by parts; see `Arithmetic.product_by_parts`."""
    rows = x.shape[1]
    packed = packed_of(codes, matrix)
    if packed is not None and rows <= _PACKED_ROWS and blocks is None:
        y = torch.ops.quantized.linear_dynamic_fp16(x[0], packed)
        return y.unsqueeze(0)
    matrices, m, n = matrix.shape
    given = rows, matrix, torch.get_num_threads()
    size = PARTS.size(*given, in_blocks=blocks is not None)
    y = x.new_empty((matrices, rows, n if matrix.sums else m))
    for number, some in enumerate(codes.reshape(matrix.shape)):
        operand = x[number if len(x) > 1 else 0]
        decode = _Decoder(some, size, matrix.format)
        if matrix.sums:
            _sum_products(y[number], operand, decode, blocks)
        else:
            _join_products(y[number], operand, decode, blocks)
    return y if decode.factor == 1 else y.mul_(decode.factor)


def _sum_products(
    y: Tensor, x: Tensor, decode: _Decoder, blocks: Tensor | None
) -> None:
    """Write the sum over parts of `x` and of a matrix into `y`."""
    size = len(decode.wide)
    y.zero_()
    operands = zip(x.split(size, 1), decode.parts, strict=True)
    for number, (operand, part) in enumerate(operands):
        if blocks is None:
            y.addmm_(operand, decode(part))
        else:
            scale = blocks[number * size // BLOCK]
            y.addcmul_(operand @ decode(part), scale)


def _join_products(
    y: Tensor, x: Tensor, decode: _Decoder, blocks: Tensor | None
) -> None:
    """Write the products of `x` and each part of a matrix into `y`."""
    size = len(decode.wide)
    results = zip(y.split(size, 1), decode.parts, strict=True)
    for number, (result, part) in enumerate(results):
        operand = x
        if blocks is not None:
            operand = x * blocks[number * size // BLOCK]
        result.copy_(operand @ decode(part).t())


_PACKED_ROWS = 128
"""Up to this many rows the product with float16 is the faster one."""

_PACKED: Any = WeakIdKeyDictionary()
"""Kernels in FBGEMM's float16, by codes: `(version, matrix, packed)`."""


def packs(codes: Tensor) -> bool:
    """Return True if `keep_packed` can hold a matrix in float16."""
    is_large = codes.numel() > PARTS.numbers
    on_cpu = codes.device.type == "cpu"
    # FBGEMM, which multiplies float32 with float16, is in builds for x86.
    has_product = torch.backends.quantized.engine in ("fbgemm", "x86")
    # Tensors of `inference_mode` do not say when they are changed.
    return is_large and on_cpu and has_product and not codes.is_inference()


def keep_packed(codes: Tensor) -> None:
    """Have products read these codes in float16 from now on."""
    if codes not in _PACKED:
        _PACKED[codes] = None, None, None


def packed_of(codes: Tensor, matrix: StoredMatrix) -> Any:
    """Return a kernel as FBGEMM multiplies it, or None if it is not kept."""
    if codes not in _PACKED:
        return None
    version, kept, packed = _PACKED[codes]
    # A gradient reads the kernel in another way: one form is kept.
    if matrix.shape[0] > 1 or kept not in (None, matrix):
        return None
    # Codes are assigned in place, which counts as a version.
    if version != codes._version:
        values = numbers(codes, matrix.format).view(matrix.shape)[0]
        by_output = values.t().contiguous() if matrix.sums else values
        packed = torch.ops.quantized.linear_prepack_fp16(by_output, None)
        _PACKED[codes] = codes._version, matrix, packed
    return packed
