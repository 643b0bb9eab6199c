"""Lets a function see the inputs of float8 contractions as they happen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Watcher = Callable[[Any, Any], None]

_WATCHERS: list[Watcher] = []


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(state, inputs)` at every contraction in the block.

    Args:
        watcher: Gets the state variable of the contracted kernel, None under
            a recipe without state, and the inputs, (any shape), in the
            compute dtype.
    """
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


def tell(state: Any, inputs: Any) -> None:
    """Let those who watch know of a contraction."""
    for watcher in _WATCHERS:
        watcher(state, inputs)
