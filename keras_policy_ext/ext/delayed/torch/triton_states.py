"""PyTorch on CUDA: scales and states by Triton kernels.

A state is (3, width), a row for each operand: see `observations`. The
seal of a row is -1, then zeros as slots: no other code has changed the row. In
kernels a program has one `row`, and `place` are the columns up to `BLOCK`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.torch.triton_casts import (
    Launch,
    aligned,
    is_positive_finite,
    largest_of,
    scale_of,
    stream_of,
)
from keras_policy_ext.ext.delayed.observations import (
    ROUNDING,
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.ext.delayed.sources import DelayedSource, HistoryScales
from keras_policy_ext.recipes import OPERANDS

_ROUNDING = tl.constexpr(ROUNDING)
_SEALED = tl.constexpr(VALID_MARK)
_UNSEEN = tl.constexpr(UNSEEN)
_UNIT = tl.constexpr(UNIT)
_PER_UNIT = tl.constexpr(1.0 / UNIT)


def history_scales(
    source: DelayedSource, state: Tensor, host_flags: Tensor | None = None
) -> HistoryScales:
    """Read the scales of the three operands from a state, on a GPU.

    `unseen` is also written to `host_flags`, bool (3,), in memory that the host
    can read. The state is (3, width), contiguous.
    """
    scales = torch.empty(3, dtype=torch.float32, device=state.device)
    unseen = torch.empty(3, dtype=torch.bool, device=state.device)
    flags = unseen if host_flags is None else host_flags
    constants = state_constants(source)
    history_kernel[(3,)](state, scales, unseen, flags, **constants)
    return HistoryScales(scales, unseen if source.starts_from_current else None)


def observation(
    source: DelayedSource, amaxes: list[Tensor], slot: int
) -> Tensor:
    """Return the amaxes of one use of a layer as a state's gradient.

    An operand's amax is a float32 scalar, or the amaxes of its tiles.
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


class Settling:
    """Computes the new state of a source after a value is assigned to it.

    Args:
        count: How many observations are merged with the value first; at most 2.
    """

    def __init__(self, source: DelayedSource, count: int, device: torch.device):
        constants = {
            **state_constants(source),
            "OBSERVED": count,
            "KERNEL_ROW": OPERANDS.index("kernel"),
        }
        self._launch = Launch(settle_kernel, (3,), constants)
        self._stream = stream_of(device)

    def __call__(
        self,
        value: Tensor,
        observed: list[Tensor],
        previous: Tensor,
        settled: Tensor,
    ) -> None:
        """Write the state into `settled`, which may be `previous`.

        All tensors are (3, width) and contiguous.
        """
        # The kernel has arguments for two, and reads `OBSERVED` of them: any
        # tensor stands for the others.
        two_observed = [*observed, value, value][:2]
        written = aligned(settled)
        operands = map(aligned, (value, *two_observed, previous))
        self._launch(self._stream(), *operands, written)
        if written is not settled:
            settled.copy_(written)


def state_constants(source: DelayedSource) -> dict[str, Any]:
    """Return the compile-time constants of the state kernels.

    `FIRST` is the first column of the history; for `TOPS` see `scale_of`.
    """
    width = source.layout.width
    tops = [limit / 2.0**source.recipe.margin for limit in source.limits]
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
def _is_intact(start, place, FIRST: tl.constexpr):
    """Return True if the row at `start` was observed and has its seal."""
    is_seal = place < FIRST - 1
    seal = tl.where(place == 0, _SEALED, 0.0)
    found = tl.load(start + place, mask=is_seal, other=0.0)
    return tl.max((is_seal & (found != seal)).to(tl.int32), 0) == 0


