"""PyTorch: codes read by integer operations, and products by parts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.parts import LARGE, StoredMatrix
from keras_policy_ext.numerics.primitives import DECODED, FLOAT4


def shift(bits: Tensor, format_name: str) -> Tensor:
    """Make signed codes, int16, the bits of float16, as `halves` does."""
    # PyTorch multiplies in less time than it shifts (torch 2.13).
    by, _ = DECODED[format_name]
    if format_name == FLOAT4:
        bits.mul_(1 << 12).bitwise_right_shift_(12 - by)
        return bits.bitwise_and_(~0x7000)
    bits.mul_(1 << by)
    return bits.bitwise_and_(~0x4000) if by == 7 else bits


def numbers(codes: Tensor, format_name: str) -> Tensor:
    """Convert uint8 codes to float32 values, on a CPU; see `Primitives`.

    PyTorch casts float8 by scalar code: 20 ms for 4 million codes on one core,
    and this takes 4.6 ms, compiled 4.0 ms (torch 2.13).
    """
    by, factor = DECODED[format_name]
    if by == 0:  # Integers.
        return codes.view(torch.int8).float()
    bits = shift(codes.view(torch.int8).to(torch.int16), format_name)
    values = bits.view(torch.float16).float()
    return values if factor == 1 else values.mul_(factor)


def product_by_parts(x: Tensor, kernel: StoredMatrix) -> Tensor:
    """Multiply on a CPU by parts; see `Arithmetic.product_by_parts`."""
    rows, packed = x.shape[1], _packed(kernel)
    if packed is not None and rows <= _PACKED_ROWS:
        return torch.ops.quantized.linear_dynamic_fp16(x[0], packed)[None]
    matrices, m, n = kernel.shape
    size = kernel.size(rows, torch.get_num_threads(), threaded=LARGE)
    by, _ = DECODED[kernel.format]
    # All parts use this memory: new memory for each takes a tenth more time.
    bits = torch.empty(size, n, dtype=torch.int16, device="cpu")
    floats = torch.empty(size, n, dtype=torch.float32, device="cpu")
    memory = bits, bits.view(torch.float16), floats
    y = x.new_zeros((matrices, rows, n if kernel.sums else m))
    codes, reads_codes = kernel.codes, kernel.codes.dtype == torch.uint8
    codes = codes.view(torch.int8) if reads_codes else codes
    for number, matrix in enumerate(codes.reshape(kernel.shape)):
        operand, out = x[number if len(x) > 1 else 0], y[number]
        columns = (operand if kernel.sums else out).split(size, 1)
        for i, part in enumerate(matrix.split(size)):
            bits, halves, floats = memory
            if len(part) < size:
                bits, halves, floats = (each[: len(part)] for each in memory)
            is_shifted = reads_codes and by > 0
            if is_shifted:
                shift(bits.copy_(part), kernel.format)
            wide = floats.copy_(halves if is_shifted else part)
            if kernel.blocks is not None:
                wide.mul_(kernel.blocks[i * size // kernel.rows])
            if kernel.sums:
                out.addmm_(columns[i], wide)
            else:
                columns[i].copy_(operand @ wide.t())
    return y if kernel.factor == 1 else y.mul_(kernel.factor)


_PACKED_ROWS = 128
"""Up to this many rows the product with float16 is the faster one."""

_PACKED: Any = WeakIdKeyDictionary()
"""Kernels in FBGEMM's float16, by codes: `(version, form, packed)`."""


def pack(codes: Tensor) -> bool:
    """Have products read a matrix in float16 from now on; False if not."""
    # FBGEMM, which multiplies float32 with float16, is in builds for x86.
    has_product = torch.backends.quantized.engine in ("fbgemm", "x86")
    on_cpu = codes.device.type == "cpu"
    # Tensors of `inference_mode` do not say when they are changed.
    packs = has_product and on_cpu and not codes.is_inference()
    packs = packs and codes.numel() > LARGE
    if packs:
        _PACKED.setdefault(codes, (None, None, None))
    return packs


def _packed(kernel: StoredMatrix) -> Any:
    """Return a kernel as FBGEMM multiplies it, or None if it is not kept."""
    codes, blocks, format_name, (matrices, *shape), sums, _ = kernel
    if codes not in _PACKED or matrices > 1 or blocks is not None:
        return None
    version, form, packed = _PACKED[codes]
    # A gradient reads the kernel in another way: one form is kept.
    if form not in (None, kernel.form):
        return None
    # Codes are assigned in place, which counts as a version.
    if version != codes._version:
        values = numbers(codes, format_name).view(shape)
        by_output = values.t().contiguous() if sums else values
        packed = torch.ops.quantized.linear_prepack_fp16(by_output, None)
        _PACKED[codes] = codes._version, kernel.form, packed
    return packed
