"""PyTorch on a GPU: the kernels of a state in `backends.torch.straight`."""

from __future__ import annotations

from typing import Any

import torch

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.torch.triton_casts import Launch, aligned
from keras_policy_ext.ext.delayed.observations import SLOTS
from keras_policy_ext.ext.delayed.sources import DelayedSource
from keras_policy_ext.ext.delayed.torch import (
    kernels,
    observations,
    triton_states,
)
from keras_policy_ext.recipes import OPERANDS


class StatePasses:
    """The kernels that read a state before a step and observe into it."""

    def __init__(self, source: DelayedSource, interpreted: bool):
        # Whether a GPU reports to the host what was never observed.
        self._reports = interpreted or kernels.tells_the_host()
        constants = triton_states.state_constants(source)
        self._width = constants["WIDTH"]
        grid = (len(OPERANDS),)  # A program for each operand.
        self._read = Launch(triton_states.history_kernel, grid, constants)
        sizes = {name: constants[name] for name in ("WIDTH", "BLOCK")}
        sizes["PARTS"] = 4096  # How many amaxes are read at once.
        # One for each slot: Triton compiles a kernel of its own for an
        # argument that is 1, as the column of slot 0 is, and a `Launch`
        # keeps its first kernel.
        observing = triton_states.observation_kernel
        self._observe_in_slot = [
            Launch(observing, grid, sizes, num_warps=8) for _ in range(SLOTS)
        ]

    def read(self, stream: int, state: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return scales, what was never observed, and `seen_lately`.

        The first two are (3,), of each operand. What was never observed also
        goes to flags that the host reads.
        """
        device = state.device
        scales = torch.empty(3, dtype=torch.float32, device=device)
        unseen = torch.empty(3, dtype=torch.bool, device=device)
        flags = observations.host_flags(state) if self._reports else None
        reported = unseen if flags is None else flags
        self._read(stream, aligned(state), scales, unseen, reported)
        return scales, unseen, observations.seen_lately(state)

    def seen_lately(self, state: Tensor) -> bool:
        """Return True if a GPU reported that all operands were observed."""
        return observations.seen_lately(state)

    def observed(self, stream: int, amaxes: Any, slot: int) -> Tensor:
        """Return the amaxes of all operands as a gradient of the state."""
        shape, device = (3, self._width), amaxes[0].device
        found = torch.empty(shape, dtype=torch.float32, device=device)
        counts = [amax.numel() for amax in amaxes]
        slot %= SLOTS  # Its column is behind that of the uses.
        self._observe_in_slot[slot](stream, *amaxes, *counts, found, 1 + slot)
        return found
