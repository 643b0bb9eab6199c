"""Triton: an operand read once, written in both layouts as float8.

A matmul of float8 wants either operand contiguous along the axis that it
sums, and each operand is summed along both of its axes. So one kernel casts,
transposes and finds the amax: 2 bytes read and 2 written for a number in
bfloat16, where separate operations move 14.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from keras_policy_ext import formats
from keras_policy_ext.kernels.both_layouts import Both, Known
from keras_policy_ext.kernels.torch_triton_scales import scale_of
from keras_policy_ext.numerics import casting
from keras_policy_ext.recipes import Quantization

Tensor = Any

ROWS, COLUMNS = 64, 64
"""The tile of one program."""

_TRITON_DTYPES = {
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
}


def quantize_both_ways(
    x: Tensor,
    asked: Quantization,
    known: Known,
    observe: bool,
    by_integers: bool = False,
) -> Both:
    """An operand in float8, and its transpose in memory of its own.

    Args:
        x: (m, k), bfloat16, float16 or float32.
        asked: What becomes of it, with one scale.
        known: What is known of that scale. Only where it is not known before
            is the amax found in a pass of its own; a kernel asks for it, so
            that nobody waits for the device.
        observe: Whether the amax is wanted.
        by_integers: Whether codes are made by integer arithmetic, which
            Triton's interpreter needs: its own conversion is wrong.
    """
    m, k = x.shape
    now, seen = torch.zeros(2, dtype=torch.int32, device=x.device)
    given = known.scale is not None
    grid = (triton.cdiv(m, ROWS), triton.cdiv(k, COLUMNS))
    strides = x.stride(0), x.stride(1)
    block = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    if not given or known.unseen is not None:
        unseen = known.unseen if given else x  # which is then not looked at
        amax_kernel[grid](
            x, unseen, now, m, k, *strides, ALWAYS=not given, **block
        )
    values, across = (
        torch.empty(shape, dtype=torch.uint8, device=x.device)
        for shape in ((m, k), (k, m))
    )
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    cast_kernel[grid](
        x,
        known.scale if given else now,
        known.unseen if given and known.unseen is not None else now,
        now,
        scale,
        values,
        across,
        seen,
        m,
        k,
        *strides,
        **constants(asked, known),
        OBSERVE=observe and given,
        BY_INTEGERS=by_integers,
        **block,
    )
    amax = (seen if given else now).view(torch.float32) if observe else None
    dtype = getattr(torch, asked.format)
    return Both(values.view(dtype), across.view(dtype), scale, amax)


def constants(asked: Quantization, known: Known) -> dict[str, Any]:
    """What the cast knows when it is compiled."""
    found = formats.get(asked.format)
    lowest, shift = casting.grid_constants(asked.format)
    return {
        "GIVEN": known.scale is not None,
        "MAYBE_UNSEEN": known.unseen is not None,
        "INVERTED": known.rule.inverted,
        "TOP": found.max / 2.0**known.rule.margin,
        "POWER_OF_TWO": asked.scale_rounding == "up",
        "LIMIT": found.max,
        "FORMAT": _TRITON_DTYPES[asked.format],
        "MANTISSA": found.mantissa_bits,
        "LOWEST": lowest,
        "SHIFT": shift,
        "SUBNORMALS": 1.0 / found.smallest_subnormal,
        "NAN": 0x7E if found.has_inf else 0x7F,
    }


@triton.jit
def _tile(
    x, m, k, by_row, by_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The numbers of a program in float32, where they are, and which are."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < m) & (j[None, :] < k)
    rows, columns = i[:, None].to(tl.int64), j[None, :].to(tl.int64)
    places = x + rows * by_row + columns * by_column
    return tl.load(places, mask=inside, other=0.0).to(tl.float32), i, j, inside


@triton.jit
def _enter_amax(numbers, amax):
    """Magnitudes are ordered as their bits are, and NaN is the largest."""
    bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(bits, 1), 0)
    tl.atomic_max(amax, largest)


@triton.jit
def _quotient(x, scale):
    """`x / scale`, correctly rounded, where a code depends on it.

    By the reciprocal and one correction (P. Markstein, "Computation of
    elementary functions on the IBM RISC System/6000 processor", 1990): half
    of the instructions of a division. What is not finite stays so, and zeros
    keep their signs. Where a correction could be subnormal it is a division.
    """
    if scale < 2.0**-60:
        quotient = tl.div_rn(x, tl.zeros_like(x) + scale)
    else:
        reciprocal = tl.div_rn(1.0, scale)
        first = x * reciprocal
        error = tl.fma(-first, tl.zeros_like(x) + scale, x)
        corrected = tl.fma(error, tl.zeros_like(x) + reciprocal, first)
        within = (tl.abs(first) < 2.0**20) & (first != 0.0)
        quotient = tl.where(within, corrected, first)
    return quotient


@triton.jit
def _codes_of(
    number,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    SUBNORMALS: tl.constexpr,
):
    """The codes of numbers in range, by integers; see `round_to_format`."""
    bits = number.to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits & 0x7F800000, LOWEST)
    anchor = (exponent + SHIFT).to(tl.float32, bitcast=True)
    rounded = tl.abs((number + anchor) - anchor)
    magnitude = rounded.to(tl.int32, bitcast=True)
    normal = (magnitude - LOWEST + 0x800000) >> (23 - MANTISSA)
    subnormal = (rounded * SUBNORMALS).to(tl.int32)
    code = tl.where(magnitude >= LOWEST, normal, subnormal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def _chosen_scale(
    scale,
    unseen,
    now,
    GIVEN: tl.constexpr,
    MAYBE_UNSEEN: tl.constexpr,
    INVERTED: tl.constexpr,
    TOP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The scale from before, or that of the amax where there is none."""
    if GIVEN:
        chosen = tl.load(scale)
        if MAYBE_UNSEEN:
            amax = tl.load(now).to(tl.float32, bitcast=True)
            own = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
            chosen = tl.where(tl.load(unseen) != 0, own, chosen)
    else:
        amax = tl.load(now).to(tl.float32, bitcast=True)
        chosen = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
    return chosen


@triton.jit
def cast_kernel(
    x,
    scale,
    unseen,
    now,
    used,
    values,
    across,
    amax,
    m,
    k,
    by_row,
    by_column,
    GIVEN: tl.constexpr,
    MAYBE_UNSEEN: tl.constexpr,
    INVERTED: tl.constexpr,
    TOP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    NAN: tl.constexpr,
    OBSERVE: tl.constexpr,
    BY_INTEGERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """See `quantize_both_ways`; the first program writes the scale."""
    chosen = _chosen_scale(
        scale, unseen, now, GIVEN, MAYBE_UNSEEN, INVERTED, TOP, POWER_OF_TWO
    )
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(used, chosen)
    numbers, i, j, inside = _tile(x, m, k, by_row, by_column, ROWS, COLUMNS)
    if OBSERVE:
        _enter_amax(numbers, amax)
    number = _quotient(numbers, chosen)
    number = tl.minimum(tl.maximum(number, -LIMIT), LIMIT)
    if BY_INTEGERS:
        code = _codes_of(number, MANTISSA, LOWEST, SHIFT, SUBNORMALS)
        code = code.to(tl.uint8)
    else:
        code = number.to(FORMAT).to(tl.uint8, bitcast=True)
    code = tl.where(numbers == numbers, code, NAN).to(tl.uint8)
    rows, columns = i[:, None].to(tl.int64), j[None, :].to(tl.int64)
    tl.store(values + rows * k + columns, code, mask=inside)
    rows, columns = i[None, :].to(tl.int64), j[:, None].to(tl.int64)
    tl.store(across + columns * m + rows, tl.trans(code), mask=tl.trans(inside))


@triton.jit
def amax_kernel(
    x,
    wanted,
    amax,
    m,
    k,
    by_row,
    by_column,
    ALWAYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The amax of a matrix, if a flag says that it is wanted."""
    if ALWAYS:
        tile = _tile(x, m, k, by_row, by_column, ROWS, COLUMNS)
        _enter_amax(tile[0], amax)
    else:
        if tl.load(wanted) != 0:
            tile = _tile(x, m, k, by_row, by_column, ROWS, COLUMNS)
            _enter_amax(tile[0], amax)
