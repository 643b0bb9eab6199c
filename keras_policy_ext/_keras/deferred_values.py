"""Models without values: their variables get them later, or never."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: models are then made with values.
    _global_state = None

_WAITING = "uninitialized_variables"


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """A block in which layers are made and built, and take no memory.

    Inside a `StatelessScope` Keras puts off what variables hold, and keeps a
    list of those that wait for it (`uninitialized_variables` and
    `_deferred_initialize`, keras 3.12 to 3.15). The ones made here are taken
    off that list again: a frozen layer drops its float kernel before it had
    a value. Where that list or that argument is gone, variables have values
    at once. Expires with a public way to make a model without weights.
    """
    scope = _scope()
    if scope is None or _global_state is None:
        yield
        return
    before = _global_state.get_global_attribute(_WAITING) or []
    _global_state.set_global_attribute(_WAITING, [])
    try:
        with scope:
            yield
    finally:
        _global_state.set_global_attribute(_WAITING, before)


def give_values(variables: Iterable[keras.Variable]) -> None:
    """Let variables that were made without have what their initializers say.

    Args:
        variables: Those that have a value keep it.
    """
    for variable in variables:
        waits = getattr(variable, "_value", variable) is None
        if waits and getattr(variable, "_initializer", None) is not None:
            variable._deferred_initialize()


def _scope() -> Any:
    try:
        return keras.StatelessScope(initialize_variables=False)
    except TypeError:
        return None
