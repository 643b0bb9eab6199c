"""Load whole model files of tf_keras."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras

from keras_policy_ext import mixed_precision
from keras_policy_ext.ext.migration import configs, files, weights
from keras_policy_ext.ext.migration.classes import Config
from keras_policy_ext.ext.migration.configs import Rewriter

_FAR = 10_000
"""A limit above the number of operations that Keras names in one model."""


def load_legacy_model(
    path: str | os.PathLike[str],
    on_loss_scale: str = "drop",
    custom_objects: Mapping[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
) -> keras.Model:
    """Load a model that tf_keras (Keras 2) saved as `.h5` or `.keras`.

    The file is not changed. The model has the same weights, layer policies and
    layer names (a slash in a name becomes an underscore). Its predictions are
    the same, up to the accuracy of the compute dtype.

    A compiled model is compiled again with its loss, metrics and optimizer.
    The number of iterations and the slots of the optimizer are restored. A
    warning says which of these the file lacks. A `.keras` file has no state of
    an optimizer of `tf_keras.optimizers.legacy`. No file has the current loss
    scale or its counter, so scaling starts at the initial scale.

    Args:
        path: The file. Its format is detected from the content.
        on_loss_scale: What to do with the loss scale of the optimizer or of
            policies. `"drop"`: drop it and warn; the model then needs only
            Keras. `"keep"`: the optimizer is this package's
            `LossScaleOptimizer`, and a policy with a loss scale a
            `LossScaleDTypePolicy`. `"error"`: raise a `ValueError` if there is
            one. Keras adds no loss scale of its own under any global policy.
        custom_objects: The caller's classes and functions by name, for
            Keras 3.
        compile: Whether to compile the model if it was compiled.
        safe_mode: Whether to refuse the bytecode of Python functions, such as
            those of Lambda layers, which loading would otherwise run.

    Returns:
        A `keras.Model` on the backend in use.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no such file, is damaged, has a loss scale under
            `"error"` or bytecode under `safe_mode`; or has unknown classes or
            parts without a counterpart in Keras 3. The error names all of
            these.
    """
    custom_objects = dict(custom_objects or {})
    rewriter = Rewriter(on_loss_scale, custom_objects)
    with files.open_legacy(path) as file:
        config = rewriter.rewrite_object(file.model_config)
        training = None
        if compile and file.compile_config is not None:
            training = _training(rewriter, file, file.compile_config)
        rewriter.problems.check()
        if safe_mode:
            rewriter.problems.refuse_code()
        rewriter.problems.report(on_loss_scale)
        _reserve(_layer_names(config))
        model = keras.saving.deserialize_keras_object(
            config, custom_objects=custom_objects, safe_mode=safe_mode
        )
        weights.load(model, file.model_config, file)
        if training is not None:
            mixed_precision.compile(
                model,
                auto_scale_loss=False,
                **keras.saving.deserialize_keras_object(
                    training, custom_objects=custom_objects, safe_mode=safe_mode
                ),
            )
            _load_optimizer(model, file)
    return model


def _training(
    rewriter: Rewriter, file: files.LegacyFile, legacy: Config
) -> dict[str, Any]:
    """Convert the file's `compile` config to the arguments of Keras 3."""
    if file.scaled_by_default and not _is_scaled(legacy.get("optimizer")):
        # What `compile` of tf_keras did under mixed_float16.
        inner = legacy["optimizer"]
        if isinstance(inner, str):
            inner = keras.saving.serialize_keras_object(
                keras.optimizers.get(inner)
            )
        scaled = {
            "class_name": "LossScaleOptimizer",
            "config": {"inner_optimizer": inner, "dynamic": True},
        }
        legacy = {**legacy, "optimizer": scaled}
    return configs.rewrite(rewriter, legacy, file.model_config["config"])


def _load_optimizer(model: keras.Model, file: files.LegacyFile) -> None:
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config = _inner_config((file.compile_config or {}).get("optimizer"), inner)
    order, _ = weights.legacy_order(model, file.model_config)
    missing = weights.load_optimizer_state(
        inner, model.trainable_variables, config, order, file.optimizer
    )
    if missing is not None:
        warnings.warn(
            f"{missing} Received: {os.fspath(file.path)!r}.", stacklevel=3
        )


def _is_scaled(optimizer: object) -> bool:
    return (
        isinstance(optimizer, Mapping)
        and optimizer.get("class_name") in configs.OPTIMIZERS
    )


def _inner_config(
    optimizer: keras.Optimizer, built: keras.optimizers.Optimizer
) -> Config:
    """Return the config of an optimizer, without loss scalers around it."""
    if isinstance(optimizer, str):
        # By name, with the arguments of the class's defaults: of the second
        # generation, as an archive of an optimizer of the first has no state.
        fields = {**built.get_config(), "is_legacy_optimizer": False}
        return {"class_name": type(built).__name__, "config": fields}
    while _is_scaled(optimizer):
        fields = optimizer["config"]
        optimizer = fields.get("inner_optimizer", fields.get("optimizer"))
    return optimizer


def _layer_names(config: object) -> Iterator[str]:
    """Yield the names of all layers in a Keras 3 config, also nested."""
    if isinstance(config, Mapping):
        layers = config.get("layers")
        for layer in layers if isinstance(layers, list) else ():
            if isinstance(layer, Mapping):
                fields = layer.get("config")
                inner = fields if isinstance(fields, Mapping) else {}
                name = layer.get("name", inner.get("name"))
                if isinstance(name, str):
                    yield name
        config = list(config.values())
    if isinstance(config, list):
        for value in config:
            yield from _layer_names(value)


def _reserve(names: Iterable[str]) -> None:
    """Reserve layer names, so that Keras does not generate them again."""
    # A mask is computed by operations, which Keras names by class and count and
    # puts into the graph of a functional model. An operation `Concatenate` for
    # the mask of such a layer would get the name that the layer has in the
    # file. A graph takes no name twice (keras 3.12 to 3.15).
    taken: dict[str, set[int]] = {}
    for name in names:
        taken.setdefault(name, set()).add(0)
        counted = re.fullmatch(r"(.+)_([1-9]\d{0,8})", name, re.ASCII)
        if counted:
            taken.setdefault(counted[1], set()).add(int(counted[2]))
    for prefix, counts in taken.items():
        following = keras.backend.get_uid(prefix)
        # A count that is far off is not reached, and would cost its steps.
        last = max((n for n in counts if n < following + _FAR), default=0)
        while following <= last:
            following = keras.backend.get_uid(prefix)
