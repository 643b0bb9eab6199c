"""Where in the user's program a warning belongs, and that it comes once."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import warnings
from collections.abc import Iterator

_INSIDE = (
    __name__.partition(".")[0],
    "keras",
    "contextlib",
    "jax",
    "tensorflow",
    "torch",
)


_told: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "warnings that were given in the call that runs", default=None
)


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Give each warning once in this block, for however many layers.

    Python does so for one line of a program, and forgets it as soon as a
    framework changes the filters of warnings.
    """
    if _told.get() is not None:
        yield
        return
    token = _told.set(set())
    try:
        yield
    finally:
        _told.reset(token)


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
