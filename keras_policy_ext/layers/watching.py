"""Lets a function see the inputs of float8 contractions as they happen."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

Watcher = Callable[[Any, Any], None]

_watchers: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar(
    "watchers of contractions", default=()
)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(state, inputs)` at every contraction in the block.

    That is, at those of this thread and of this asyncio task.

    Args:
        watcher: Gets the state variable of the contracted kernel, None under
            a recipe without state, and the inputs, (any shape), in the
            compute dtype.
    """
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


def tell(state: Any, inputs: Any) -> None:
    """Let those who watch know of a contraction."""
    for watcher in _watchers.get():
        watcher(state, inputs)
