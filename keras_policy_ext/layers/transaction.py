"""Change layers in place, all or nothing: an error restores them.

Layers and optimizers are changed here from outside, while the caller goes on
using them. A failed change is not undone step by step, which could fail too.
Instead the earlier contents of the objects are restored.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_policy_ext._keras import built_layers, variable_values
from keras_policy_ext.layers.state_of import NoWeight

# The methods of these classes are used, not those of the subclasses of Keras
# and TensorFlow, which would track what is put back as if it were new.
_BASES = (collections.OrderedDict, dict, list, set)

_Content = tuple[Any, Any, list[Any]]
"""A list, dict or set; its built-in type; its entries."""


@contextlib.contextmanager
def unchanged_on_error(
    things: Iterable[Any], variables: Iterable[keras.Variable] = ()
) -> Iterator[None]:
    """If the block raises, restore the layers and optimizers on exit.

    It restores class and attributes, and the contents of the lists, dicts and
    sets among them. So sublayers, variables, slots, compiled functions and
    their order are the same objects as before. It does not cover layers added
    in the block or layers inside the given ones. The values of `variables` are
    copied to host memory; variables without a value are skipped.
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
        with variable_values.without_notifying():
            for variable, value in values:
                # By Keras's method: what is put back is no observation.
                keras.Variable.assign(variable, value)
        for memory in memories:
            memory.restore_states()
        raise


@contextlib.contextmanager
def undone(things: Iterable[Any]) -> Iterator[None]:
    """On exit of the block, restore layers as `unchanged_on_error` does."""
    with contextlib.suppress(_Over), unchanged_on_error(things):
        yield
        raise _Over  # As an error would, so that all is restored.


class _Over(Exception):
    """The exception that ends the block of `undone`."""


class _Memory:
    """A copy of the class, attributes and lists of a layer or optimizer."""

    def __init__(self, thing: Any):
        """Copy the class, attributes and lists of a layer or optimizer."""
        self._thing = thing
        self._class = type(thing)
        # Where Keras lists the variables and layers of the thing.
        objects, containers = built_layers.bookkeeping(thing)
        controller = vars(thing).get("float8_controller")
        objects = [*objects, *([] if controller is None else [controller])]
        self._attributes = [(each, dict(vars(each))) for each in objects]
        held = [x for _, values in self._attributes for x in values.values()]
        self._put_backs = [
            each.memory() for each in held if isinstance(each, NoWeight)
        ]
        self._contents = _contents_of([*held, *containers])

    def restore(self) -> None:
        """Restore the object's class, attributes, and lists, dicts and sets."""
        for each, attributes in self._attributes:
            own = vars(each)
            if [*own] != [*attributes]:
                own.clear()
                own.update(attributes)
            # Else only what differs: other threads may call the layer now.
            for name, value in attributes.items():
                if own[name] is not value:
                    own[name] = value
        _refill(self._contents)
        if type(self._thing) is not self._class:
            object.__setattr__(self._thing, "__class__", self._class)

    def restore_states(self) -> None:
        """Restore what float8 state variables recorded about their kernels."""
        for put_back in self._put_backs:
            put_back()


def _contents_of(things: Iterable[Any]) -> list[_Content]:
    """Return a copy of the entries of each list, dict and set among things."""
    contents: list[_Content] = []
    for each in things:
        base: Any
        for base in _BASES:
            # By its type: an `ObjectProxy` says to be what it stands for.
            if issubclass(type(each), base):
                is_dict = issubclass(base, dict)
                entries = base.items(each) if is_dict else base.__iter__(each)
                contents.append((each, base, list(entries)))
                break
    return contents


def _refill(contents: list[_Content]) -> None:
    """Restore the entries of the lists, dicts and sets that have others now."""
    now = _contents_of([each for each, *_ in contents])
    for (container, base, entries), (*_, present) in zip(
        contents, now, strict=True
    ):
        if len(present) == len(entries):  # Then nothing may have changed.
            both: Any = (present, entries)
            if issubclass(base, dict):  # Compare keys and values.
                both = map(itertools.chain.from_iterable, both)
            if all(map(operator.is_, *both)):
                continue
        base.clear(container)
        for entry in entries:
            if base is list:
                list.append(container, entry)
            elif base is set:
                set.add(container, entry)
            else:
                base.__setitem__(container, *entry)
