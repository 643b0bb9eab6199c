"""Warn if `convert` takes the loss scale that a model's layers request."""

from __future__ import annotations

import keras

from keras_policy_ext import seams, user_code
from keras_policy_ext.ext.mixed.loss_scales import LossScale
from keras_policy_ext.ext.mixed.wrapping import loss_scale_of_model


class LossScales(seams.Follower):
    """Knows which loss scale the layers of a model request."""

    def before(self, change: seams.ModelChange) -> LossScale | None:
        """Return the loss scale that all layers request, or None."""
        return _requested(change.model) if change.to_float8 else None

    def after(self, change: seams.ModelChange, known: LossScale | None) -> None:
        """Warn if the layers lost the loss scale that they requested."""
        if known is None or _requested(change.model) == known:
            return
        user_code.warn(
            f"Layers of {change.model.name!r} had a LossScaleDTypePolicy with "
            f"{known!r}, and a float8 policy has no loss scale. To compile the "
            "model with it, wrap the optimizer before: optimizer = "
            "keras_policy_ext.mixed_precision.wrap_optimizer(optimizer, "
            "policy), with that policy."
        )

    def may_wrap_optimizer(self, model: keras.Model) -> bool:
        """Return True if layers of a model request a loss scale."""
        try:
            return loss_scale_of_model(model) is not None
        except ValueError:  # Layers ask for different ones.
            return True


def _requested(model: keras.Layer) -> LossScale | None:
    """Return the loss scale that all layers request; None if they differ."""
    if not isinstance(model, keras.Model):
        return None
    try:
        return loss_scale_of_model(model)
    except ValueError:  # They ask for different ones, and `compile` says so.
        return None


seams.register_follower(LossScales())
