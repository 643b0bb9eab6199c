"""Where in the user's program a warning belongs."""

from __future__ import annotations

import inspect

_INSIDE = (
    __name__.partition(".")[0],
    "keras",
    "contextlib",
    "jax",
    "tensorflow",
    "torch",
)


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
