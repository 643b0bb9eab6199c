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
from keras_policy_ext.backends.both_layouts import Both, ScaleHint
from keras_policy_ext.backends.torch.triton_scales import largest_of, scale_of
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
    known: ScaleHint,
    observe: bool,
    by_integers: bool = False,
) -> Both:
    """An operand in float8, and its transpose in memory of its own.

    Args:
        x: (m, k), bfloat16, float16 or float32.
        asked: What becomes of it, with one scale.
        known: What is known of that scale. Only where it may not be known
            before is the amax found in a pass of its own; a kernel asks for
            it, so that nobody waits for the device.
        observe: Whether the amax is wanted.
        by_integers: Whether codes are made by integer arithmetic, which
            Triton's interpreter needs: its own conversion is wrong.
    """
    m, k = x.shape
    given = known.scale is not None
    grid = (triton.cdiv(m, ROWS), triton.cdiv(k, COLUMNS))
    strides = x.stride(0), x.stride(1)
    block = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    # One for each tile, which its program writes, or one that all raise.
    amaxes = _int32(x, (number_of_tiles(m, k),)) if given else _zero(x)
    unseen = known.unseen if known.unseen is not None else amaxes
    if not given or (known.unseen is not None and not known.seen_lately):
        amax_kernel[grid](
            x, unseen, amaxes, m, k, *strides, ALWAYS=not given, **block
        )
    values, across = (
        torch.empty(shape, dtype=torch.uint8, device=x.device)
        for shape in ((m, k), (k, m))
    )
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    cast_kernel[grid](
        x,
        known.scale if given else amaxes,
        unseen,
        scale,
        values,
        across,
        amaxes,
        m,
        k,
        *strides,
        **constants(asked, known),
        OBSERVE=observe and given,
        BY_INTEGERS=by_integers,
        **block,
    )
    dtype = getattr(torch, asked.format)
    return Both(
        values.view(dtype),
        across.view(dtype),
        scale,
        amaxes.view(torch.float32) if observe else None,
    )


def number_of_tiles(m: Any, k: Any) -> Any:
    """How many amaxes an (m, k) matrix has, one for each program."""
    return -(-m // ROWS) * -(-k // COLUMNS)


def _int32(x: Tensor, shape: tuple[Any, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=x.device)


def _zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=x.device)


def constants(asked: Quantization, known: ScaleHint) -> dict[str, Any]:
    """The constants of the compiled cast."""
    found = formats.get(asked.format)
    lowest, shift = casting.grid_constants(asked.format)
    return {
        "GIVEN": known.scale is not None,
        "MAYBE_UNSEEN": known.unseen is not None,
        "FOUND_BEFORE": not known.seen_lately,
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
    x,
    row,
    column,
    m,
    k,
    by_row,
    by_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The numbers of a tile in float32, where they are, and which are."""
    i = row * ROWS + tl.arange(0, ROWS)
    j = column * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i[:, None] < m) & (j[None, :] < k)
    rows, columns = i[:, None].to(tl.int64), j[None, :].to(tl.int64)
    places = x + rows * by_row + columns * by_column
    return tl.load(places, mask=inside, other=0.0).to(tl.float32), i, j, inside


@triton.jit
def _largest(numbers):
    """The bits of an amax, or of NaN where a number is.

    Magnitudes are ordered as their bits are, and NaN is the largest.
    """
    bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(bits, 1), 0)


@triton.jit
def _amax_of_all(
    x, m, k, by_row, by_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The amax of a matrix, read by one program."""
    found = tl.zeros((ROWS, COLUMNS), tl.int32)
    for row in range(0, tl.cdiv(m, ROWS)):
        for column in range(0, tl.cdiv(k, COLUMNS)):
            tile = _tile(x, row, column, m, k, by_row, by_column, ROWS, COLUMNS)
            bits = tile[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
            found = tl.maximum(found, bits)
    return tl.max(tl.max(found, 1), 0).to(tl.float32, bitcast=True)


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
def _own_amax(
    x,
    amaxes,
    m,
    k,
    by_row,
    by_column,
    FOUND_BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The amax of what was never observed; see `ScaleHint.seen_lately`."""
    if FOUND_BEFORE:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        amax = largest_of(amaxes, tiles, ROWS * COLUMNS)
    else:
        amax = _amax_of_all(x, m, k, by_row, by_column, ROWS, COLUMNS)
    return amax


@triton.jit
def cast_kernel(
    x,
    scale,
    unseen,
    used,
    values,
    across,
    amaxes,
    m,
    k,
    by_row,
    by_column,
    GIVEN: tl.constexpr,
    MAYBE_UNSEEN: tl.constexpr,
    FOUND_BEFORE: tl.constexpr,
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
    if GIVEN:
        chosen = tl.load(scale)
        if MAYBE_UNSEEN:
            wanted = tl.load(unseen) != 0
            if wanted:
                amax = _own_amax(
                    x,
                    amaxes,
                    m,
                    k,
                    by_row,
                    by_column,
                    FOUND_BEFORE,
                    ROWS,
                    COLUMNS,
                )
                chosen = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
    else:
        amax = tl.load(amaxes).to(tl.float32, bitcast=True)
        chosen = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
    row, column = tl.program_id(0), tl.program_id(1)
    if (row == 0) & (column == 0):
        tl.store(used, chosen)
    numbers, i, j, inside = _tile(
        x, row, column, m, k, by_row, by_column, ROWS, COLUMNS
    )
    if OBSERVE:
        tl.store(amaxes + row * tl.num_programs(1) + column, _largest(numbers))
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
    amaxes,
    m,
    k,
    by_row,
    by_column,
    ALWAYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The amax of a matrix; or of each tile, if a flag says it is wanted."""
    row, column = tl.program_id(0), tl.program_id(1)
    if ALWAYS:
        tile = _tile(x, row, column, m, k, by_row, by_column, ROWS, COLUMNS)
        tl.atomic_max(amaxes, _largest(tile[0]))
    else:
        if tl.load(wanted) != 0:
            tile = _tile(x, row, column, m, k, by_row, by_column, ROWS, COLUMNS)
            place = row * tl.num_programs(1) + column
            tl.store(amaxes + place, _largest(tile[0]))
