"""The gradients of a loss with respect to tensors inside it, on TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor


def marked_gradients(
    run: Callable[..., tuple[Tensor, Any]], step_by_step: bool
) -> tuple[Any, list[Tensor | None]]:
    """Run and differentiate `run`; see `captured.marked_gradients`."""
    marked: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        if step_by_step:
            stack.enter_context(backends.current.functions_step_by_step())
        tape = stack.enter_context(tf.GradientTape())

        def mark(x: Tensor) -> Tensor:
            tape.watch(x)
            marked.append(x)
            return x

        loss, kept = run(mark)
    wanted = list(marked)
    return kept, list(tape.gradient(loss, wanted))
