"""What is replaced in Keras once this package is used, and not before.

The import replaces what reads names of policies, and what loads model files.
All else waits for the first policy or layer of this package.
"""

from collections.abc import Callable

_waiting: list[Callable[[], None]] = []


def wait(replace: Callable[[], None]) -> None:
    """Call a function once this package is used; it puts around functions."""
    _waiting.append(replace)


def begin() -> None:
    """Call what waits, before a policy or a layer of this package is used."""
    for replace in tuple(_waiting):  # Another thread may clear them.
        replace()
    _waiting.clear()
