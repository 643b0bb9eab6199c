"""Loss scalers of compiled models, as they were when saved.

Keras's `compile` saves the optimizer without the scaler that it wraps around
it, and when the file is loaded decides anew, by the global policy of then
(keras 3.12 to 3.15): the scaler is lost, with its scale and the slots, or one
appears.
"""

from __future__ import annotations

from typing import Any

import h5py
import keras

from keras_policy_ext import _user_code
from keras_policy_ext.conversion import training
from keras_policy_ext.mixed_precision.wrapping import loss_scale_of_model
from keras_policy_ext.policies.loss_scales import LossScale

_GROUP = "optimizer/inner_optimizer"


def may_differ(model: keras.Model) -> bool:
    """True if Keras may have wrapped the optimizer of one of two models."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return False
    if hasattr(optimizer, "inner_optimizer"):
        return True
    try:
        return loss_scale_of_model(model) is not None
    except ValueError:  # Layers ask for different ones.
        return True


def loss_scale_asked(model: keras.Layer) -> LossScale | None:
    """The one loss scale that the layers of a model ask for; None if none."""
    if not isinstance(model, keras.Model):
        return None
    try:
        return loss_scale_of_model(model)
    except ValueError:  # They ask for different ones, and `compile` says so.
        return None


def warn_of_lost(asked: LossScale | None, model: keras.Layer) -> None:
    """Warn if layers that were converted had asked for another loss scale.

    Args:
        asked: What they asked for before.
        model: Their model.
    """
    now = loss_scale_asked(model)
    if asked is None or now == asked:
        return
    _user_code.warn(
        f"Layers of {model.name!r} had a LossScaleDTypePolicy with {asked!r}, "
        "and a float8 policy has no loss scale. To compile the model with it, "
        "wrap the optimizer before: optimizer = keras_policy_ext."
        "mixed_precision.wrap_optimizer(optimizer, policy), with that policy."
    )


def restore(model: keras.Model, weights: str) -> bool:
    """Wrap the optimizer of a model just loaded if the saved one was, or not.

    Returns:
        Whether that changed, and the weights have to be loaded again.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return False
    saved = _has_scaler(weights)
    inner = getattr(optimizer, "inner_optimizer", None)
    if saved is None or saved == (inner is not None):
        return False
    if saved:
        wrapper: Any = keras.optimizers.LossScaleOptimizer
        inner = wrapper(optimizer, name="loss_scale_optimizer")
    model.optimizer = inner
    with training.replicas(model):
        model.optimizer.build(model.trainable_variables)
    return True


def _has_scaler(weights: str) -> bool | None:
    """Return True if a file has a scaler; None if it has no optimizer."""
    try:
        with h5py.File(weights, "r") as file:
            return _GROUP in file if "optimizer" in file else None
    except OSError:  # No HDF5 file: weights in shards.
        return None
