"""PyTorch on a CPU: the arithmetic of states on numbers.

A state is a few thousand numbers, of which ten in a row decide what becomes
of the row. What is asked of it is forty operations, which each take an eager
call of PyTorch longer than what they compute: 0.6 ms for a layer and step.
Here it is 0.04 ms: numbers of Python decide, NumPy moves histories in the
same memory (torch 2.13). Quotients and sums of two float32 are rounded from
float64 as if they had been computed in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.torch.backend import is_real
from keras_policy_ext.numerics.observations import (
    ROUNDING,
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.numerics.scale_protocol import HistoryScales
from keras_policy_ext.numerics.scale_sources import DelayedSource
from keras_policy_ext.numerics.scaling import inverted_of_number
from keras_policy_ext.recipes import OPERANDS

Array = np.ndarray[Any, Any]

FIRST = 2 + SLOTS
"""Where the history starts in a row, behind the scale that was used last."""

_KERNEL = OPERANDS.index("kernel")


class CpuStates:
    """See `StateKernels`."""

    def supports(self, source: Any, state: Tensor) -> str | None:
        """See `StateKernels.supports`."""
        if type(source) is not DelayedSource:
            return "this arithmetic is that of delayed scaling"
        there = is_real(state) and state.device.type == "cpu"
        if not there or state.dtype != torch.float32:
            return "this state has no float32 numbers on a CPU"
        if torch.compiler.is_exporting() or torch.compiler.is_compiling():
            return "a compiler does not see what NumPy does"
        return None

    def history_scales(self, source: Any, state: Tensor) -> HistoryScales:
        """See `StateKernels.history_scales`."""
        before = _before(source, state.detach().numpy())
        _, scales_before = zip(*before, strict=True)
        scales = np.array(scales_before, np.float32)
        unseen = scales == 0.0 if source.starts_from_current else None
        return HistoryScales(
            torch.from_numpy(scales),
            None if unseen is None else torch.from_numpy(unseen),
        )

    def observation(
        self, source: Any, amaxes: list[Tensor], slot: int
    ) -> Tensor:
        """See `StateKernels.observation`."""
        found = np.zeros(source.state_shape, "float32")
        found[:, 0] = UNIT
        found[:, 1 + slot % SLOTS] = [UNIT * amax.item() for amax in amaxes]
        return torch.from_numpy(found)

    def settle(self, source: Any, value: Tensor, previous: Tensor) -> Tensor:
        """See `StateKernels.settle`."""
        value, previous = value.detach(), previous.detach()
        values, settled = value.numpy(), previous.numpy().copy()
        before = _before(source, settled)
        with np.errstate(over="ignore"):
            for row, numbers in enumerate(value[:, : FIRST + 1].tolist()):
                if numbers[0] < 0.0:
                    _give(settled[row], values[row])
                elif numbers[0] > 0.0 and _is_observation(numbers):
                    newest = _newest(numbers, value[row], row == _KERNEL)
                    _enter(settled[row], newest, *before[row])
                elif numbers[0] > 0.0:
                    settled[row] = 0.0
                    settled[row, 0] = UNSEEN
        return torch.from_numpy(settled)


def _before(source: Any, state: Array) -> list[tuple[bool, float]]:
    """Of each row, whether it is intact, and the scale of its operand.

    See `Layout.is_intact` and `DelayedSource.history_scales`.
    """
    history = state[:, FIRST:]
    largest = history.max(axis=1).tolist()
    newest_only = source.recipe.amax_compute == "most_recent"
    amaxes = history[:, 0].tolist() if newest_only else largest
    heads = state[:, :FIRST].tolist()
    initial: float = source.initial
    found = []
    for head, most, amax, limit in zip(
        heads, largest, amaxes, source.limits_with_margin, strict=True
    ):
        first, *slots, stored = head
        is_intact = first == VALID_MARK and not any(slots) and most < math.inf
        if is_intact and amax > 0.0:
            scale = inverted_of_number(amax, limit)
        else:
            scale = stored if is_intact and stored > 0.0 else initial
        found.append((is_intact, scale))
    return found


def _is_observation(numbers: list[float]) -> bool:
    """See `Layout._is_observation`; of a number of uses above 0."""
    uses = _rounded(numbers[0] / UNIT)
    *slots, scale, newest = numbers[1:]
    seen = math.inf if scale or newest else SLOTS - slots.count(0.0)
    return uses >= seen and (uses.is_integer() or math.isinf(uses))


def _newest(numbers: list[float], row: Tensor, is_kernel: bool) -> float | None:
    """See `Layout._newest`; None for what is not entered."""
    entries = numbers[1:]
    if not all(map(math.isfinite, entries)):
        return None
    if not is_kernel:
        return _rounded(max(entries) / UNIT)
    total = sum(entries)
    if entries.count(0.0) < len(entries) - 2:
        # More than two numbers have different sums in different orders.
        total = row[1 : FIRST + 1].sum().item()
    mean = _rounded(total) / max(_rounded(numbers[0] / UNIT), 1.0)
    return _rounded(_rounded(mean) / UNIT)


def _rounded(number: float) -> float:
    """A number in float32; infinite where that has none as large."""
    return float(np.float32(number))


def _give(row: Array, value: Array) -> None:
    """A state into a settled row: sealed if it is as good as sealed."""
    row[:] = value
    if abs(float(value[0]) - VALID_MARK) <= ROUNDING:
        row[0] = VALID_MARK


def _enter(
    row: Array, newest: float | None, intact: bool, scale: float
) -> None:
    """An amax into a settled row: see `Layout._entered`."""
    if not intact:
        row[FIRST:] = 0.0
    row[:FIRST] = 0.0
    row[0], row[FIRST - 1] = VALID_MARK, scale
    if newest is not None:
        first = row[FIRST]
        row[FIRST:-1] = row[FIRST + 1 :]
        row[-1] = first
        row[FIRST] = newest
