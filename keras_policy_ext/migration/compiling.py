"""The arguments of `compile`, as tf_keras understood them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_policy_ext.migration import changes
from keras_policy_ext.migration.classes import is_custom
from keras_policy_ext.migration.problems import Config, Rewriting

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
    """The arguments of `compile` for Keras 3; defaults are left out.

    The legacy config of the model says which outputs there are.
    """
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
    """The config of a metric without a wrapper that Keras 3 reads otherwise.

    That is `MeanMetricWrapper`, which HDF5 has for every function.
    """
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
    safe = changes.safe_names(_names(outputs))
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
    """Change every loss or metric; names of outputs follow their layers."""
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
    """A loss or metric by name; an unknown one becomes a problem."""
    if not is_custom(name, rewriter.custom_objects):
        with contextlib.suppress(ValueError):
            getattr(keras, kind).get(name)
            return name
    return rewriter.rewrite_function(name, where)


def _by_output(metrics: object, outputs: Any) -> object:
    """Metrics as Keras 3 takes them: what a flat list has is of each output.

    Keras 3.12 does not take a list in a list for a model with one output.
    """
    if isinstance(metrics, str) or _is_object(metrics):
        metrics = [metrics]
    if not isinstance(metrics, (list, tuple)) or not outputs:
        return metrics
    is_flat = all(isinstance(x, str) or _is_object(x) for x in metrics if x)
    if is_flat and not any(isinstance(x, list) for x in metrics):
        return _like(outputs, [x for x in metrics if x is not None])
    if len(metrics) == 1:
        return metrics[0]
    # HDF5 has `[None]` for an output without metrics.
    return [None if x in ([], [None]) else x for x in metrics]


def _like(outputs: Any, metrics: list[Any]) -> object:
    """The same metrics for each output, in the structure of the outputs."""
    if _is_tensor(outputs):
        return metrics
    if isinstance(outputs, Mapping):
        return {key: _like(x, metrics) for key, x in outputs.items()}
    if len(outputs) == 1:
        return _like(outputs[0], metrics)
    return [_like(x, metrics) for x in outputs]


def _outputs(model: object) -> Any:
    """The structure of outputs of a model, of its config; None if unknown."""
    if isinstance(model, Mapping) and "output_layers" in model:
        return model["output_layers"]
    if isinstance(model, Mapping) and "layers" not in model:
        return None
    return ["", 0, 0]  # a sequential model has one


def _names(outputs: Any) -> list[str]:
    """Names of the outputs, as arguments of `compile` have them."""
    if isinstance(outputs, Mapping):
        return list(outputs)
    return [x[0] for x in outputs or () if _is_tensor(x)]


def _is_tensor(output: object) -> bool:
    """True if it is one output: name of a layer, its node, which tensor."""
    return (
        isinstance(output, (list, tuple))
        and len(output) == 3
        and isinstance(output[0], str)
    )


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(
        value.get("class_name"), str
    )
