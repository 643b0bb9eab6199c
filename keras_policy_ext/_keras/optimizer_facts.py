"""Facts about Keras's optimizers: public classes, and how they update."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras


def public_class(optimizer: object) -> type | None:
    """Return the public class for an optimizer of a private class, or None."""
    cls, *bases = type(optimizer).__mro__
    named: Any = getattr(keras.optimizers, cls.__name__, None)
    private = cls.__module__.startswith("keras.") and named is not cls
    return named if private and named in bases else None


ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Nadam",
    "RMSprop",
    "SGD",
)
"""Optimizers of Keras that update each number of a weight by itself."""


def updates_elementwise(optimizer: Any) -> bool:
    """Return True if each number of a weight is updated by itself."""
    # Known of classes of Keras, and of those with moments in one byte a
    # number, whose `stock_class` is one.
    cls = getattr(optimizer, "stock_class", None)
    cls = cls or public_class(optimizer) or type(optimizer)
    return cls in [getattr(keras.optimizers, name) for name in ELEMENTWISE]


def updates_apart(optimizer: Any) -> bool:
    """Return True if weights can be updated in groups, one after the other."""
    # Then the update of a weight changes nothing that those of others read.
    # Nadam's changes a variable of the optimizer.
    return updates_elementwise(optimizer) and not isinstance(
        optimizer, keras.optimizers.Nadam
    )


def scope_of_optimizer_names(config: object) -> AbstractContextManager[None]:
    """Return a scope in which Keras finds optimizers by their bare names.

    Files name the private class of an optimizer (`keras.src...`), which another
    Keras may have elsewhere. Each such name in `config`, of JSON types, then
    means the public class of that name; all names do if `config` is None. No
    others, since Keras reads every string that is such a name as the class.
    """
    names = None if config is None else _names_of_private_classes(config)
    classes = {
        name: value
        for name, value in vars(keras.optimizers).items()
        if (names is None or name in names)
        and isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
    }
    return keras.saving.custom_object_scope(classes)


def _names_of_private_classes(config: object) -> set[str]:
    """Return the names of private Keras classes in a nested config."""
    names: set[str] = set()
    waiting = [config]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if str(each.get("module")).startswith("keras.src."):
                names.add(str(each.get("class_name")))
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)
    return names


def with_public_class(
    config: dict[str, Any], optimizer: object
) -> dict[str, Any]:
    """Return an optimizer's config with the public name of the class."""
    # Keras's own scaler writes the private class of what it wraps.
    fields = config.get("config") or {}
    inner = fields.get("inner_optimizer")
    if isinstance(inner, Mapping):
        inside = getattr(optimizer, "inner_optimizer", None)
        named = with_public_class(dict(inner), inside)
        config = {**config, "config": {**fields, "inner_optimizer": named}}
    cls = public_class(optimizer)
    if cls is None:
        return config
    return {
        **config,
        "module": "keras.optimizers",
        "class_name": cls.__name__,
        "registered_name": None,
    }


def is_overwritten(variable: keras.Variable) -> bool:
    """Return True if an optimizer sets a variable to its gradient."""
    return bool(getattr(variable, "overwrite_with_gradient", False))
