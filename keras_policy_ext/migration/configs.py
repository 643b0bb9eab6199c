"""Rewriting the configs of tf_keras for Keras 3."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import keras

from keras_policy_ext import activations
from keras_policy_ext.migration import (
    changes,
    classes,
    compiling,
    files,
    graphs,
    loss_scales,
    operations,
)
from keras_policy_ext.migration.problems import Config, Problems, named

_HINTS = {
    "initializer": "initializers",
    "regularizer": "regularizers",
    "constraint": "constraints",
    "loss": "losses",
    "metrics": "metrics",
    "optimizer": "optimizers",
    "learning_rate": "optimizers.schedules",
}
_PASSED_ON = frozenset({"__tensor__", "__numpy__", "__bytes__", "__slice__"})
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
_RENAMED_ACTIVATIONS = {"softmax_v2": "softmax"}


def migrate_config(
    config: Mapping[str, Any],
    *,
    on_loss_scale: str = "keep",
    custom_objects: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Rewrite a config of tf_keras (Keras 2) as one of Keras 3.

    Reads the configs of models (Functional, Sequential, nested), layers,
    optimizers, losses, metrics, initializers and dtype policies, as
    `get_config`, `to_json`, `.h5` and `.keras` files have them. The graph of
    a functional model gets placeholder shapes, which Keras does not read.

    Args:
        config: A dict with `class_name` and `config`. It is not changed.
        on_loss_scale: What becomes of the loss scale of a policy or of a
            `LossScaleOptimizer`. `"keep"`: the classes of this package take
            it on. `"drop"`: the plain policy and the inner optimizer stay,
            with a warning. `"error"`: a `ValueError` says where it is.
        custom_objects: The caller's classes and functions by name.

    Returns:
        What `keras.saving.deserialize_keras_object` reads on any backend.

    Raises:
        TypeError: If the config is no dict.
        ValueError: If it is none of these or damaged, or naming all at once
            the classes that are unknown and the parts that Keras 3 has no
            counterpart of.
    """
    rewriter = Rewriter(on_loss_scale, custom_objects)
    try:
        migrated = rewriter.rewrite_object(config)
    except files.OF_DAMAGE as error:
        if not isinstance(config, Mapping):
            raise
        raise ValueError(
            "Cannot migrate this config. Received: one that is damaged "
            f"({files.cause(error)}). Allowed: what tf_keras serializes. "
            "Write it again in tf_keras."
        ) from error
    rewriter.problems.check()
    rewriter.problems.report(on_loss_scale)
    return migrated


