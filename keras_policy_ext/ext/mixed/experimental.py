"""Names of `tf.keras.mixed_precision.experimental` of TensorFlow 2.3.

In that version, a policy has a loss scale, and a loss scaler takes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_policy_ext.ext.mixed import (
    inner_optimizers,
    loss_scales,
    optimizer,
    scaler_settings,
)
from keras_policy_ext.ext.mixed.loss_scales import LossScaleDTypePolicy
from keras_policy_ext.ext.mixed.policy import global_policy, set_global_policy
from keras_policy_ext.policies import of_path

__all__ = [
    "LossScaleOptimizer",
    "Policy",
    "get_layer_policy",
    "global_policy",
    "set_policy",
]

Policy = LossScaleDTypePolicy
set_policy = set_global_policy


def get_layer_policy(layer: object) -> keras.DTypePolicy:
    """Return the dtype policy of a layer, looked up in a `DTypePolicyMap`.

    Raises:
        TypeError: If it is not a layer.
    """
    if not isinstance(layer, keras.Layer):
        raise TypeError(
            f"`layer` is not a Keras layer. Received: {layer!r} (of type "
            f"{type(layer).__name__}). Allowed: a keras.Layer. Use "
            "global_policy() for the policy of new layers."
        )
    return of_path(layer.dtype_policy, layer.path)


@keras.saving.register_keras_serializable(
    "keras_policy_ext", "ExperimentalLossScaleOptimizer"
)
class LossScaleOptimizer(optimizer.LossScaleOptimizer):
    """A loss scaler with TensorFlow 2.3's arguments: optimizer, loss scale.

    Args:
        inner_optimizer: The optimizer to wrap.
        loss_scale: `"dynamic"`, a number >= 1, a `FixedLossScale` or a
            `DynamicLossScale`.
        optimizer: The name of `inner_optimizer` in TensorFlow 2.3.
        **kwargs: `minimum_scale`, `maximum_scale`, `max_skipped_steps` and
            `name` of `mixed_precision.LossScaleOptimizer`.

    Raises:
        TypeError: If the optimizer or the loss scale has the wrong type, or
            the optimizer is given by both names.
        ValueError: If the loss scale is None or out of range; and as
            `mixed_precision.LossScaleOptimizer`.
    """

    def __init__(
        self,
        inner_optimizer: object = None,
        loss_scale: object = None,
        *,
        optimizer: object = None,
        **kwargs: Any,
    ) -> None:
        if inner_optimizer is not None and optimizer is not None:
            raise TypeError(
                "`inner_optimizer` and `optimizer` are both given. Received: "
                f"inner_optimizer={inner_optimizer!r} and "
                f"optimizer={optimizer!r}. Allowed: one of the two, which are "
                "names of one argument. Leave one out."
            )
        if inner_optimizer is None:
            inner_optimizer = optimizer
        given = loss_scales.get(loss_scale)
        if given is None:
            raise ValueError(
                "`loss_scale` is missing. Received: None. Allowed: 'dynamic', "
                "a number >= 1, or a loss scale. Use the optimizer itself "
                "where the loss is not to be scaled."
            )
        super().__init__(
            inner_optimizer, **scaler_settings.of_loss_scale(given), **kwargs
        )

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as a dict of JSON types."""
        config = super().get_config()
        value = config.pop("initial_scale")
        steps = config.pop("dynamic_growth_steps")
        multiplier = config.pop("multiplier")
        if config.pop("dynamic"):
            scale: Any = loss_scales.DynamicLossScale(value, steps, multiplier)
        else:
            scale = loss_scales.FixedLossScale(value)
        return {**config, "loss_scale": loss_scales.serialize(scale)}

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        custom_objects: Mapping[str, object] | None = None,
    ) -> LossScaleOptimizer:
        """Create the optimizer from a config that `get_config` returned."""
        config = dict(config)
        inner = inner_optimizers.read_inner(
            config.pop("inner_optimizer"), custom_objects
        )
        return cls(inner, **config)
