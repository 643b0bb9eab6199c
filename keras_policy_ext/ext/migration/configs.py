"""Rewrite configs of tf_keras for Keras 3."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_policy_ext.activations import tf_keras_hard_sigmoid
from keras_policy_ext.ext.migration import classes, files, graphs
from keras_policy_ext.ext.migration.classes import (
    Config,
    Problems,
    Rewriting,
    is_custom,
    named,
)
from keras_policy_ext.ext.mixed import loss_scales
from keras_policy_ext.ext.mixed.loss_scales import LossScaleDTypePolicy
from keras_policy_ext.ext.mixed.scaler_settings import of_loss_scale
from keras_policy_ext.mixed_precision import LossScaleOptimizer

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
    """Convert a config of tf_keras (Keras 2) to a config of Keras 3.

    Reads the configs of models (Functional, Sequential, nested), layers,
    optimizers, losses, metrics, initializers and dtype policies, as
    `get_config`, `to_json`, `.h5` and `.keras` files have them. The graph of
    a functional model gets placeholder shapes, which Keras does not read.

    Args:
        config: A dict with `class_name` and `config`. It is not changed.
        on_loss_scale: What to do with the loss scale of a policy or of a
            `LossScaleOptimizer`. `"keep"`: use the classes of this package
            that have it. `"drop"`: warn, and keep only the plain policy and
            the inner optimizer. `"error"`: raise a `ValueError` that names the
            place.
        custom_objects: The caller's classes and functions by name.

    Returns:
        What `keras.saving.deserialize_keras_object` reads on any backend.

    Raises:
        TypeError: If the config is no dict.
        ValueError: If the config is of another kind or damaged, or has unknown
            classes or parts without a counterpart in Keras 3. The error names
            all of these.
    """
    rewriter = Rewriter(on_loss_scale, custom_objects)
    try:
        migrated = rewriter.rewrite_object(config)
    except files.OF_DAMAGE as error:
        if not isinstance(config, Mapping):
            raise
        raise ValueError(
            "Cannot migrate this config. Received: a damaged config "
            f"({files.cause(error)}). Allowed: a config that tf_keras "
            "serialized. Write it again in tf_keras."
        ) from error
    rewriter.problems.check()
    rewriter.problems.report(on_loss_scale)
    return migrated


class Rewriter:
    """Converts one tf_keras config to Keras 3, and collects problems.

    Raises:
        ValueError: If `on_loss_scale` is not `"keep"`, `"drop"` or `"error"`.
    """

    def __init__(self, on_loss_scale: str, custom_objects: Config | None):
        if on_loss_scale not in ("drop", "keep", "error"):
            raise ValueError(
                "`on_loss_scale` has an unknown value. Received: "
                f"{on_loss_scale!r}. Allowed: 'drop', 'keep', 'error'. Pass "
                "one of these."
            )
        self.keeps_loss_scale = on_loss_scale == "keep"
        self.custom_objects = custom_objects or {}
        self.problems = Problems()

    def rewrite_object(self, config: object) -> dict[str, Any]:
        """Convert a config with `class_name` and `config` to Keras 3.

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
        """Return any part of a tf_keras config in the form of Keras 3.

        Args:
            value: The part.
            hint: The key of `classes.MODULES` where its class is likely.
            where: The name of the place in messages about problems.
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
            code = classes.bytecode(value.get("value"))
            if code is not None:
                self.problems.code.append(where)
                return {"class_name": "__lambda__", "config": {"value": code}}
            if value.get("class_name") != "function":
                return self.rewrite(value, where=where)
            name = value.get("config")
        if not isinstance(name, str):
            return copy.deepcopy(value)
        if name == "hard_sigmoid":
            return keras.saving.serialize_keras_object(tf_keras_hard_sigmoid)
        renamed = _RENAMED_ACTIVATIONS.get(name, name)
        return self.rewrite_function(renamed, where)

    def rewrite_function(self, name: str, where: str) -> object:
        """Return the config of a named function; record it if it is unknown."""
        found = classes.find_function(name, self.custom_objects)
        if found is None:
            self.problems.unknown.append(f"function {name!r} ({where})")
        return found or name

    def _object(self, config: Config, hint: str, where: str) -> Any:
        if config["class_name"] == "MeanMetricWrapper":
            config = plain_metric(config, self.custom_objects)
        name = config["class_name"]
        if name == "function":
            return self.rewrite_function(config["config"], where)
        if name == "__lambda__":
            self.problems.code.append(where)
        if name == "__lambda__" or name in _PASSED_ON:
            return copy.deepcopy(dict(config))
        if name in POLICIES:
            return policy(self, config, where)
        if name in OPTIMIZERS:
            return optimizer(self, config["config"], where)
        if name in graphs.LAYERS:
            self.problems.unsupported.append(graphs.described(config))
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
            migrated["compile_config"] = rewrite(
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
        classes.revise(kind, name, fields, known)
        if found.kind == "layers" and name in classes.NOTES:
            self.problems.notes.append(f"{where} {classes.NOTES[name]}")
        if fields.get("synchronized") and not _ON_TENSORFLOW:
            fields["synchronized"] = False
            self.problems.notes.append(
                f"{where} no longer synchronizes replicas: Keras 3 does so "
                "on TensorFlow only."
            )
        if found.is_layer and isinstance(fields.get("name"), str):
            fields["name"] = classes.safe_name(fields["name"])
        hint = "layers" if kind == "custom" else kind
        return {
            key: self._argument(key, value, hint, where)
            for key, value in self._accepted(found, fields, where).items()
        }

    def _accepted(
        self, found: classes.Found, fields: dict[str, Any], where: str
    ) -> dict[str, Any]:
        """Return the arguments that a class accepts; record all others."""
        base, name = classes.base(found, "")
        dropped = classes.DROPPED.get("layers" if found.is_layer else base, {})
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
            if key in known or allowed is classes.ANY or value in allowed:
                continue
            self.problems.unsupported.append(f"{key}={value!r} of {where}")
        return {key: v for key, v in fields.items() if key in known}


# Aliases in `losses` and `metrics` of tf_keras 2.21 that keras 3.12 to 3.15
# do not know. A metric of Keras 3 is a class, which is given the old name.
_LOSSES = {
    "huber_loss": "huber",
    "kullback_leibler_divergence": "kl_divergence",
    "logcosh": "log_cosh",
}
_METRICS = {
    "cosine_proximity": "CosineSimilarity",
    "kullback_leibler_divergence": "KLDivergence",
    "log_cosh": "LogCoshError",
    "logcosh": "LogCoshError",
}
_BY_SHAPE = ("accuracy", "acc")  # `compile` of Keras 3 tells which one


def rewrite(
    rewriter: Rewriting, config: Config, model: object
) -> dict[str, Any]:
    """Convert a `compile` config; `model` is the legacy config of its model."""
    arguments = {key: v for key, v in config.items() if v is not None}
    outputs = _outputs(model)
    if isinstance(arguments.get("loss_weights"), Mapping):
        # tf_keras weighs other losses with 1; Keras 3 has a KeyError.
        others = dict.fromkeys(_names(outputs), 1.0)
        arguments["loss_weights"] = {**others, **arguments["loss_weights"]}
    return {
        key: _argument(rewriter, key, value, outputs)
        for key, value in arguments.items()
    }


def plain_metric(config: Config, custom_objects: Config) -> Config:
    """Return a metric's config without a `MeanMetricWrapper` around it."""
    # HDF5 files wrap every function so, and Keras 3 reads the wrapper
    # differently.
    fields = config["config"]
    name = fields.get("fn") if isinstance(fields, Mapping) else None
    if not isinstance(name, str):
        return config
    if is_custom(name, custom_objects):
        # Keras 3 takes a field that is the name of a custom object for the
        # object, and the name of the metric is such a field.
        if fields.get("name") == name:
            return {"class_name": "function", "config": name}
    elif name == "cosine_similarity":
        # The function of this name is a loss in Keras 3: its sign is another.
        rest = {key: value for key, value in fields.items() if key != "fn"}
        return {"class_name": "CosineSimilarity", "config": rest}
    return config


