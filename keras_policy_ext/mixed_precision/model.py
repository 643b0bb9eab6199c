"""`LossScaleMixin`: models that scale the loss wherever float16 needs it."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext import _bases
from keras_policy_ext._keras import compiled_steps
from keras_policy_ext.mixed_precision import wrapping
from keras_policy_ext.mixed_precision.monitor import (
    LossScaleMonitor,
    log_values,
    without_log_values,
)
from keras_policy_ext.mixed_precision.optimizer import LossScaleOptimizer


class LossScaleMixin(compiled_steps.OwnReturnedLogs, _bases.MixedInto):
    """Makes a model's `compile` scale the loss wherever float16 needs it.

    ```python
    class MyModel(kpe.mixed_precision.LossScaleMixin, keras.Model):
        ...
    ```

    Put it before the Keras class. `compile` wraps the optimizer if any layer
    computes in float16, as `wrap_optimizer` does, and honours the loss scale
    of a `LossScaleDTypePolicy`. An optimizer that scales the loss itself
    stays as it is, and `auto_scale_loss=False` leaves any as it is.

    While a `LossScaleOptimizer` is at work, the logs of `fit` have
    `loss_scale` and `skipped_steps`: the scale after the last step, and how
    many steps in a row were skipped up to it. A `train_step` of your own has
    them too if it calls this one. With `max_skipped_steps` of the optimizer,
    `fit` ends with an error when so many were skipped.

    Raises:
        TypeError: By the `class` statement, if the Keras class comes first.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _bases.check_before(cls, LossScaleMixin, keras.Model, "keras.Model")

    def compile(
        self,
        optimizer: object = "rmsprop",
        *args: Any,
        auto_scale_loss: bool = True,
        **kwargs: Any,
    ) -> None:
        """`keras.Model.compile`, which wraps by all layers' policies.

        Args:
            optimizer: As for `keras.Model.compile`.
            *args: As for `keras.Model.compile`.
            auto_scale_loss: Whether to wrap the optimizer where needed.
            **kwargs: As for `keras.Model.compile`.

        Raises:
            ValueError: If layers ask for different loss scales.
        """
        wrapping.compile_by(
            super().compile, self, optimizer, args, auto_scale_loss, kwargs
        )

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile as a file says; also one that Keras alone has written.

        Where a subclass compiles in its own way, that is Keras's business,
        which says what to do.
        """
        if type(self).compile is not LossScaleMixin.compile:
            super().compile_from_config(config)
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """`keras.Model.fit`, which ends when too many steps were skipped.

        Raises:
            FloatingPointError: If `max_skipped_steps` of the
                `LossScaleOptimizer` were skipped in a row.
        """
        optimizer = getattr(self, "optimizer", None)
        if getattr(optimizer, "max_skipped_steps", None) is not None:
            callbacks = _with_monitor(callbacks, self)
        return super().fit(
            x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs
        )

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """`keras.Model.train_step`, with the loss scale in the logs."""
        result = super().train_step(*args, **kwargs)
        if not isinstance(self.optimizer, LossScaleOptimizer):
            return result
        if keras.backend.backend() != "jax":
            return {**result, **log_values(self.optimizer)}
        logs, state = result
        mapping = list(zip(self.optimizer.variables, state[2], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return {**logs, **log_values(self.optimizer)}, state

    def returned_logs(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return the loss and the metrics, as `train_on_batch` does."""
        return without_log_values(logs)


def _with_monitor(callbacks: Any, model: keras.Model) -> Any:
    monitor = LossScaleMonitor()
    if isinstance(callbacks, keras.callbacks.CallbackList):
        # Around the user's list, which would have one more after each fit.
        return keras.callbacks.CallbackList(
            [callbacks, monitor], model=model, **(callbacks.params or {})
        )
    if callbacks is None:
        return [monitor]
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks, monitor]
    return [*callbacks, monitor]
