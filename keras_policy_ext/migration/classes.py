"""Which class of Keras 3, or of the caller, a class name in a config means."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

MODULES = {
    "layers": keras.layers,
    "initializers": keras.initializers,
    "regularizers": keras.regularizers,
    "constraints": keras.constraints,
    "losses": keras.losses,
    "metrics": keras.metrics,
    "optimizers": keras.optimizers,
    "optimizers.schedules": keras.optimizers.schedules,
}
"""Public modules by the last part of their names, in order of search."""

_MODELS = {"Functional": "Model", "Model": "Model", "Sequential": "Sequential"}
_RENAMED = {
    "BatchNormalizationV1": "BatchNormalization",
    "BatchNormalizationV2": "BatchNormalization",
    "SyncBatchNormalization": "BatchNormalization",
}
# tf_keras files its own optimizers of the second generation under these.
_PREFIXES = ("Custom>", "Experimental>", "Experimental", "experimental")


_VARIABLE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


class Found(NamedTuple):
    """A class, and how a Keras 3 config names it."""

    cls: Any
    kind: str
    """`"custom"`, `"models"`, or a key of `MODULES`."""
    fields: dict[str, Any]
    """`module`, `class_name` and `registered_name` of the config."""


def find(
    config: Mapping[str, Any], hint: str, custom_objects: Mapping[str, Any]
) -> Found | None:
    """Find the class that a config means.

    The module that the config names is never imported: it only helps to
    choose between public modules of Keras.

    Args:
        config: With `class_name`, maybe `registered_name` and `module`.
        hint: A key of `MODULES` to look into first.
        custom_objects: Classes by name; the caller's.

    Returns:
        The class; None if it is unknown.
    """
    name = config["class_name"]
    found = _custom(config, custom_objects)
    if found is not None:
        return found
    short = _RENAMED.get(_without_prefix(name), _without_prefix(name))
    if short in _MODELS:
        public = _MODELS[short]
        return _builtin(getattr(keras, public), "models", "keras", public)
    module = config.get("module") or ""
    hints = [hint, *(k for k in MODULES if module.endswith(f".{k}"))]
    for kind in [*reversed(hints), *MODULES]:
        cls = getattr(MODULES.get(kind), short, None)
        if inspect.isclass(cls):
            return _builtin(cls, kind, f"keras.{kind}", short)
    return None


def find_function(name: str, custom_objects: Mapping[str, Any]) -> Any:
    """The config of a function by name; None if it is unknown."""
    if keras.saving.get_registered_object(name, custom_objects) is not None:
        return {
            "module": "builtins",
            "class_name": "function",
            "config": name,
            "registered_name": "function",
        }
    for module in (keras.activations, keras.losses, keras.metrics):
        found = getattr(module, name, None)
        if found is None:  # maybe an alias, such as "mse"
            with contextlib.suppress(ValueError):
                found = module.get(name)
        if inspect.isfunction(found):
            return keras.saving.serialize_keras_object(found)
    return None


def base(found: Found, name: str) -> tuple[str, str]:
    """Kind and name of the class of Keras that a class is, or inherits from.

    A class of the caller's inherits the arguments of its base too, and its
    config has those of the base in tf_keras.

    Args:
        found: The class.
        name: The legacy name, which stays that of a built-in class.
    """
    if found.kind != "custom" or not inspect.isclass(found.cls):
        return found.kind, name
    for cls in found.cls.__mro__:
        for kind, module in MODULES.items():
            if getattr(module, cls.__name__, None) is cls:
                return kind, cls.__name__
    return found.kind, name


@functools.cache
def arguments(cls: Any) -> frozenset[str]:
    """Names of the arguments of a Keras class, its bases' included."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base is object or "__init__" not in base.__dict__:
            continue
        _, *parameters = inspect.signature(base.__init__).parameters.values()
        names |= {p.name for p in parameters if p.kind not in _VARIABLE}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return frozenset(names)


def _custom(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any]
) -> Found | None:
    name = config["class_name"]
    short = name.rsplit(">", 1)[-1]
    for key in dict.fromkeys([config.get("registered_name"), name, short]):
        cls = key and keras.saving.get_registered_object(key, custom_objects)
        if cls:
            fields = {
                "module": None,
                "class_name": short,
                "registered_name": key,
            }
            return Found(cls, "custom", fields)
    return None


def _builtin(cls: Any, kind: str, module: str, name: str) -> Found:
    fields = {"module": module, "class_name": name, "registered_name": None}
    return Found(cls, kind, fields)


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        rest = name.removeprefix(prefix)
        if rest != name and hasattr(keras.optimizers, rest):
            return rest
    return name