def _argument(
    rewriter: Rewriting, key: str, value: object, outputs: object
) -> Any:
    where = f"compile, {key}"
    safe = classes.safe_names(_names(outputs))
    if isinstance(outputs, Mapping):
        safe = {}  # the names are no names of layers
    if key == "loss":
        return _each(value, safe, lambda x: _loss(rewriter, x, where))
    if key in ("metrics", "weighted_metrics"):
        value = _by_output(value, outputs)
        return _each(value, safe, lambda x: _metric(rewriter, x, where))
    if key == "loss_weights":
        return _each(value, safe, lambda x: x)
    hint = "optimizers" if key == "optimizer" else "layers"
    return rewriter.rewrite(value, hint, where)


def _each(
    value: object, safe: Mapping[str, str], change: Callable[[Any], object]
) -> object:
    """Apply `change` to each loss or metric, and rename the keys (outputs)."""
    if isinstance(value, (list, tuple)):
        return [_each(x, safe, change) for x in value]
    if isinstance(value, Mapping) and not _is_object(value):
        return {
            safe.get(key, key): _each(x, safe, change)
            for key, x in value.items()
        }
    return None if value is None else change(value)


def _loss(rewriter: Rewriting, loss: object, where: str) -> object:
    if not isinstance(loss, str):
        return rewriter.rewrite(loss, "losses", where)
    return _named(rewriter, _LOSSES.get(loss, loss), "losses", where)


def _metric(rewriter: Rewriting, metric: object, where: str) -> object:
    if not isinstance(metric, str):
        return rewriter.rewrite(metric, "metrics", where)
    if not is_custom(metric, rewriter.custom_objects):
        if metric.lower() in _BY_SHAPE:
            return metric
        if metric in _METRICS:
            fields = {"name": metric}
            config = {"class_name": _METRICS[metric], "config": fields}
            return rewriter.rewrite(config, "metrics", where)
    return _named(rewriter, metric, "metrics", where)


