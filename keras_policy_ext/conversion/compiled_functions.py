"""Functions that a model has compiled and keeps, such as a loop to generate.

They go on computing what layers did when they were traced. Those that are
found are traced anew at their next call: in attributes of the model and of
its layers, in lists and dicts there, and methods that their classes compile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from keras_policy_ext import backends
from keras_policy_ext._keras import compiled_steps, walking
from keras_policy_ext.conversion.candidates import path_of

_OF_FRAMEWORKS = ("keras", "torch", "tensorflow", "keras_policy_ext")
_CONTAINERS = (dict, list, tuple)


class Compiled(NamedTuple):
    """A compiled function of a model.

    Attributes:
        name: The path of a layer, with the attribute.
        function: The function.
        layer: For a method the layer that has it, else None.
    """

    name: str
    function: Any
    layer: keras.Layer | None


def forget(functions: Iterable[Compiled]) -> None:
    """Have compiled functions traced anew at their next call."""
    framework = backends.current()
    for each in functions:
        framework.forget_traces(each.function, each.layer)


def found_in(model: keras.Layer) -> list[Compiled]:
    """Find the compiled functions of a model."""
    is_compiled = backends.current().is_compiled
    found: dict[tuple[int, int], Compiled] = {}
    for layer in walking.layers_within(model):
        path = path_of(layer)
        for name, value in _held(layer):
            function = _within(value)
            if is_compiled(function):
                compiled = Compiled(f"{path}.{name}", function, None)
                found.setdefault((id(function), 0), compiled)
        for name, value in _of_classes(layer):
            function = _within(value)
            if is_compiled(function):
                compiled = Compiled(f"{path}.{name}", function, layer)
                found[id(function), id(layer)] = compiled
    return list(found.values())


def _held(layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yield what can be called of the attributes of a layer, then of lists.

    Of lists and dicts last: TensorFlow has all attributes in a dict, too.
    """
    containers = []
    for name, value in walking.attributes(layer).items():
        if name in compiled_steps.STEPS:
            continue
        if isinstance(value, _CONTAINERS):
            containers.append((name, value))
        elif callable(value):
            yield name, value
    for name, value in containers:
        yield from _held_in(value, name)


def _held_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what can be called in a list or dict, without layers."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if isinstance(each, _CONTAINERS):
            yield from _held_in(each, f"{name}[{key!r}]")
        elif callable(each) and not isinstance(each, keras.Layer):
            yield f"{name}[{key!r}]", each


def _of_classes(layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yield what the user's own classes of a layer define."""
    for cls in type(layer).__mro__:
        if cls.__module__.partition(".")[0] not in (
            *_OF_FRAMEWORKS,
            "builtins",
        ):
            yield from vars(cls).items()


def _within(value: Any) -> Any:
    """The function in a partial one."""
    while isinstance(value, functools.partial):
        value = value.func
    return value
