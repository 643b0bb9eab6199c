"""Loss scales in policies and around optimizers, in every form they had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_policy_ext.mixed_precision import LossScaleOptimizer
from keras_policy_ext.policies import LossScaleDTypePolicy, loss_scales

POLICIES = frozenset({"Policy", "PolicyV1"})
OPTIMIZERS = frozenset(
    {
        "LossScaleOptimizer",
        "LossScaleOptimizerV1",
        "LossScaleOptimizerV3",
    }
)
DECISIONS = ("drop", "keep", "error")


def policy(
    config: Mapping[str, Any], keep: bool, found: Callable[[str], None]
) -> dict[str, Any]:
    """The Keras 3 config of a tf_keras policy.

    Args:
        config: `{"class_name": "Policy" or "PolicyV1", "config": ...}`.
        keep: Whether a loss scale stays, in a `LossScaleDTypePolicy`.
        found: Called with the loss scale, if there is one.

    Raises:
        ValueError: If the config means no policy.
    """
    fields = config["config"]
    if not isinstance(fields, Mapping) or "name" not in fields:
        raise ValueError(
            f"Cannot read this policy. Received: {dict(config)!r}. Allowed: "
            "a config with a name. Correct the file."
        )
    plain = plain_policy(fields["name"])
    requested = fields.get("loss_scale", "auto")
    # What tf_keras and Keras do anyway: nothing to carry over.
    if requested == "auto":
        return plain
    if requested is not None:
        found(f"{requested!r} of the policy {fields['name']!r}")
    if not keep or requested is None:
        return plain
    return keras.saving.serialize_keras_object(
        LossScaleDTypePolicy(plain["config"]["name"], loss_scale=requested)
    )


def plain_policy(name: str) -> dict[str, Any]:
    """The config of the policy with a name."""
    # TensorFlow 2.0 to 2.2 wrote this for layers that took the dtype of
    # their inputs, which Keras 3 has no word for.
    name = "float32" if name == "_infer" else name
    return keras.dtype_policies.serialize(keras.DTypePolicy(name))


def optimizer_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `LossScaleOptimizer` without the inner optimizer.

    Reads the form of TensorFlow 2.3 and before, which has a loss scale
    object, and the later one, which has numbers.

    Raises:
        ValueError: If the loss scale cannot be read.
    """
    if "loss_scale" in config:
        return _of_object(loss_scales.get(config["loss_scale"]))
    wanted = ("dynamic", "initial_scale", "dynamic_growth_steps")
    given = {k: config[k] for k in wanted if config.get(k) is not None}
    if given.get("initial_scale", 1) < 1:  # tf_keras has no minimum
        given["minimum_scale"] = given["initial_scale"]
    return given


def _of_object(scale: loss_scales.LossScale | None) -> dict[str, Any]:
    if isinstance(scale, loss_scales.FixedLossScale):
        return {"dynamic": False, "initial_scale": scale.loss_scale_value}
    if isinstance(scale, loss_scales.DynamicLossScale):
        return {
            "dynamic": True,
            "initial_scale": scale.initial_loss_scale,
            "dynamic_growth_steps": scale.increment_period,
            "multiplier": scale.multiplier,
        }
    return {}


def optimizer(
    inner: dict[str, Any], arguments: dict[str, Any]
) -> dict[str, Any]:
    """The config of this package's `LossScaleOptimizer`.

    Args:
        inner: Keras 3 config of the optimizer that it wraps.
        arguments: As `optimizer_arguments` gives them.
    """
    return {
        "module": LossScaleOptimizer.__module__,
        "class_name": LossScaleOptimizer.__name__,
        "config": {"inner_optimizer": inner, **arguments},
        "registered_name": keras.saving.get_registered_name(LossScaleOptimizer),
    }
