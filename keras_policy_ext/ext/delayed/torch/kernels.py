"""PyTorch: the arithmetic of states, in NumPy on a CPU and by Triton."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import numpy as np
import torch

from keras_policy_ext import user_code
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.torch import casts
from keras_policy_ext.backends.torch.backend import is_real
from keras_policy_ext.ext.delayed.frameworks import StateKernels
from keras_policy_ext.ext.delayed.observations import (
    FIRST,
    ROUNDING,
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.ext.delayed.sources import DelayedSource, HistoryScales
from keras_policy_ext.ext.delayed.torch import observations
from keras_policy_ext.numerics.scaling import inverted_of_number
from keras_policy_ext.recipes import OPERANDS, DelayedScaling

if casts.HAS_TRITON:
    from keras_policy_ext.ext.delayed.torch import triton_states

Array = np.ndarray[Any, Any]

_KERNEL_ROW = OPERANDS.index("kernel")


class CpuStates(StateKernels):
    """NumPy arithmetic of scales and states on a CPU; see `StateKernels`."""

    @override
    def supports(self, source: object, state: Tensor) -> str | None:
        if type(source) is not DelayedSource:
            return "this arithmetic is that of delayed scaling"
        is_on_cpu = is_real(state) and state.device.type == "cpu"
        if not is_on_cpu or state.dtype != torch.float32:
            return "this state has no float32 numbers on a CPU"
        if torch.compiler.is_compiling():  # Also in an export.
            return "a compiler does not see what NumPy does"
        return None

    @override
    def history_scales(
        self, source: DelayedSource, state: Tensor
    ) -> HistoryScales:
        rows = _read_rows(source, state.detach().numpy())
        _, scales_of_rows = zip(*rows, strict=True)
        scales = np.array(scales_of_rows, np.float32)
        unseen = None
        if source.starts_from_current:
            unseen = torch.from_numpy(scales == 0.0)
        return HistoryScales(torch.from_numpy(scales), unseen)

    @override
    def observation(
        self, source: DelayedSource, amaxes: list[Tensor], slot: int
    ) -> Tensor:
        rows = np.zeros((len(OPERANDS), source.layout.width), "float32")
        rows[:, 0] = UNIT
        rows[:, 1 + slot % SLOTS] = [UNIT * amax.item() for amax in amaxes]
        return torch.from_numpy(rows)

    @override
    def settle(
        self, source: DelayedSource, value: Tensor, previous: Tensor
    ) -> Tensor:
        value, previous = value.detach(), previous.detach()
        values, settled = value.numpy(), previous.numpy().copy()
        rows_before = _read_rows(source, settled)
        with np.errstate(over="ignore"):
            for row, entries in enumerate(value[:, : FIRST + 1].tolist()):
                # `first` is the mark of a settled row, which is negative, or
                # the uses of an observation. A row of zeros changes nothing.
                first = entries[0]
                if first < 0.0:
                    settled[row] = values[row]
                    if abs(first - VALID_MARK) <= ROUNDING:
                        settled[row, 0] = VALID_MARK
                elif first > 0.0 and _is_observation(entries):
                    is_kernel = row == _KERNEL_ROW
                    newest = _newest_amax(entries, value[row], is_kernel)
                    is_intact, scale = rows_before[row]
                    _enter_row(settled[row], newest, is_intact, scale)
                elif first > 0.0:
                    settled[row] = 0.0
                    settled[row, 0] = UNSEEN
        return torch.from_numpy(settled)


def _read_rows(source: DelayedSource, state: Array) -> list[tuple[bool, float]]:
    """Return, for each row of a state, whether it is intact, and its scale."""
    history = state[:, FIRST:]
    largest = history.max(axis=1).tolist()
    newest_only = source.recipe.amax_compute == "most_recent"
    amaxes = history[:, 0].tolist() if newest_only else largest
    before_history = state[:, :FIRST].tolist()
    initial: float = source.initial
    rows = []
    # A limit is the largest value of the format of the row's operand.
    for (mark, *slots, stored_scale), peak, amax, limit in zip(
        before_history, largest, amaxes, source.limits_with_margin, strict=True
    ):
        is_intact = mark == VALID_MARK and not any(slots) and peak < math.inf
        if is_intact and amax > 0.0:
            scale = inverted_of_number(amax, limit)
        else:
            is_known = is_intact and stored_scale > 0.0
            scale = stored_scale if is_known else initial
        rows.append((is_intact, scale))
    return rows


def _is_observation(entries: list[float]) -> bool:
    """Return True for an observation; `entries` are those of `settle`."""
    # See `StateLayout._is_observation`. The last two are of a settled state.
    first, *slots, scale, newest = entries
    uses = _rounded(first / UNIT)
    uses_needed = math.inf if scale or newest else SLOTS - slots.count(0.0)
    return uses >= uses_needed and (uses.is_integer() or math.isinf(uses))


def _newest_amax(
    entries: list[float], row: Tensor, is_kernel: bool
) -> float | None:
    """Return the amax of an observation; None if an amax is not finite."""
    # That of a kernel is the mean of all uses, that of others the largest.
    first, *amaxes = entries
    if not all(map(math.isfinite, amaxes)):
        return None
    if not is_kernel:
        return _rounded(max(amaxes) / UNIT)
    total = sum(amaxes)
    if amaxes.count(0.0) < len(amaxes) - 2:
        # Three or more numbers have different sums in different orders.
        total = row[1 : FIRST + 1].sum().item()
    mean = _rounded(total) / max(_rounded(first / UNIT), 1.0)
    return _rounded(_rounded(mean) / UNIT)


def _rounded(number: float) -> float:
    """Round a float to float32; infinite if it is out of range."""
    return float(np.float32(number))


def _enter_row(
    row: Array, newest: float | None, is_intact: bool, scale: float
) -> None:
    """Write a scale and a new amax into a row of a settled state."""
    if not is_intact:
        row[FIRST:] = 0.0
    row[:FIRST] = 0.0
    row[0], row[FIRST - 1] = VALID_MARK, scale
    if newest is not None:
        # The ring turns left, and the newest overwrites the oldest.
        first = row[FIRST]
        row[FIRST:-1] = row[FIRST + 1 :]
        row[-1] = first
        row[FIRST] = newest


class TritonStates(StateKernels):
    """Triton kernels that compute scales and states; see `StateKernels`.

    For `interpreted` see `TritonCasts`.
    """

    def __init__(self, interpreted: bool = False):
        self.interpreted = interpreted
        # One `Settling` for all calls with the same arguments. The module of
        # that class is imported with Triton only.
        self._settling = functools.cache(
            lambda *arguments: triton_states.Settling(*arguments)
        )

    @override
    def supports(self, source: object, state: Tensor) -> str | None:
        if type(source) is not DelayedSource:
            return "Triton's arithmetic is that of delayed scaling"
        if not self.interpreted and state.device.type != "cuda":
            return "Triton's kernels are for CUDA"
        if not is_real(state) or state.dtype != torch.float32:
            return "this state has no float32 numbers yet"
        return casts.refusal(state, self.interpreted)

    @override
    def history_scales(
        self, source: DelayedSource, state: Tensor
    ) -> HistoryScales:
        flags = None
        if self.interpreted or tells_the_host():
            flags = observations.host_flags(state)
        matrix = state.contiguous()
        return triton_states.history_scales(source, matrix, flags)

    @override
    def observation(
        self, source: DelayedSource, amaxes: list[Tensor], slot: int
    ) -> Tensor:
        return triton_states.observation(source, amaxes, slot)

    @override
    def settle(
        self, source: DelayedSource, value: Tensor, previous: Tensor
    ) -> Tensor:
        previous = previous.contiguous()
        settled = torch.empty_like(previous)
        settle = self._settling(source, 0, previous.device)  # No observations.
        settle(value.contiguous(), [], previous, settled)
        return settled

    def merge(
        self,
        source: DelayedSource,
        value: Tensor,
        observed: list[Tensor],
        state: Tensor,
    ) -> None:
        """Change a state in place, as the assignment of a value changes it.

        At most two observations are merged with the value first.
        """
        observed = [each.contiguous() for each in observed]
        settle = self._settling(source, len(observed), state.device)
        settle(value.contiguous(), observed, previous=state, settled=state)
        # PyTorch does not see what a Triton kernel writes.
        torch.autograd.graph.increment_version(state)


@functools.cache
def tells_the_host() -> bool:
    """Return True if a GPU kernel can write to pinned host memory.

    It is tested once per process: a kernel that cannot raises at its launch.
    """
    source = DelayedSource(DelayedScaling())
    try:
        with casts.real_tensors():
            # An observed state: the kernel sets all flags to False.
            state = torch.zeros(source.state_shape, device="cuda")
            state[:, 0], state[:, -1] = VALID_MARK, 1.0
            flags = observations.pinned_flags(len(state))
            triton_states.history_scales(source, state, flags)
            torch.cuda.synchronize()
            return not flags.any()
    # Any error, as in `lacking`. All numbers are the same, so this is none.
    except Exception as error:
        warnings.warn(
            "Triton cannot write into host memory here, so each float8 layer "
            "runs three more small kernels in a step. Received: "
            f"{type(error).__name__}: {error}",
            UserWarning,
            stacklevel=user_code.stacklevel(),
        )
        return False
