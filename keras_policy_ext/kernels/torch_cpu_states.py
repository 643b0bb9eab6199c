"""PyTorch on a CPU: the arithmetic of states in NumPy, on the same memory.

A state is a few thousand numbers, and what is asked of it forty operations,
which each take an eager call of PyTorch longer than what they compute: 0.6 ms
for a layer and step, and 0.1 ms in NumPy (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from keras_policy_ext.frameworks.operations import UNIT
from keras_policy_ext.frameworks.torch import is_real
from keras_policy_ext.numerics.casting import EXPONENT_BITS
from keras_policy_ext.numerics.observations import (
    ROUNDING,
    SEALED,
    SLOTS,
    UNSEEN,
)
from keras_policy_ext.numerics.scale_protocol import HistoryScales
from keras_policy_ext.numerics.scale_sources import DelayedSource
from keras_policy_ext.numerics.scaling import LARGEST_MARGIN, SMALLEST_SCALE
from keras_policy_ext.recipes import OPERANDS

Tensor = Any
Array = np.ndarray[Any, Any]

FIRST = 2 + SLOTS
"""Where the history starts in a row, behind the scale that was used last."""

_WEIGHTS = np.where(np.arange(FIRST) < SLOTS, 1.0, np.inf)
"""What counts as a use, and what no observation has."""

_IS_KERNEL = np.array([operand == "kernel" for operand in OPERANDS])


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
        scales = torch.from_numpy(
            _scales_before(source, state.detach().numpy())
        )
        unseen = scales == 0.0 if source.starts_from_current else None
        return HistoryScales(scales, unseen)

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
        # More than two numbers have different sums in different orders.
        sums = value[:, 1 : FIRST + 1].sum(1).numpy()
        with np.errstate(all="ignore"):
            settled = _settled(source, value.numpy(), previous.numpy(), sums)
        return torch.from_numpy(settled)


def _scales_before(source: Any, state: Array) -> Array:
    """The scales of the operands: see `DelayedSource.history_scales`."""
    intact = _intact(state)
    history = state[:, FIRST:]
    newest_only = source.recipe.amax_compute == "most_recent"
    reduced = history[:, 0] if newest_only else history.max(axis=1)
    reduced = np.where(intact, reduced, np.float32(0.0))
    stored = np.where(intact, state[:, FIRST - 1], np.float32(0.0))
    known = stored > 0.0
    previous = np.where(known, stored, np.float32(source.initial))
    bits = reduced.view("int32")
    usable = (bits > 0) & (bits < EXPONENT_BITS)
    return np.where(usable, _scales_of(source, reduced), previous)


def _intact(state: Array) -> Array:
    """See `Layout.is_intact`."""
    is_zero: Array = (state[:, 1 : FIRST - 1] == 0.0).all(axis=1)
    return is_zero & (state[:, 0] == SEALED)


def _scales_of(source: Any, amaxes: Array) -> Array:
    """See `scaling.scale_of_multiplier`; of amaxes that are usable."""
    margin = 2.0 ** min(source.rule.margin, LARGEST_MARGIN)
    tops = np.array([limit / margin for limit in source.limits], "float32")
    with np.errstate(all="ignore"):
        multipliers = tops / np.maximum(amaxes, np.float32(SMALLEST_SCALE))
        multipliers = multipliers.clip(SMALLEST_SCALE, 1.0 / SMALLEST_SCALE)
        scales: Array = np.float32(1.0) / multipliers
    return scales


def _settled(source: Any, value: Array, previous: Array, sums: Array) -> Array:
    """See `DelayedSource.settle` and `Layout.settle`; `sums` of the amaxes."""
    used = _scales_before(source, previous)
    unit = np.float32(UNIT)
    first, entries = value[:, 0], value[:, 1 : FIRST + 1]
    uses = first / unit
    observed = np.zeros_like(previous)
    observed[:, 0] = SEALED
    observed[:, FIRST - 1] = used
    intact = _intact(previous)[:, np.newaxis]
    history = np.where(intact, previous[:, FIRST:], np.float32(0.0))
    observed[:, FIRST:] = history
    finite = np.isfinite(entries).all(axis=1)
    mean = sums / np.maximum(uses, np.float32(1.0))
    newest = np.where(_IS_KERNEL, mean, entries.max(axis=1)) / unit
    rolled = np.roll(history, -1, axis=1)
    rolled[:, 0] = newest
    observed[finite, FIRST:] = rolled[finite]

    count = np.where(entries != 0.0, _WEIGHTS, 0.0).sum(axis=1)
    counted = (uses == np.floor(uses)) & (uses >= count) & (uses > 0.0)
    settled = previous.copy()
    given = uses < 0.0
    settled[given] = value[given]
    rounded = given & (np.abs(first - np.float32(SEALED)) <= ROUNDING)
    settled[rounded, 0] = SEALED
    settled[uses > 0.0] = np.where(np.arange(settled.shape[1]) == 0, UNSEEN, 0)
    settled[counted] = observed[counted]
    return settled