@triton.jit
def _scales_from(
    state,
    row,
    place,
    TOPS: tl.constexpr,
    INITIAL: tl.constexpr,
    NEWEST_ONLY: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Return an operand's scale, the last used one, and if it was observed."""
    # The last used scale is 0 for a row that was never used, or is not intact.
    start = state + row * WIDTH
    in_history = (place >= FIRST) & (place < WIDTH)
    history = tl.load(start + place, mask=in_history, other=-float("inf"))
    amax = tl.max(history, 0)
    if NEWEST_ONLY:
        amax = tl.load(start + FIRST)
    intact = _is_intact(start, place, FIRST)
    stored = tl.where(intact, tl.load(start + FIRST - 1), 0.0)
    amax = tl.where(intact, amax, 0.0)
    is_known = stored > 0.0
    top = tl.where(row == 0, TOPS[0], tl.where(row == 1, TOPS[1], TOPS[2]))
    previous = tl.where(is_known, stored, INITIAL)
    scale = scale_of(amax, previous, top, INVERTED=True, POWER_OF_TWO=False)
    return scale, stored, is_known | is_positive_finite(amax)


@triton.jit
def history_kernel(
    state,
    scales,
    unseen,
    host_flags,
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
    scale, _stored, seen = _scales_from(
        state, row, place, TOPS, INITIAL, NEWEST_ONLY, WIDTH, FIRST
    )
    tl.store(scales + row, scale)
    tl.store(unseen + row, seen == 0)
    tl.store(host_flags + row, seen == 0)


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
    """Write the observation of each operand's amax into `found`.

    `first`, `second` and `third` are the amaxes of the operands' tiles, of
    which `PARTS` are read at a time. There is one program per operand.
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
def _history_with_newest(
    given,
    previous,
    row,
    place,
    KERNEL_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Return a row's history with the amax of the observation `given` added."""
    # It is the history of `previous` if that amax is not finite.
    start = previous + row * WIDTH
    amaxes = tl.where((place > 0) & (place <= FIRST), given, 0.0)
    bits = amaxes.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = tl.max(bits, 0) < 0x7F800000
    uses = tl.sum(tl.where(place == 0, given, 0.0), 0) * _PER_UNIT
    mean = tl.div_rn(tl.sum(amaxes, 0), tl.maximum(uses, 1.0))
    newest = tl.where(row == KERNEL_ROW, mean, tl.max(amaxes, 0)) * _PER_UNIT
    # The ring turns left: see `StateLayout._with_newest`.
    older = tl.where(place + 1 >= WIDTH, FIRST, place + 1)
    turned = tl.load(start + older, mask=place > FIRST, other=0.0)
    before = tl.load(start + place, mask=place < WIDTH, other=0.0)
    intact = _is_intact(start, place, FIRST)
    turned = tl.where(intact, turned, 0.0)
    rolled = tl.where(place == FIRST, newest, turned)
    return tl.where(finite, rolled, tl.where(intact, before, 0.0))


@triton.jit
def _is_observation(given, place, FIRST: tl.constexpr):
    """Return True for a row that is an observation; see `StateLayout`."""
    uses = tl.sum(tl.where(place == 0, given, 0.0), 0) * _PER_UNIT
    is_entry = (place > 0) & (place <= FIRST) & (given != 0.0)
    # Each slot with an amax needs a use; a scale or a history is of a state.
    needed = tl.where(place < FIRST - 1, 1.0, float("inf"))
    needed = tl.where(is_entry, needed, 0.0)
    is_whole = uses == tl.floor(uses)
    return is_whole & (uses >= tl.sum(needed, 0)) & (uses > 0.0)


@triton.jit
def _larger(a, b):
    """Return the larger of two numbers; NaN if one is NaN."""
    return tl.where(a != a, a, tl.where(b != b, b, tl.maximum(a, b)))


@triton.jit
def _merged(given, observed, place, inside):
    """Merge an observation into a value: see `observations.merged`."""
    largest = _larger(given, observed)
    is_amax = inside & (place > 0) & (largest != 0.0)
    slots = tl.sum(is_amax.to(tl.float32), 0)
    uses = tl.maximum(largest, _UNIT * slots)
    uses = tl.where(largest != largest, largest, uses)  # NaN stays.
    first = tl.sum(tl.where(place == 0, given, 0.0), 0)
    return tl.where(first < 0.0, given, tl.where(place == 0, uses, largest))


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
    """Write the new row of each operand's state; see `StateLayout.settle`.

    `OBSERVED` of `latest` and `earlier` are merged with `value` first. There is
    one program per operand. It may write where it has read `previous`.
    """
    row, place = tl.program_id(0), tl.arange(0, BLOCK)
    here, inside = row * WIDTH + place, place < WIDTH
    given = tl.load(value + here, mask=inside, other=0.0)
    if OBSERVED > 0:
        merged = tl.load(latest + here, mask=inside, other=0.0)
        if OBSERVED > 1:
            other = tl.load(earlier + here, mask=inside, other=0.0)
            merged = _larger(merged, other)
        given = _merged(given, merged, place, inside)
    before = tl.load(previous + here, mask=inside, other=0.0)
    used, stored, seen = _scales_from(
        previous, row, place, TOPS, INITIAL, NEWEST_ONLY, WIDTH, FIRST
    )
    if FROM_CURRENT:
        used = tl.where(seen, used, stored)
    # The row that an observation makes: seal, zeros, scale, history.
    history = _history_with_newest(
        given, previous, row, place, KERNEL_ROW, WIDTH, FIRST
    )
    observed = tl.where(place >= FIRST, history, 0.0)
    observed = tl.where(place == FIRST - 1, used, observed)
    observed = tl.where(place == 0, _SEALED, observed)

    # The row that another value makes: a state, whose mark is negative, is
    # sealed; zeros leave what was; a scaled observation counts as none.
    first = tl.sum(tl.where(place == 0, given, 0.0), 0)
    seal = tl.where(tl.abs(first - _SEALED) <= _ROUNDING, _SEALED, first)
    state = tl.where(place == 0, seal, given)
    other = tl.where(first < 0.0, state, before)
    unseen = tl.where(place == 0, _UNSEEN, 0.0)
    other = tl.where(first > 0.0, unseen, other)
    found = tl.where(_is_observation(given, place, FIRST), observed, other)
    tl.debug_barrier()  # All of `previous` was read.
    tl.store(settled + here, found, mask=inside)
