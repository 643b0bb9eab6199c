"""PyTorch on CUDA: casts, scales and states by Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from keras_policy_ext import formats
from keras_policy_ext.backends.both_layouts import Both, ScaleHint, Wanted
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.observations import (
    ROUNDING,
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.numerics.scale_sources import HistoryScales
from keras_policy_ext.recipes import OPERANDS, Quantization

Tensor = Any

MARKED_AFTER = 4
"""The distance of a marked scale: cuBLASLt wants addresses that 16 divides."""

_MARKED_AFTER = tl.constexpr(MARKED_AFTER)
_ROUNDING = tl.constexpr(ROUNDING)
_SEALED = tl.constexpr(VALID_MARK)
_UNSEEN = tl.constexpr(UNSEEN)
_UNIT = tl.constexpr(UNIT)
_UNITS = tl.constexpr(1.0 / UNIT)


def history_scales(
    source: Any, state: Tensor, told: Tensor | None = None
) -> HistoryScales:
    """Read the scales of the three operands from a state, on a GPU.

    Args:
        source: A `DelayedSource`.
        state: (3, width), contiguous.
        told: Bool (3,), in memory that the host can read; `unseen` is written
            here too.
    """
    scales = torch.empty(3, dtype=torch.float32, device=state.device)
    unseen = torch.empty(3, dtype=torch.bool, device=state.device)
    history_kernel[(3,)](
        state,
        scales,
        unseen,
        unseen if told is None else told,
        **state_constants(source),
    )
    if source.starts_from_current:
        return HistoryScales(scales, unseen)
    return HistoryScales(scales, None)


def observation(source: Any, amaxes: list[Tensor], slot: int) -> Tensor:
    """Return the amaxes of one use of a layer as a state's gradient.

    Args:
        source: A `DelayedSource`.
        amaxes: Three float32 tensors, each a scalar or the amaxes of tiles.
        slot: The number of this use of the layer in the step.
    """
    width = source.layout.width
    found = amaxes[0].new_empty((3, width))
    observation_kernel[(3,)](
        *amaxes,
        *(amax.numel() for amax in amaxes),
        found,
        1 + slot % SLOTS,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        PARTS=4096,
        num_warps=8,
    )
    return found


def settle(source: Any, value: Tensor, previous: Tensor) -> Tensor:
    """Return the new state after `value` is assigned to it, on a GPU.

    Args:
        source: A `DelayedSource`.
        value: (3, width), contiguous.
        previous: (3, width), contiguous.
    """
    settled = torch.empty_like(previous)
    _settle_into(settled, source, value, [], previous)
    return settled


def merge(
    source: Any, value: Tensor, observed: list[Tensor], state: Tensor
) -> None:
    """Change a state in place, as the assignment of a value changes it.

    Args:
        source: A `DelayedSource`.
        value: (3, width), contiguous.
        observed: At most two observations, (3, width) and contiguous, which
            are merged with the value first.
        state: (3, width), contiguous.
    """
    _settle_into(state, source, value, observed, state)


def _settle_into(
    settled: Tensor,
    source: Any,
    value: Tensor,
    observed: list[Tensor],
    previous: Tensor,
) -> None:
    settle_kernel[(3,)](
        value,
        *[*observed, value, value][:2],
        previous,
        settled,
        OBSERVED=len(observed),
        KERNEL_ROW=OPERANDS.index("kernel"),
        **state_constants(source),
    )


def state_constants(source: Any) -> dict[str, Any]:
    """Return the compile-time constants of the state kernels."""
    width = source.layout.width
    tops = [limit / 2.0**source.rule.margin for limit in source.limits]
    return {
        "TOPS": tuple(tops),
        "INITIAL": source.initial,
        "NEWEST_ONLY": source.recipe.amax_compute == "most_recent",
        "FROM_CURRENT": source.starts_from_current,
        "WIDTH": width,
        "FIRST": 2 + SLOTS,
        "BLOCK": triton.next_power_of_2(width),
    }


@triton.jit
def _positive_finite(amax):
    bits = amax.to(tl.int32, bitcast=True)
    return (bits > 0) & (bits < 0x7F800000)


@triton.jit
def scale_of(
    amax,
    previous,
    TOP,
    INVERTED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Return the scale of an amax, or `previous` for an unusable amax.

    An amax is unusable if it is 0 or not finite.

    See `scaling.scale_of_multiplier` (if `INVERTED`) and
    `scaling.scale_for_limit`. `TOP` is the largest value of the format,
    without the margin.
    """
    normal = tl.maximum(tl.where(amax == amax, amax, 0.0), 2.0**-126)
    if INVERTED:
        multiplier = tl.div_rn(TOP + 0.0 * normal, normal)
        multiplier = tl.minimum(tl.maximum(multiplier, 2.0**-126), 2.0**126)
        scale = tl.div_rn(1.0 + 0.0 * normal, multiplier)
    else:
        scale = tl.div_rn(normal, TOP + 0.0 * normal)
        scale = tl.minimum(tl.maximum(scale, 2.0**-126), 2.0**127)
        if POWER_OF_TWO:
            bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
            scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(_positive_finite(amax), scale, previous)


