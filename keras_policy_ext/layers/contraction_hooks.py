"""Functions that are called at each float8 contraction, with its inputs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

Hook = Callable[[Any, Any], None]

_hooks: contextvars.ContextVar[tuple[Hook, ...]] = contextvars.ContextVar(
    "hooks of contractions", default=()
)


@contextlib.contextmanager
def contraction_hook(hook: Hook) -> Iterator[None]:
    """Call `hook(state, inputs)` at every contraction in the block.

    That is, at those of this thread and of this asyncio task.

    Args:
        hook: Gets the state variable of the contracted kernel, None under
            a recipe without state, and the inputs, (any shape), in the
            compute dtype.
    """
    token = _hooks.set((*_hooks.get(), hook))
    try:
        yield
    finally:
        _hooks.reset(token)


def are_set() -> bool:
    """Return True if there are hooks."""
    return bool(_hooks.get())


def call_hooks(state: Any, inputs: Any) -> None:
    """Call the hooks that are set, for one contraction."""
    for hook in _hooks.get():
        hook(state, inputs)
