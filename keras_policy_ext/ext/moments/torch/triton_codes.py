"""Quantize moments on CUDA with PyTorch, each in one pass by Triton.

The bits are those of `ext.moments.codes`, which takes some sixty kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from keras_policy_ext.ext.moments.codes import (
    BLOCKS,
    GOLDEN,
    KINDS,
    LARGEST,
    OFFSET,
    SMALLEST,
    SMALLEST_NORMAL,
    bits_of,
)
from keras_policy_ext.numerics import key_of_use

Tensor = Any

NUMBERS = 2048
"""The number of numbers of one program, a multiple of the sizes of blocks."""

_GOLDEN = tl.constexpr(GOLDEN)
_OFFSET = tl.constexpr(OFFSET)
_SMALLEST = tl.constexpr(SMALLEST)
_OFFSET_BITS = tl.constexpr(bits_of(OFFSET))
_NORMAL_BITS = tl.constexpr(bits_of(SMALLEST_NORMAL))


def quantized(
    rows: Tensor, kind: str, form: str, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of blocks, as `ext.moments.codes` does.

    Args:
        rows: Float32 (blocks, numbers of a block), contiguous.
        kind: `"first"` or `"second"`.
        form: `"float8"` or `"mx"`.
        key: Int32 scalar on the same device; None rounds to nearest.
    """
    blocks, size = rows.shape
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    scale = torch.empty(
        blocks,
        dtype=torch.uint8 if form == "mx" else torch.float32,
        device=rows.device,
    )
    constants = quantize_constants(kind, form, size, key is not None)
    grid = (triton.cdiv(blocks, constants["ROWS"]),)
    quantize_kernel[grid](
        rows,
        codes if key is None else key,
        codes,
        scale,
        blocks,
        **constants,
        enable_fp_fusion=False,
    )
    return codes, scale


def numbers(codes: Tensor, scale: Tensor, kind: str, form: str) -> Tensor:
    """Return the numbers of blocks, as `ext.moments.codes` does.

    Args:
        codes: Uint8 (blocks, numbers of a block), contiguous.
        scale: Float32 or uint8 (blocks,), contiguous.
        kind: `"first"` or `"second"`.
        form: `"float8"` or `"mx"`.
    """
    blocks, size = codes.shape
    found = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    constants = dequantize_constants(kind, form, size)
    grid = (triton.cdiv(blocks, constants["ROWS"]),)
    dequantize_kernel[grid](
        codes, scale, found, blocks, **constants, enable_fp_fusion=False
    )
    return found


def moment_key(step: Tensor, number: int) -> Tensor:
    """Return the key of a slot in a step; see `numerics.key_of_use`.

    Args:
        step: Int32 scalar.
        number: The place of the slot among the variables of the optimizer.
    """
    found = torch.empty((), dtype=torch.int32, device=step.device)
    key_kernel[(1,)](step, found, number)
    return found


def check(
    device: str,
    expected_quantized: Callable[..., tuple[Tensor, Tensor]],
    expected_numbers: Callable[..., Tensor],
) -> None:
    """Compute some moments on a device, and compare with those of a CPU.

    Args:
        device: The name of a device of PyTorch.
        expected_quantized: It computes on a CPU what `quantized` does.
        expected_numbers: It computes on a CPU what `numbers` does.

    Raises:
        ValueError: If a bit differs.
    """
    size = BLOCKS["float8"]
    exponents = np.arange(9 * size, dtype=np.float32) % 250 - 125
    x = np.sin(np.arange(9 * size, dtype=np.float32)) * np.exp2(exponents)
    x = np.float32(x).reshape(9, size)
    x[1] = 0
    x[2:, :5] = np.nan, np.inf, -np.inf, 1e-42, SMALLEST_NORMAL
    x[4:] = np.float32(np.sin(np.arange(5 * size))).reshape(5, size) / 1e3
    rows, step = torch.tensor(x, device=device), torch.tensor(7, device=device)
    key = moment_key(step.int(), 3)
    expected_key = key_of_use(step.int(), 0, 3).cpu()
    for kind in KINDS:
        codes, scale = quantized(rows, kind, "float8", key)
        found = numbers(codes, scale, kind, "float8")
        pair = expected_quantized(torch.tensor(x), kind, "float8", expected_key)
        expected = expected_numbers(*pair, kind, "float8")
        for one, other in zip(
            (codes, scale, found), (*pair, expected), strict=True
        ):
            different = int((one.cpu() != other).sum())
            if different:
                raise ValueError(
                    f"Bits of {kind} moments are not those of a CPU. "
                    f"Received: {different} of {other.numel()} numbers that "
                    "differ."
                )


