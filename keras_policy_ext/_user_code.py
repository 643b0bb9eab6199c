"""Where in the user's program a warning belongs."""

from __future__ import annotations

import sys

_INSIDE = (
    __name__.partition(".")[0],
    "keras",
    "contextlib",
    "jax",
    "tensorflow",
    "torch",
)


def stacklevel() -> int:
    """The `stacklevel` of the first frame outside of Keras and this package.

    And outside of the framework, which calls layers. To be called in the
    function that warns. Python then shows a warning once for each line of the
    user's, through however many functions it came.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _INSIDE:
            break
        frame, level = frame.f_back, level + 1
    return level