def _named(rewriter: Rewriting, name: str, kind: str, where: str) -> object:
    """Return a loss or metric by name; record it as a problem if unknown."""
    if not is_custom(name, rewriter.custom_objects):
        with contextlib.suppress(ValueError):
            getattr(keras, kind).get(name)
            return name
    return rewriter.rewrite_function(name, where)


def _by_output(metrics: object, outputs: Any) -> object:
    """Return metrics in Keras 3's form: nested as the outputs of the model."""
    if isinstance(metrics, str) or _is_object(metrics):
        metrics = [metrics]
    if not isinstance(metrics, (list, tuple)) or not outputs:
        return metrics
    is_flat = all(isinstance(x, str) or _is_object(x) for x in metrics if x)
    if is_flat and not any(isinstance(x, list) for x in metrics):
        return _like(outputs, [x for x in metrics if x is not None])
    if len(metrics) == 1:  # Keras 3.12 takes no nested list for one output.
        return metrics[0]
    # HDF5 has `[None]` for an output without metrics.
    return [None if x in ([], [None]) else x for x in metrics]


def _like(outputs: Any, metrics: list[Any]) -> object:
    """Return `metrics` once per output, nested as the model's outputs are."""
    if _is_tensor(outputs):
        return metrics
    if isinstance(outputs, Mapping):
        return {key: _like(x, metrics) for key, x in outputs.items()}
    if len(outputs) == 1:
        return _like(outputs[0], metrics)
    return [_like(x, metrics) for x in outputs]


def _outputs(model: object) -> Any:
    """Return the nested outputs in a model's config; None if not listed."""
    if isinstance(model, Mapping) and "output_layers" in model:
        return model["output_layers"]
    if isinstance(model, Mapping) and "layers" not in model:
        return None
    return ["", 0, 0]  # a sequential model has one


def _names(outputs: Any) -> list[str]:
    """Return the names that `compile` uses for the outputs of a model."""
    if isinstance(outputs, Mapping):
        return list(outputs)
    return [x[0] for x in outputs or () if _is_tensor(x)]


def _is_tensor(output: object) -> bool:
    """Return True if `output` is [layer name, node index, tensor index]."""
    return (
        isinstance(output, (list, tuple))
        and len(output) == 3
        and isinstance(output[0], str)
    )


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(
        value.get("class_name"), str
    )


POLICIES = frozenset({"Policy", "PolicyV1"})
OPTIMIZERS = frozenset(
    {"LossScaleOptimizer", "LossScaleOptimizerV1", "LossScaleOptimizerV3"}
)


def policy(rewriter: Rewriting, config: Config, where: str) -> dict[str, Any]:
    """Convert the config of a tf_keras dtype policy to Keras 3.

    Raises:
        ValueError: If the config has no policy name.
    """
    fields = config["config"]
    if not isinstance(fields, Mapping) or "name" not in fields:
        raise ValueError(
            f"Cannot read this policy. Received: {dict(config)!r}. Allowed: "
            "a config with a name. Correct the file."
        )
    # TensorFlow 2.0 to 2.2 wrote "_infer" for layers that took the dtype of
    # their inputs, which Keras 3 has no word for.
    name = "float32" if fields["name"] == "_infer" else fields["name"]
    requested = fields.get("loss_scale", "auto")
    # With "auto" it is what tf_keras and Keras do anyway.
    if requested not in ("auto", None):
        rewriter.problems.loss_scales.append(
            f"{requested!r} of the policy {fields['name']!r} ({where})"
        )
        if rewriter.keeps_loss_scale:
            kept = LossScaleDTypePolicy(name, loss_scale=requested)
            return keras.saving.serialize_keras_object(kept)
    return keras.dtype_policies.serialize(keras.DTypePolicy(name))


def optimizer(rewriter: Rewriting, config: Config, where: str) -> Any:
    """Convert the config of a tf_keras `LossScaleOptimizer` to Keras 3.

    Raises:
        ValueError: If the loss scale cannot be read.
    """
    inner = config.get("inner_optimizer", config.get("optimizer"))
    migrated = rewriter.rewrite(inner, "optimizers", where)
    arguments = _arguments(config)
    met = f"LossScaleOptimizer({arguments}) ({where})"
    rewriter.problems.loss_scales.append(met)
    if not rewriter.keeps_loss_scale:
        return migrated
    return {
        "module": LossScaleOptimizer.__module__,
        "class_name": LossScaleOptimizer.__name__,
        "config": {"inner_optimizer": migrated, **arguments},
        "registered_name": keras.saving.get_registered_name(LossScaleOptimizer),
    }


def _arguments(config: Config) -> dict[str, Any]:
    """Return a `LossScaleOptimizer`'s arguments except the inner optimizer."""
    if "loss_scale" in config:  # TensorFlow 2.3 and before; later numbers
        scale = loss_scales.get(config["loss_scale"])
        return {} if scale is None else of_loss_scale(scale)
    wanted = ("dynamic", "initial_scale", "dynamic_growth_steps")
    given = {k: config[k] for k in wanted if config.get(k) is not None}
    if given.get("initial_scale", 1) < 1:  # tf_keras has no minimum
        given["minimum_scale"] = given["initial_scale"]
    return given
