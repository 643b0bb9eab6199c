"""Log the loss scale in `fit`."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext.ext.mixed import skip_limits
from keras_policy_ext.ext.mixed.optimizer import LossScaleOptimizer

NAMES = ("loss_scale", "skipped_steps")


def log_values(optimizer: LossScaleOptimizer) -> dict[str, Any]:
    """Return the loss scale and counters to log, by name."""
    return {name: getattr(optimizer, name) for name in NAMES}


def without_log_values(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs without the names that `log_values` adds."""
    return {name: logs[name] for name in logs if name not in NAMES}


class LossScaleMonitor(keras.callbacks.Callback):
    """A callback that logs the loss scale, and stops after skipped steps.

    It is for models without `LossScaleMixin`, which does the same. It adds
    `loss_scale` and `skipped_steps` (the number of consecutive skipped steps)
    to the logs of each batch and epoch. List it before callbacks that read
    these. It does nothing if the optimizer is no `LossScaleOptimizer`.

    On JAX it reads the optimizer after each batch. For that, Keras copies the
    state of the training step into the variables, which takes some time for
    models with many layers.

    Raises:
        FloatingPointError: After a batch, if `max_skipped_steps` consecutive
            steps were skipped.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Record that this callback enforces `max_skipped_steps`."""
        optimizer = self.model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            skip_limits.mark_checked(optimizer)

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Log the loss scale; raise after too many skipped steps."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer):
            return
        limit = optimizer.max_skipped_steps
        known = logs or {}
        logged = set(NAMES) <= set(known)
        if logged and (limit is None or known["skipped_steps"] < limit):
            return
        _sync(self.model)
        if logs is not None:
            logs.update(_numbers(optimizer))
        optimizer.check_skipped_steps()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Log the loss scale after the last batch."""
        optimizer = self.model.optimizer
        if isinstance(optimizer, LossScaleOptimizer) and logs is not None:
            _sync(self.model)
            logs.update(_numbers(optimizer))


def _sync(model: keras.Model) -> None:
    """Update a model's variables on JAX, where the trainer holds values."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def _numbers(optimizer: LossScaleOptimizer) -> dict[str, Any]:
    values = log_values(optimizer)
    return {
        "loss_scale": float(values["loss_scale"]),
        "skipped_steps": int(values["skipped_steps"]),
    }