@triton.jit
def _is_intact(start, place, FIRST: tl.constexpr):
    """Return True if a row was observed and no other code changed it."""
    is_seal = place < FIRST - 1
    seal = tl.where(place == 0, _SEALED, 0.0)
    found = tl.load(start + place, mask=is_seal, other=0.0)
    return tl.max((is_seal & (found != seal)).to(tl.int32), 0) == 0


@triton.jit
def _scale_before(
    state,
    row,
    place,
    TOPS: tl.constexpr,
    INITIAL: tl.constexpr,
    NEWEST_ONLY: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Return an operand's scale, the last one used, and if it was observed."""
    start = state + row * WIDTH
    inside = (place >= FIRST) & (place < WIDTH)
    history = tl.load(start + place, mask=inside, other=-float("inf"))
    reduced = tl.max(history, 0)
    if NEWEST_ONLY:
        reduced = tl.load(start + FIRST)
    intact = _is_intact(start, place, FIRST)
    stored = tl.where(intact, tl.load(start + FIRST - 1), 0.0)
    reduced = tl.where(intact, reduced, 0.0)
    known = stored > 0.0
    top = tl.where(row == 0, TOPS[0], tl.where(row == 1, TOPS[1], TOPS[2]))
    previous = tl.where(known, stored, INITIAL)
    scale = scale_of(reduced, previous, top, True, False)
    return scale, stored, known | _positive_finite(reduced)


@triton.jit
def history_kernel(
    state,
    scales,
    unseen,
    told,
    TOPS: tl.constexpr,
    INITIAL: tl.constexpr,
    NEWEST_ONLY: tl.constexpr,
    FROM_CURRENT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each operand's scale and whether it was never observed.

    See `history_scales`. There is one program per operand.
    """
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    scale, _stored, seen = _scale_before(
        state, row, place, TOPS, INITIAL, NEWEST_ONLY, WIDTH, FIRST
    )
    tl.store(scales + row, scale)
    tl.store(unseen + row, seen == 0)
    tl.store(told + row, seen == 0)


@triton.jit
def largest_of(amaxes, count, BLOCK: tl.constexpr):
    """Return the largest magnitude of float32 values; NaN if one is NaN."""
    found, place = tl.zeros((BLOCK,), tl.int32), tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        inside = start + place < count
        some = tl.load(amaxes + start + place, mask=inside, other=0)
        found = tl.maximum(found, some.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(found, 0).to(tl.float32, bitcast=True)


@triton.jit
def observation_kernel(
    first,
    second,
    third,
    first_count,
    second_count,
    third_count,
    found,
    column,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the observation of each operand's amax.

    See `observation`. There is one program per operand.
    """
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    if row == 0:
        amax = largest_of(first, first_count, PARTS)
    elif row == 1:
        amax = largest_of(second, second_count, PARTS)
    else:
        amax = largest_of(third, third_count, PARTS)
    entry = tl.where(place == column, amax * _UNIT, 0.0)
    entry = tl.where(place == 0, _UNIT, entry)
    tl.store(found + row * WIDTH + place, entry, mask=place < WIDTH)


@triton.jit
def _entered(
    given,
    previous,
    row,
    place,
    KERNEL_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Return a history with a new amax added, unless that is not finite."""
    start = previous + row * WIDTH
    amaxes = tl.where((place > 0) & (place <= FIRST), given, 0.0)
    bits = amaxes.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = tl.max(bits, 0) < 0x7F800000
    uses = tl.sum(tl.where(place == 0, given, 0.0), 0) * _UNITS
    mean = tl.div_rn(tl.sum(amaxes, 0), tl.maximum(uses, 1.0))
    newest = tl.where(row == KERNEL_ROW, mean, tl.max(amaxes, 0)) * _UNITS
    # The ring turns left: see `Layout._entered`.
    older = tl.where(place + 1 >= WIDTH, FIRST, place + 1)
    turned = tl.load(start + older, mask=place > FIRST, other=0.0)
    before = tl.load(start + place, mask=place < WIDTH, other=0.0)
    intact = _is_intact(start, place, FIRST)
    turned = tl.where(intact, turned, 0.0)
    rolled = tl.where(place == FIRST, newest, turned)
    return tl.where(finite, rolled, tl.where(intact, before, 0.0))


@triton.jit
def _is_observation(given, place, FIRST: tl.constexpr):
    """Return whether a row is an observation; see `StateLayout`."""
    uses = tl.sum(tl.where(place == 0, given, 0.0), 0) * _UNITS
    entered = (place > 0) & (place <= FIRST) & (given != 0.0)
    seen = tl.where(place < FIRST - 1, 1.0, float("inf"))
    seen = tl.where(entered, seen, 0.0)
    whole = uses == tl.floor(uses)
    return whole & (uses >= tl.sum(seen, 0)) & (uses > 0.0)


@triton.jit
def _larger(a, b):
    """Return the larger of two numbers; NaN if one is NaN."""
    return tl.where(a != a, a, tl.where(b != b, b, tl.maximum(a, b)))


@triton.jit
def _merged(given, found, place, inside):
    """Merge observations: see `observations.merged`."""
    found = _larger(given, found)
    slots = tl.sum((inside & (place > 0) & (found != 0.0)).to(tl.float32), 0)
    uses = tl.maximum(found, _UNIT * slots)
    uses = tl.where(found != found, found, uses)
    first = tl.sum(tl.where(place == 0, given, 0.0), 0)
    return tl.where(first < 0.0, given, tl.where(place == 0, uses, found))


@triton.jit
def settle_kernel(
    value,
    latest,
    earlier,
    previous,
    settled,
    TOPS: tl.constexpr,
    INITIAL: tl.constexpr,
    NEWEST_ONLY: tl.constexpr,
    FROM_CURRENT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    OBSERVED: tl.constexpr,
    KERNEL_ROW: tl.constexpr,
):
    """Write the new row of each operand's state.

    See `merge` and `StateLayout.settle`. There is one program per operand. It
    may write where it has read `previous`.
    """
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    inside = place < WIDTH
    given = tl.load(value + row * WIDTH + place, mask=inside, other=0.0)
    if OBSERVED > 0:
        found = tl.load(latest + row * WIDTH + place, mask=inside, other=0.0)
        if OBSERVED > 1:
            other = tl.load(
                earlier + row * WIDTH + place, mask=inside, other=0.0
            )
            found = _larger(found, other)
        given = _merged(given, found, place, inside)
    before = tl.load(previous + row * WIDTH + place, mask=inside, other=0.0)
    used, stored, seen = _scale_before(
        previous, row, place, TOPS, INITIAL, NEWEST_ONLY, WIDTH, FIRST
    )
    if FROM_CURRENT:
        used = tl.where(seen, used, stored)
    history = _entered(given, previous, row, place, KERNEL_ROW, WIDTH, FIRST)
    observed = tl.where(place >= FIRST, history, 0.0)
    observed = tl.where(place == FIRST - 1, used, observed)
    observed = tl.where(place == 0, _SEALED, observed)

    # A state that is assigned is sealed, and zeros leave what was.
    first = tl.sum(tl.where(place == 0, given, 0.0), 0)
    seal = tl.where(tl.abs(first - _SEALED) <= _ROUNDING, _SEALED, first)
    state = tl.where(place == 0, seal, given)
    other = tl.where(first < 0.0, state, before)
    unseen = tl.where(place == 0, _UNSEEN, 0.0)
    other = tl.where(first > 0.0, unseen, other)
    found = tl.where(_is_observation(given, place, FIRST), observed, other)
    tl.debug_barrier()
    tl.store(settled + row * WIDTH + place, found, mask=inside)


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
    wanted: Wanted,
    by_integers: bool = False,
) -> Both:
    """Quantize a matrix to float8; write it and its transpose.

    Args:
        x: (m, k), bfloat16, float16 or float32.
        asked: How to quantize it, with one scale.
        known: What is known of that scale. If the scale may be unknown, a
            separate pass computes the amax. A kernel decides this on the
            device, so that the host does not wait.
        wanted: What to return beside the codes.
        by_integers: Whether to compute codes by integer arithmetic. Triton's
            interpreter needs it: its own conversion is wrong.
    """
    m, k = x.shape
    given = known.scale is not None
    grid = (triton.cdiv(m, ROWS), triton.cdiv(k, COLUMNS))
    strides = x.stride(0), x.stride(1)
    block = {"ROWS": ROWS, "COLUMNS": COLUMNS}
    # One for each tile, which its program writes, or one that all raise.
    tiles = (number_of_tiles(m, k),)
    amaxes = _empty(x, tiles, torch.float32) if given else _zero(x)
    unseen = known.unseen if known.unseen is not None else amaxes
    if not given or (known.unseen is not None and not known.seen_lately):
        amax_kernel[grid](
            x,
            unseen,
            amaxes,
            m,
            k,
            *strides,
            ALWAYS=not given,
            INDEX=0,
            **tile_constants((m, k)),
            **block,
        )
    dtype = getattr(torch, asked.format)
    values, across = _empty(x, (m, k), dtype), _empty(x, (k, m), dtype)
    scale = parts = _empty(x, (), torch.float32)
    if wanted.column_sums:
        parts = _empty(x, (grid[0], k), torch.float32)
    cast_kernel[grid](
        x,
        known.scale if given else amaxes,
        unseen,
        scale,
        values,
        across,
        amaxes,
        parts,
        m,
        k,
        *strides,
        **cast_constants(asked, known, (m, k), sums=wanted.column_sums),
        OBSERVE=wanted.amax and given,
        **conversion_constants(by_integers),
        **block,
    )
    amax = amaxes.view(torch.float32) if wanted.amax else None
    sums = None
    if wanted.column_sums:
        sums = _empty(x, (k,), torch.float32)
        sums_kernel[(triton.cdiv(k, SUMMED),)](
            parts, sums, grid[0], k, **sums_constants()
        )
    return Both(values, across, scale, amax, sums)


def number_of_tiles(m: Any, k: Any) -> Any:
    """Return the number of tiles of an (m, k) matrix, rounded up."""
    return -(-m // ROWS) * -(-k // COLUMNS)


def _empty(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _zero(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=x.device)


SUMMED = 32
"""The number of columns whose sums one program adds up."""


def sums_constants() -> dict[str, int]:
    """Return the compile-time constants of `sums_kernel`."""
    return {"PARTS": 64, "BLOCK": SUMMED}


def tile_constants(shape: tuple[int, int]) -> dict[str, bool]:
    """Return whether tiles fit a matrix, and if it needs 64-bit indices."""
    m, k = shape
    fits = m % ROWS == 0 and k % COLUMNS == 0
    return {"EVEN": fits, "WIDE": m * k >= 2**31}


def conversion_constants(by_integers: bool) -> dict[str, bool]:
    """Return how `cast_kernel` converts; see `quantize_both_ways`."""
    # NVIDIA's conversion saturates, and keeps NaN.
    saturates = not by_integers and torch.version.hip is None
    return {"BY_INTEGERS": by_integers, "SATURATES": saturates}


def cast_constants(
    asked: Quantization,
    known: ScaleHint,
    shape: tuple[int, int],
    index: int = 0,
    place: int = 0,
    marked: bool = False,
    sums: bool = False,
) -> dict[str, Any]:
    """Return the compile-time constants of `cast_kernel`.

    Args:
        asked: How to quantize.
        known: What is known of the scale. Its tensors are not read.
        shape: The shape of the matrix.
        index: The operand's place in the tensors of scales and flags.
        place: The place of the scale that is written.
        marked: Whether to write the marked scale too.
        sums: Whether to write the sums of the tile's columns.
    """
    return {
        "GIVEN": known.scale is not None,
        "MAYBE_UNSEEN": known.unseen is not None,
        "FOUND_BEFORE": not known.seen_lately,
        "INVERTED": known.rule.inverted,
        "INDEX": index,
        "PLACE": place,
        "MARKED": marked,
        "SUMS": sums,
        **tile_constants(shape),
        **format_constants(asked, known.rule.margin),
    }


def format_constants(asked: Quantization, margin: int = 0) -> dict[str, Any]:
    """Return the compile-time constants of a format and its scales."""
    found = formats.get(asked.format)
    lowest, shift = casting.grid_constants(asked.format)
    return {
        "TOP": found.max / 2.0**margin,
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
def _places(
    row,
    column,
    m,
    k,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the indices of a tile's rows and columns, and its mask."""
    i = row * ROWS + tl.arange(0, ROWS)
    j = column * COLUMNS + tl.arange(0, COLUMNS)
    if WIDE:
        i, j = i.to(tl.int64), j.to(tl.int64)
    inside = (i[:, None] < m) & (j[None, :] < k)
    if EVEN:
        inside = tl.full((ROWS, COLUMNS), True, tl.int1)
    return i, j, inside


@triton.jit
def _tile(
    x,
    row,
    column,
    m,
    k,
    by_row,
    by_column,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load a tile in float32."""
    i, j, inside = _places(row, column, m, k, EVEN, WIDE, ROWS, COLUMNS)
    places = x + i[:, None] * by_row + j[None, :] * by_column
    if EVEN:
        return tl.load(places).to(tl.float32)
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _largest(numbers):
    """Return the bits of a tile's amax; the bits of NaN if one value is NaN.

    Magnitudes are ordered like their bits, and NaN is the largest.
    """
    return tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _amax_of_all(
    x,
    m,
    k,
    by_row,
    by_column,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the amax of a whole matrix, read by one program."""
    found = tl.zeros((ROWS, COLUMNS), tl.int32)
    for row in range(0, tl.cdiv(m, ROWS)):
        for column in range(0, tl.cdiv(k, COLUMNS)):
            tile = _tile(
                x,
                row,
                column,
                m,
                k,
                by_row,
                by_column,
                EVEN,
                WIDE,
                ROWS,
                COLUMNS,
            )
            bits = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            found = tl.maximum(found, bits)
    return tl.max(found).to(tl.float32, bitcast=True)


@triton.jit
def _quotient(x, scale, smallest):
    """Compute `x / scale`, correctly rounded wherever a code depends on it.

    It uses the reciprocal and one correction (P. Markstein, "Computation of
    elementary functions on the IBM RISC System/6000 processor", 1990), half of
    the instructions of a division. Infinity, NaN and the signs of zeros are
    preserved. It divides if a correction could be subnormal: `smallest` is the
    smallest scale.
    """
    if smallest < 2.0**-60:
        quotient = tl.div_rn(x, tl.zeros_like(x) + scale)
    else:
        reciprocal = tl.div_rn(1.0 + 0.0 * scale, scale)
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
    """Return the float8 codes of clipped values, by integer arithmetic."""
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
def _code(
    numbers,
    scale,
    smallest,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    NAN: tl.constexpr,
    BY_INTEGERS: tl.constexpr,
    SATURATES: tl.constexpr,
):
    """Return the float8 codes of a tile divided by a scale."""
    number = _quotient(numbers, scale, smallest)
    is_nan = numbers != numbers
    if SATURATES:
        code = number.to(FORMAT).to(tl.uint8, bitcast=True)
        # The hardware writes 0x7F. A condition in place of a number would do,
        # but with a single conversion to a wider type Triton 3.6 transposes
        # what was before that, and computes all codes twice.
        is_nan = is_nan.to(tl.uint8)
        code = (code | is_nan) if NAN == 0x7F else (code ^ is_nan)
    else:
        number = tl.minimum(tl.maximum(number, -LIMIT), LIMIT)
        if BY_INTEGERS:
            code = _codes_of(number, MANTISSA, LOWEST, SHIFT, SUBNORMALS)
            code = code.to(tl.uint8)
        else:
            code = number.to(FORMAT).to(tl.uint8, bitcast=True)
        code = tl.where(is_nan, NAN, code).to(tl.uint8)
    return code


@triton.jit
def _store(to, i, j, columns, code, inside, EVEN: tl.constexpr):
    """Write the codes of rows i and columns j into a matrix of float8."""
    codes = to.to(tl.pointer_type(tl.uint8), bitcast=True)
    places = codes + i[:, None] * columns + j[None, :]
    if EVEN:
        tl.store(places, code)
    else:
        tl.store(places, code, mask=inside)


@triton.jit
def _own_amax(
    x,
    amaxes,
    m,
    k,
    by_row,
    by_column,
    FOUND_BEFORE: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the amax of an operand that was never observed before."""
    if FOUND_BEFORE:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        amax = largest_of(amaxes, tiles, ROWS * COLUMNS)
    else:
        amax = _amax_of_all(
            x, m, k, by_row, by_column, EVEN, WIDE, ROWS, COLUMNS
        )
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
    sums,
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
    INDEX: tl.constexpr,
    PLACE: tl.constexpr,
    MARKED: tl.constexpr,
    SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    OBSERVE: tl.constexpr,
    BY_INTEGERS: tl.constexpr,
    SATURATES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize a tile; write it and its transpose.

    The first program also writes the scale. If `MARKED`, it writes it a second
    time, as NaN if a value is not finite: see `Quantized.with_nan_scales`.
    """
    row, column = tl.program_id(0), tl.program_id(1)
    numbers = _tile(
        x, row, column, m, k, by_row, by_column, EVEN, WIDE, ROWS, COLUMNS
    )
    mark = 1.0
    if GIVEN:
        chosen = tl.load(scale + INDEX)
        if MAYBE_UNSEEN:
            wanted = tl.load(unseen + INDEX) != 0
            if wanted:
                amax = _own_amax(
                    x,
                    amaxes,
                    m,
                    k,
                    by_row,
                    by_column,
                    FOUND_BEFORE,
                    EVEN,
                    WIDE,
                    ROWS,
                    COLUMNS,
                )
                chosen = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
    else:
        amax = tl.load(scale + INDEX).to(tl.float32, bitcast=True)
        chosen = scale_of(amax, 1.0, TOP, INVERTED, POWER_OF_TWO)
        mark = amax * 0.0 + 1.0
    if (row == 0) & (column == 0):
        tl.store(used + PLACE, chosen)
        if MARKED:
            tl.store(used + PLACE + _MARKED_AFTER, chosen * mark)
    if OBSERVE:
        largest = _largest(numbers).to(tl.float32, bitcast=True)
        tl.store(amaxes + row * tl.num_programs(1) + column, largest)
    i, j, inside = _places(row, column, m, k, EVEN, WIDE, ROWS, COLUMNS)
    if SUMS:
        tl.store(sums + row * k + j, tl.sum(numbers, 0), mask=j < k)
    code = _code(
        numbers,
        chosen,
        chosen,
        LIMIT,
        FORMAT,
        MANTISSA,
        LOWEST,
        SHIFT,
        SUBNORMALS,
        NAN,
        BY_INTEGERS,
        SATURATES,
    )
    _store(values, i, j, k, code, inside, EVEN)
    _store(across, j, i, m, tl.trans(code), tl.trans(inside), EVEN)


@triton.jit
def edges_kernel(
    x,
    amaxes,
    m,
    k,
    by_row,
    by_column,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Raise the amaxes of m rows and of k columns, int32 bits, by a tile."""
    row, column = tl.program_id(0), tl.program_id(1)
    numbers = _tile(
        x, row, column, m, k, by_row, by_column, EVEN, WIDE, ROWS, COLUMNS
    )
    bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    i, j, _ = _places(row, column, m, k, EVEN, WIDE, ROWS, COLUMNS)
    tl.atomic_max(amaxes + i, tl.max(bits, 1), mask=i < m)
    tl.atomic_max(amaxes + m + j, tl.max(bits, 0), mask=j < k)


@triton.jit
def _scales_of(
    amaxes,
    place,
    inside,
    scales,
    is_first,
    TOP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    MARKED: tl.constexpr,
):
    """Return the scales of rows; the first programs write them too."""
    bits = tl.load(amaxes + place, mask=inside, other=0)
    amax = bits.to(tl.float32, bitcast=True)
    found = scale_of(amax, 1.0, TOP, False, POWER_OF_TWO)
    marked = found * (amax * 0.0 + 1.0) if MARKED else found
    if is_first:
        tl.store(scales + place, marked, mask=inside)
    return found


@triton.jit
def cast_rows_kernel(
    x,
    amaxes,
    values,
    across,
    row_scales,
    column_scales,
    sums,
    m,
    k,
    by_row,
    by_column,
    TOP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    SHIFT: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    NAN: tl.constexpr,
    MARKS_ROWS: tl.constexpr,
    MARKS_COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    BY_INTEGERS: tl.constexpr,
    SATURATES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize a tile by the scales of its rows, and across by its columns."""
    row, column = tl.program_id(0), tl.program_id(1)
    numbers = _tile(
        x, row, column, m, k, by_row, by_column, EVEN, WIDE, ROWS, COLUMNS
    )
    i, j, inside = _places(row, column, m, k, EVEN, WIDE, ROWS, COLUMNS)
    of_rows = _scales_of(
        amaxes, i, i < m, row_scales, column == 0, TOP, POWER_OF_TWO, MARKS_ROWS
    )
    of_columns = _scales_of(
        amaxes + m,
        j,
        j < k,
        column_scales,
        row == 0,
        TOP,
        POWER_OF_TWO,
        MARKS_COLUMNS,
    )
    if SUMS:
        tl.store(sums + row * k + j, tl.sum(numbers, 0), mask=j < k)
    code = _code(
        numbers,
        of_rows[:, None],
        tl.min(of_rows, 0),
        LIMIT,
        FORMAT,
        MANTISSA,
        LOWEST,
        SHIFT,
        SUBNORMALS,
        NAN,
        BY_INTEGERS,
        SATURATES,
    )
    _store(values, i, j, k, code, inside, EVEN)
    code = _code(
        numbers,
        of_columns[None, :],
        tl.min(of_columns, 0),
        LIMIT,
        FORMAT,
        MANTISSA,
        LOWEST,
        SHIFT,
        SUBNORMALS,
        NAN,
        BY_INTEGERS,
        SATURATES,
    )
    _store(across, j, i, m, tl.trans(code), tl.trans(inside), EVEN)


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
    INDEX: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the amax of a matrix, or of each tile if a flag is set."""
    row, column = tl.program_id(0), tl.program_id(1)
    if ALWAYS:
        tile = _tile(
            x, row, column, m, k, by_row, by_column, EVEN, WIDE, ROWS, COLUMNS
        )
        tl.atomic_max(amaxes + INDEX, _largest(tile))
    else:
        if tl.load(wanted + INDEX) != 0:
            tile = _tile(
                x,
                row,
                column,
                m,
                k,
                by_row,
                by_column,
                EVEN,
                WIDE,
                ROWS,
                COLUMNS,
            )
            place = row * tl.num_programs(1) + column
            largest = _largest(tile).to(tl.float32, bitcast=True)
            tl.store(amaxes + place, largest)


@triton.jit
def sums_kernel(
    sums, found, parts, k, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up the sums of columns that each row of tiles has written."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part[:, None] < parts) & (j[None, :] < k)
        places = sums + part[:, None] * k + j[None, :]
        total += tl.load(places, mask=inside, other=0.0)
    column = tl.sum(total, 0).to(found.dtype.element_ty)
    tl.store(found + j, column, mask=j < k)
