"""Where in the user's program a warning belongs, and that it comes once."""

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
    """Let a function give each warning once a call, for however many layers.

    Python does so for one line of a program, and forgets it as soon as a
    framework changes the filters of warnings.

    It is no context manager: one would run code of its own after the
    function, where an interrupt would come too late to undo a change.
    """

    @functools.wraps(function)
    def told_once(*args: P.args, **kwargs: P.kwargs) -> R:
        if _told.get() is not None:
            return function(*args, **kwargs)
        token = _told.set(set())
        try:
            return function(*args, **kwargs)
        finally:
            _told.reset(token)

    return told_once


def warn(text: str) -> None:
    """Warn at the user's line; not if `once` has seen the same text."""
    told = _told.get()
    if told is not None:
        if text in told:
            return
        told.add(text)
    warnings.warn(text, UserWarning, stacklevel=stacklevel())


def stacklevel() -> int:
    """The `stacklevel` of the first call outside of Keras and this package.

    And outside of the framework, which calls layers. To be called in the
    function that warns. Python then shows a warning once for each line of the
    user's, through however many functions it came. Expires with Python 3.11:
    later versions take `skip_file_prefixes`.
    """
    calls = inspect.stack(context=0)[1:]
    for level, call in enumerate(calls, start=1):
        name = call.frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _INSIDE:
            return level
    return len(calls)
