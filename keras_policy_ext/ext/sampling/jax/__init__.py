"""The gradients of a loss with respect to tensors inside it, on JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from keras_policy_ext._types import Tensor


def marked_gradients(
    run: Callable[..., tuple[Tensor, Any]], step_by_step: bool
) -> tuple[Any, list[Tensor | None]]:
    """Run and differentiate `run`; see `captured.marked_gradients`."""
    zeros: list[Tensor] = []

    def mark(x: Tensor) -> Tensor:
        zeros.append(jnp.zeros_like(x))
        return x

    def loss(probes: list[Tensor]) -> tuple[Tensor, Any]:
        left = iter(probes)
        return run(lambda x: x + next(left))

    with jax.disable_jit(step_by_step):
        run(mark)
        found, kept = jax.grad(loss, has_aux=True)(zeros)
    return kept, found