class Rewriter:
    """One rewriting: its options, and what it met on the way.

    Raises:
        ValueError: If `on_loss_scale` is none of the three words.
    """

    def __init__(self, on_loss_scale: str, custom_objects: Config | None):
        if on_loss_scale not in ("drop", "keep", "error"):
            raise ValueError(
                "`on_loss_scale` is not one of the three. Received: "
                f"{on_loss_scale!r}. Allowed: 'drop', 'keep', 'error'. Pass "
                "one of these."
            )
        self.keeps_loss_scale = on_loss_scale == "keep"
        self.custom_objects = custom_objects or {}
        self.problems = Problems()

    def rewrite_object(self, config: object) -> dict[str, Any]:
        """Rewrite a config that must be one object.

        Raises:
            TypeError: If it is no dict.
            ValueError: If it has no `class_name` and `config`.
        """
        allowed = (
            "Allowed: a dict with `class_name` and `config`, as tf_keras "
            "serializes an object. Wrap what `get_config` returns: "
            "{'class_name': type(x).__name__, 'config': x.get_config()}."
        )
        if not isinstance(config, Mapping):
            raise TypeError(
                "Cannot migrate this config. Received: "
                f"{config!r} (of type {type(config).__name__}). {allowed}"
            )
        if "class_name" not in config or "config" not in config:
            raise ValueError(
                "Cannot migrate this config. Received: a dict with the keys "
                f"{sorted(map(str, config))}. {allowed}"
            )
        return self.rewrite(config)

    def rewrite(
        self, value: object, hint: str = "layers", where: str = "the config"
    ) -> Any:
        """Rewrite any part of a config, a JSON value, which is not changed.

        Args:
            value: The part.
            hint: The key of `classes.MODULES` where its class is likely.
            where: How problems name the place.
        """
        if isinstance(value, (list, tuple)):
            return [self.rewrite(v, hint, where) for v in value]
        if not isinstance(value, Mapping):
            return copy.deepcopy(value)
        if isinstance(value.get("class_name"), str):
            if "config" in value:
                return self._object(value, hint, where)
            if "items" in value:  # a tuple or shape, as JSON of tf_keras
                return self.rewrite(value["items"], hint, where)
            if value["class_name"] == "__ellipsis__":
                return {"class_name": "__ellipsis__", "config": {}}
        return {
            key: self._argument(key, v, hint, where) for key, v in value.items()
        }

    def _argument(self, key: str, value: object, hint: str, where: str) -> Any:
        if key == "dtype" and hint == "layers" and isinstance(value, str):
            return "float32" if value == "_infer" else value
        if key.endswith("activation"):
            return self._activation(value, where)
        if key == "fn":  # of a metric: a function, or a loss
            if isinstance(value, str):
                return self.rewrite_function(value, where)
            return self.rewrite(value, "losses", where)
        hints = [kind for end, kind in _HINTS.items() if key.endswith(end)]
        return self.rewrite(value, hints[0] if hints else hint, where)

    def _activation(self, value: object, where: str) -> Any:
        name = value
        if isinstance(value, Mapping):
            code = changes.bytecode(value.get("value"))
            if code is not None:
                self.problems.code.append(where)
                return {"class_name": "__lambda__", "config": {"value": code}}
            if value.get("class_name") != "function":
                return self.rewrite(value, where=where)
            name = value.get("config")
        if not isinstance(name, str):
            return copy.deepcopy(value)
        if name == "hard_sigmoid":
            return keras.saving.serialize_keras_object(
                activations.tf_keras_hard_sigmoid
            )
        renamed = _RENAMED_ACTIVATIONS.get(name, name)
        return self.rewrite_function(renamed, where)

    def rewrite_function(self, name: str, where: str) -> object:
        """A function by its name, or by that of the caller's."""
        found = classes.find_function(name, self.custom_objects)
        if found is None:
            self.problems.unknown.append(f"function {name!r} ({where})")
        return found or name

    def _object(self, config: Config, hint: str, where: str) -> Any:
        if config["class_name"] == "MeanMetricWrapper":
            config = compiling.plain_metric(config, self.custom_objects)
        name = config["class_name"]
        if name == "function":
            return self.rewrite_function(config["config"], where)
        if name == "__lambda__":
            self.problems.code.append(where)
        if name == "__lambda__" or name in _PASSED_ON:
            return copy.deepcopy(dict(config))
        if name in loss_scales.POLICIES:
            return loss_scales.policy(self, config, where)
        if name in loss_scales.OPTIMIZERS:
            return loss_scales.optimizer(self, config["config"], where)
        if name in operations.LAYERS:
            self.problems.unsupported.append(operations.described(config))
            return None
        found = classes.find(config, hint, self.custom_objects)
        if found is None:
            self.problems.unknown.append(named(config))
            return None
        return self._found(found, config, where)

    def _found(
        self, found: classes.Found, config: Config, where: str
    ) -> dict[str, Any]:
        fields = config["config"]
        if found.is_layer:
            where = named(config)
        if graphs.is_functional(fields):
            arguments = graphs.functional(self, fields)
        elif found.cls is keras.Sequential:
            arguments = graphs.sequential(self, fields)
        else:
            arguments = self._arguments(found, config, where)
        migrated = {**found.fields, "config": arguments}
        if config.get("compile_config"):
            migrated["compile_config"] = compiling.rewrite(
                self, config["compile_config"], fields
            )
        return migrated

    def _arguments(
        self, found: classes.Found, config: Config, where: str
    ) -> dict[str, Any]:
        fields = config["config"] or {}
        if not isinstance(fields, Mapping):
            raise ValueError(
                f"Cannot read the config of {where}. Received: {fields!r}. "
                "Allowed: a dict of arguments. The file is damaged."
            )
        fields = copy.deepcopy(dict(fields))
        kind, name = classes.base(found, config["class_name"])
        is_derived = found.kind == "custom" and kind != "custom"
        known = classes.arguments(found.cls) if is_derived else frozenset()
        changes.revise(kind, name, fields, known)
        if found.kind == "layers" and name in changes.NOTES:
            self.problems.notes.append(f"{where} {changes.NOTES[name]}")
        if fields.get("synchronized") and not _ON_TENSORFLOW:
            fields["synchronized"] = False
            self.problems.notes.append(
                f"{where} no longer synchronizes replicas: Keras 3 does so "
                "on TensorFlow only."
            )
        if found.is_layer and isinstance(fields.get("name"), str):
            fields["name"] = changes.safe_name(fields["name"])
        hint = "layers" if kind == "custom" else kind
        return {
            key: self._argument(key, value, hint, where)
            for key, value in self._accepted(found, fields, where).items()
        }

    def _accepted(
        self, found: classes.Found, fields: dict[str, Any], where: str
    ) -> dict[str, Any]:
        """The arguments that the class takes; others become problems."""
        base, name = classes.base(found, "")
        dropped = changes.DROPPED.get("layers" if found.is_layer else base, {})
        if found.kind == "custom":
            # The caller's class knows its own arguments, but not those that
            # its base had in tf_keras.
            gone = {"batch_input_shape", "dynamic"}
            if base != "custom" and name != "Layer":
                gone = set(dropped) - classes.arguments(found.cls)
            known = frozenset(fields) - gone
        else:
            known = classes.arguments(found.cls)
        for key, value in fields.items():
            allowed = dropped.get(key, ())
            if key in known or allowed is changes.ANY or value in allowed:
                continue
            self.problems.unsupported.append(f"{key}={value!r} of {where}")
        return {key: v for key, v in fields.items() if key in known}
