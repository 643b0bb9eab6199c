"""Which class of Keras 3, or of the caller, a class name in a config means."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, NamedTuple

import keras

from keras_policy_ext.migration.problems import Config

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
    """A class or function, and how a Keras 3 config names it."""

    cls: Any
    kind: str
    """`"custom"`, `"models"`, or a key of `MODULES`."""
    fields: dict[str, str | None]
    """`module`, `class_name` and `registered_name` of the config."""

    @property
    def is_layer(self) -> bool:
        """Return True if it is a class of layers."""
        return inspect.isclass(self.cls) and issubclass(self.cls, keras.Layer)


def find(config: Config, hint: str, custom_objects: Config) -> Found | None:
    """Find the class that a config means; None if it is unknown.

    The module that the config names is never imported: it only helps to
    choose between public modules of Keras.

    Args:
        config: With `class_name`, maybe `registered_name` and `module`.
        hint: A key of `MODULES` to look into first.
        custom_objects: Classes by name; the caller's.
    """
    found = _custom(config, custom_objects)
    if found is not None:
        return found
    name = _without_prefix(config["class_name"])
    name = _RENAMED.get(name, name)
    if name in _MODELS:
        name = _MODELS[name]
        return _builtin(getattr(keras, name), "models", "keras", name)
    module = config.get("module") or ""
    hints = [hint, *(k for k in MODULES if module.endswith(f".{k}"))]
    for kind in [*reversed(hints), *MODULES]:
        cls = getattr(MODULES.get(kind), name, None)
        if inspect.isclass(cls):
            return _builtin(cls, kind, f"keras.{kind}", name)
    return None


def is_custom(name: str, custom_objects: Config) -> bool:
    """Return True if a name is one of the caller's, or registered."""
    found = keras.saving.get_registered_object(name, custom_objects)
    return found is not None


def find_function(name: str, custom_objects: Config) -> object:
    """The config of a function by name; None if it is unknown."""
    if is_custom(name, custom_objects):
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
    config has those of the base in tf_keras. A built-in class keeps the
    legacy name.
    """
    if found.kind == "custom" and inspect.isclass(found.cls):
        for cls in found.cls.__mro__:
            for kind, module in MODULES.items():
                if getattr(module, cls.__name__, None) is cls:
                    return kind, cls.__name__
    return found.kind, name


@functools.cache
def arguments(cls: type) -> frozenset[str]:
    """Names of the arguments of a Keras class, its bases' included."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base is object or "__init__" not in base.__dict__:
            continue
        init: Any = base.__dict__["__init__"]
        _, *parameters = inspect.signature(init).parameters.values()
        names |= {p.name for p in parameters if p.kind not in _VARIABLE}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return frozenset(names)


def _custom(config: Config, custom_objects: Config) -> Found | None:
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


def _builtin(cls: type, kind: str, module: str, name: str) -> Found:
    fields = {"module": module, "class_name": name, "registered_name": None}
    return Found(cls, kind, fields)


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        rest = name.removeprefix(prefix)
        if rest != name and hasattr(keras.optimizers, rest):
            return rest
    return name
