"""Files name the public class of an optimizer, whichever backend wrote them.

On torch `keras.optimizers.Adam()` is an instance of a private subclass, which
Keras writes into files and which only torch can load (keras 3.12 to 3.15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras


def public_class(optimizer: object) -> type | None:
    """The class of keras.optimizers that a private one stands for.

    None for public classes and for a user's own.
    """
    cls, *bases = type(optimizer).__mro__
    named: Any = getattr(keras.optimizers, cls.__name__, None)
    private = cls.__module__.startswith("keras.") and named is not cls
    return named if private and named in bases else None


def for_private_names(config: object) -> AbstractContextManager[None]:
    """Lets a file that names a private class be read as of the public one.

    Only the names of private classes that are in the file: Keras reads each
    string that is a name in such a scope as the class, also the "SGD" that a
    `compile_from_config` reads.

    Args:
        config: What the file has, of JSON types; None for all names.
    """
    names = None if config is None else set(_names_of_private(config))
    found = {
        name: value
        for name, value in vars(keras.optimizers).items()
        if (names is None or name in names)
        and isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
    }
    return keras.saving.custom_object_scope(found)


def _names_of_private(config: object) -> Iterator[str]:
    """The names of classes that are in no public module of Keras."""
    if isinstance(config, dict):
        if str(config.get("module")).startswith("keras.src."):
            yield str(config.get("class_name"))
        config = list(config.values())
    if isinstance(config, list):
        for each in config:
            yield from _names_of_private(each)


def with_public_class(
    config: dict[str, Any], optimizer: object
) -> dict[str, Any]:
    """The serialized form of an optimizer, under its public class.

    That of an optimizer in it, too: Keras's own scaler names the private
    class of the one that it wraps.
    """
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


def read_inner(
    config: object, custom_objects: Mapping[str, object] | None = None
) -> keras.optimizers.Optimizer:
    """The wrapped optimizer from its place in a config."""
    if not isinstance(config, Mapping):
        return config
    return keras.optimizers.deserialize(
        dict(config), custom_objects=custom_objects
    )
