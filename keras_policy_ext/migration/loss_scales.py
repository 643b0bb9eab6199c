"""Loss scales in policies and around optimizers, in every form they had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_policy_ext.migration.problems import Config, Rewriting
from keras_policy_ext.mixed_precision import LossScaleOptimizer
from keras_policy_ext.mixed_precision._arguments import of_loss_scale
from keras_policy_ext.policies import LossScaleDTypePolicy, loss_scales

POLICIES = frozenset({"Policy", "PolicyV1"})
OPTIMIZERS = frozenset(
    {"LossScaleOptimizer", "LossScaleOptimizerV1", "LossScaleOptimizerV3"}
)


def policy(rewriter: Rewriting, config: Config, where: str) -> dict[str, Any]:
    """The Keras 3 config of a tf_keras policy.

    Raises:
        ValueError: If the config means no policy.
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
    """The Keras 3 config of an optimizer with its loss scale, or without it.

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
    """The arguments of a `LossScaleOptimizer` without the inner optimizer.

    TensorFlow 2.3 and before have a loss scale object, later ones numbers.
    """
    if "loss_scale" in config:
        scale = loss_scales.get(config["loss_scale"])
        return {} if scale is None else of_loss_scale(scale)
    wanted = ("dynamic", "initial_scale", "dynamic_growth_steps")
    given = {k: config[k] for k in wanted if config.get(k) is not None}
    if given.get("initial_scale", 1) < 1:  # tf_keras has no minimum
        given["minimum_scale"] = given["initial_scale"]
    return given
