"""Warn at the user's line of code, and only once."""

from __future__ import annotations

import contextvars
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_INSIDE = (
    __name__.partition(".")[0],
    "keras",
    "contextlib",
    "jax",
    "tensorflow",
    "torch",
)

P = ParamSpec("P")
R = TypeVar("R")

_told: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "warnings that were given in the call that runs", default=None
)


def once(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that one call gives each warning only once."""

    # Python does so too, but not if a framework changes the warning filters.
    # No context manager: its code after the function could be interrupted when
    # it is too late to undo a change.
    @functools.wraps(function)
    def told_once(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and remember the warnings it gives."""
        if _told.get() is not None:
            return function(*args, **kwargs)
        token = _told.set(set())
        try:
            return function(*args, **kwargs)
        finally:
            _told.reset(token)

    return told_once


def warn(text: str) -> None:
    """Warn at the user's line of code; inside `once`, give a text only once."""
    texts_given = _told.get()
    if texts_given is not None:
        if text in texts_given:
            return
        texts_given.add(text)
    warnings.warn(text, UserWarning, stacklevel=stacklevel())


def stacklevel() -> int:
    """Return the `stacklevel` for a warning to point at the user's code."""
    # Calls in Keras and in the framework, which calls layers, are skipped too.
    # Call this in the function that warns. Expires with Python 3.11: later
    # versions have `skip_file_prefixes`.
    calls = inspect.stack(context=0)[1:]
    for level, call in enumerate(calls, start=1):
        name = call.frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _INSIDE:
            return level
    return len(calls)
