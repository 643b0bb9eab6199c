"""Functions that a model has compiled and keeps, such as a loop to generate.

They go on computing what layers did when they were traced. Those that are
found are traced anew at their next call: in attributes of the model and of
its layers, in lists and dicts there, and methods that their classes compile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras

from keras_policy_ext import frameworks
from keras_policy_ext._keras import compiled_steps, walking
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.conversion.models import leaves

_OF_FRAMEWORKS = ("keras", "torch", "tensorflow", "keras_policy_ext")


def forget(model: keras.Layer) -> None:
    """Have the compiled functions of a model traced anew at their next call."""
    framework = frameworks.current()
    for _, function, layer in _found(model):
        framework.forget_traces(function, layer)


def names(model: keras.Layer) -> tuple[str, ...]:
    """The compiled functions of a model: paths of layers, with attributes."""
    return tuple(name for name, _, _ in _found(model))


def _found(model: keras.Layer) -> list[tuple[str, Any, Any]]:
    """Name, compiled function, and for a method the layer that has it."""
    is_compiled = frameworks.current().is_compiled
    found: dict[tuple[int, int], tuple[str, Any, Any]] = {}
    for layer in walking.layers_within(model):
        path = path_of(layer)
        for name, value in _held(layer):
            function = _within(value)
            if is_compiled(function):
                found.setdefault(
                    (id(function), 0), (f"{path}.{name}", function, None)
                )
        for name, value in _of_classes(layer):
            function = _within(value)
            if is_compiled(function):
                found[id(function), id(layer)] = (
                    f"{path}.{name}",
                    function,
                    layer,
                )
    return list(found.values())


def _held(layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a layer, then the entries of lists and dicts.

    TensorFlow has all attributes of a layer in a dict, too.
    """
    held = [
        (name, subscript, each)
        for name, value in walking.attributes(layer).items()
        if name not in compiled_steps.STEPS
        for subscript, each in leaves(value)
    ]
    for name, subscript, each in sorted(held, key=lambda x: bool(x[1])):
        yield name + subscript, each


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
