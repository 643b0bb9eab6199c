"""The gradients of a loss with respect to tensors inside it, on PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_policy_ext._types import Tensor


def marked_gradients(
    run: Callable[..., tuple[Tensor, Any]], step_by_step: bool
) -> tuple[Any, list[Tensor | None]]:
    """Run and differentiate `run`; see `captured.marked_gradients`."""
    marked: list[Tensor] = []

    def mark(x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        marked.append(x)
        return x

    with torch.enable_grad():
        loss, kept = run(mark)
        wanted = list(marked)
        if not (wanted and loss.requires_grad):
            return kept, [None] * len(wanted)
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return kept, list(found)
