"""Change layers in place, all or nothing: an error restores them.

Layers and optimizers are changed here from outside, while the caller goes on
using them. A failed change is not undone step by step, which could fail too.
Instead the earlier contents of the objects are restored.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_policy_ext._keras import built_layers, variable_values

# Their own methods are used, not those of the subclasses of Keras and
# TensorFlow, which would track what is put back as if it were new.
_BASES: tuple[Any, ...] = (collections.OrderedDict, dict, list, set)


@contextlib.contextmanager
def unchanged_on_error(
    things: Iterable[Any], variables: Iterable[keras.Variable] = ()
) -> Iterator[None]:
    """If the block raises, restore the layers and optimizers on exit.

    It restores class and attributes, and the contents of the lists, dicts and
    sets among them. So sublayers, variables, slots, compiled functions and
    their order are the same objects as before. It does not cover layers added
    in the block or layers inside the given ones.

    Args:
        things: Layers and optimizers that the block may change.
        variables: Variables whose values the block may change. They are copied
            to host memory; variables without a value are skipped.
    """
    memories = [_Memory(thing) for thing in things]
    # Copied: on PyTorch an array shows the memory of the variable itself.
    values = [
        (variable, np.array(keras.ops.convert_to_numpy(variable.value)))
        for variable in variables
        if variable_values.has_value(variable)
    ]
    try:
        yield
    except BaseException:
        for memory in memories:
            memory.restore()
        with variable_values.untold():
            for variable, value in values:
                # By Keras's method: what is put back is no observation.
                keras.Variable.assign(variable, value)
        for memory in memories:
            memory.restore_companions()
        raise


@contextlib.contextmanager
def undone(things: Iterable[Any]) -> Iterator[None]:
    """On exit of the block, restore the layers as they were on entry.

    Args:
        things: See `unchanged_on_error`.
    """
    with contextlib.suppress(_Over), unchanged_on_error(things):
        yield
        raise _Over


class _Over(Exception):
    """The exception that ends the block of `undone`."""


class _Memory:
    """A copy of the class, attributes and lists of a layer or optimizer.

    Args:
        thing: The layer or optimizer.
    """

    def __init__(self, thing: Any):
        self._thing = thing
        self._class = type(thing)
        objects, containers = built_layers.bookkeeping(thing)
        controller = vars(thing).get("float8_controller")
        objects = [*objects, *([] if controller is None else [controller])]
        self._attributes = [(each, dict(vars(each))) for each in objects]
        held = [
            value for _, kept in self._attributes for value in kept.values()
        ]
        self._companions = [
            each.memory()
            for each in held
            if isinstance(each, variable_values.Companion)
        ]
        self._contents = [
            (each, base, _entries(each, base))
            for each in (*held, *containers)
            if (base := _base(each)) is not None
        ]

    def restore(self) -> None:
        """Restore the object's class, attributes, and lists, dicts and sets."""
        for each, attributes in self._attributes:
            vars(each).clear()
            vars(each).update(attributes)
        for each, base, entries in self._contents:
            _refill(each, base, entries)
        if type(self._thing) is not self._class:
            built_layers.put_class_back(self._thing, self._class)

    def restore_companions(self) -> None:
        """Restore what float8 state variables recorded about their kernels."""
        for put_back in self._companions:
            put_back()


def _base(container: Any) -> Any:
    """Return a container's built-in type (list, dict, set); None for others."""
    # By its type: an `ObjectProxy` says to be what it stands for.
    return next((b for b in _BASES if issubclass(type(container), b)), None)


def _entries(container: Any, base: Any) -> list[Any]:
    if issubclass(base, dict):
        return list(base.items(container))
    return list(base.__iter__(container))


def _refill(container: Any, base: Any, entries: list[Any]) -> None:
    """Replace the contents of a list, dict or set by these entries."""
    now = _entries(container, base)
    if len(now) == len(entries) and all(map(_same, now, entries)):
        return
    base.clear(container)
    for entry in entries:
        if base is list:
            list.append(container, entry)
        elif base is set:
            set.add(container, entry)
        else:
            base.__setitem__(container, *entry)


def _same(first: object, second: object) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(
            a is b for a, b in zip(first, second, strict=True)
        )
    return first is second