def quantize_constants(
    kind: str, form: str, size: int, is_random: bool
) -> dict[str, Any]:
    """Return the compile-time constants of `quantize_kernel`."""
    stored, limit = KINDS[kind], LARGEST[kind]
    return {
        **dequantize_constants(kind, form, size),
        "LIMIT_BITS": bits_of(limit if stored.signed else limit**2),
        "LARGEST_BITS": bits_of(stored.largest),
        "FACTOR": float(np.float32(1 / (stored.largest - OFFSET))),
        "LEAST": OFFSET * 2.0**-stored.mantissa_bits,
        "RANDOM": is_random,
    }


def dequantize_constants(kind: str, form: str, size: int) -> dict[str, Any]:
    """Return the compile-time constants of `dequantize_kernel`."""
    stored = KINDS[kind]
    return {
        "SIZE": size,
        "ROWS": NUMBERS // size,
        "SIGNED": stored.signed,
        "DROPPED": stored.dropped,
        "POWERS": form == "mx",
    }


@triton.jit
def _places(blocks, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows of a program, the places in them, and both masks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = row.to(tl.int64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    return row, place, row < blocks, (row < blocks)[:, None]


@triton.jit
def quantize_kernel(
    x,
    key,
    codes,
    scales,
    blocks,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIGNED: tl.constexpr,
    DROPPED: tl.constexpr,
    POWERS: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    LARGEST_BITS: tl.constexpr,
    FACTOR: tl.constexpr,
    LEAST: tl.constexpr,
    RANDOM: tl.constexpr,
):
    """Write codes and scales of blocks. A program has `ROWS` blocks."""
    row, place, is_row, inside = _places(blocks, SIZE, ROWS)
    values = tl.load(x + place, mask=inside, other=0.0)
    signed = values.to(tl.int32, bitcast=True)
    magnitude = signed & 0x7FFFFFFF
    largest = tl.max(magnitude, 1)
    amax = tl.minimum(largest, LIMIT_BITS).to(tl.float32, bitcast=True)
    if not SIGNED:
        amax = tl.sqrt_rn(amax)
    scale = amax * FACTOR
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
        scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest >= _NORMAL_BITS, tl.maximum(scale, _SMALLEST), 1.0)
    if POWERS:
        exponent = scale.to(tl.int32, bitcast=True) >> 23
        tl.store(scales + row, exponent.to(tl.uint8), mask=is_row)
    else:
        tl.store(scales + row, scale, mask=is_row)
    factor = tl.div_rn(1.0 + 0.0 * scale, scale)[:, None]
    if SIGNED:
        q = tl.abs(values * factor)
    else:
        root = tl.sqrt_rn(magnitude.to(tl.float32, bitcast=True))
        q = root * factor
        # NaN stays.
        q = tl.where(q < LEAST, LEAST, q)
        q = tl.where(magnitude < _NORMAL_BITS, 0.0, q)
    code = (q + _OFFSET).to(tl.int32, bitcast=True)
    code = tl.minimum(code, LARGEST_BITS)
    if RANDOM:
        chosen = tl.load(key).to(tl.uint32, bitcast=True)
        random = place.to(tl.uint32) * _GOLDEN + chosen
        code += (random >> (32 - DROPPED)).to(tl.int32)
    else:
        code += 1 << (DROPPED - 1)
    code = code >> DROPPED
    if SIGNED:
        code = (code & 0x7F) | ((signed >> 24) & 0x80)
    tl.store(codes + place, (code & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def dequantize_kernel(
    codes,
    scales,
    found,
    blocks,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SIGNED: tl.constexpr,
    DROPPED: tl.constexpr,
    POWERS: tl.constexpr,
):
    """Write the numbers of blocks. A program has `ROWS` blocks."""
    row, place, is_row, inside = _places(blocks, SIZE, ROWS)
    scale = tl.load(scales + row, mask=is_row, other=0)
    if POWERS:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    magnitude = code
    if SIGNED:
        magnitude = code & 0x7F
    bits = (magnitude << DROPPED) | _OFFSET_BITS
    value = (bits.to(tl.float32, bitcast=True) - _OFFSET) * scale[:, None]
    if SIGNED:
        sign = (code & 0x80) << 24
        value_bits = value.to(tl.int32, bitcast=True) | sign
        value = value_bits.to(tl.float32, bitcast=True)
    else:
        value = value * value
    tl.store(found + place, value, mask=inside)


@triton.jit
def _mixed(x):
    """Return the hash lowbias32 of a uint32; see `rounding.mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["number"])
def key_kernel(step, found, number):
    """Write the key of a slot in a step."""
    mixed = _mixed(tl.load(step).to(tl.uint32, bitcast=True))
    key = _mixed(mixed + number.to(tl.uint32))
    tl.store(found, key.to(tl.int32, bitcast=True))
