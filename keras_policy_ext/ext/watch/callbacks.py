"""Callbacks for `fit` that watch a model, and act on what they see."""

from __future__ import annotations

import pathlib
from typing import Any

import keras

from keras_policy_ext.ext.sampling.captured import Loss
from keras_policy_ext.ext.watch.autopilot import (
    Autopilot,
    autopilot,
    check_steering,
)
from keras_policy_ext.ext.watch.monitor import Watch, watch
from keras_policy_ext.ext.watch.rules import Thresholds


class Float8Monitor(keras.callbacks.Callback):
    """A callback that follows what float8 does to each layer, by `kpe.watch`.

    It adds the worst figures of the last sample to the logs of epochs:
    `float8_sqnr_db`, `float8_saturated_fraction` and
    `float8_underflow_fraction`. List it before callbacks that read these.

    Args:
        data: A batch to look at, `(x, y)`, as for `what_if`: callbacks do not
            get the batches of `fit`. Its size may be another one. From an
            iterator, each sample takes the next batch; at its end a warning
            says so, and no more samples are taken.
        every: As for `watch`.
        share: As for `watch`.
        loss: As for `what_if`.
        path: As for `watch`.
        log_dir: As for `watch`.
        page: A file for `Watch.page` when training ends; None for none.

    Attributes:
        watch: The `Watch` of the model of the last `fit`; None before.

    Raises:
        TypeError, ValueError, ImportError: As `watch` does; of the model, when
            training begins.
    """

    def __init__(
        self,
        data: Any,
        *,
        every: int | None = None,
        share: float = 0.015,
        loss: Loss | None = None,
        path: str | pathlib.Path | None = None,
        log_dir: str | pathlib.Path | None = None,
        page: str | pathlib.Path | None = None,
    ):
        super().__init__()
        self.watch: Watch | None = None
        self._data, self._page = data, page
        self._batch = 0  # the first one of the execution that runs
        self._how: dict[str, Any] = {
            "every": every,
            "share": share,
            "loss": loss,
            "path": path,
            "log_dir": log_dir,
        }
        Watch(None, **self._how)  # It checks them.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the model; go on with the samples of its earlier `fit`."""
        if self.watch is None or self.watch.model is not self.model:
            self.watch = watch(self.model, **self._how)
            self.watch.is_of_training = False

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Count the batches of the epoch from the first one."""
        self._batch = 0

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Count the steps before, and take a sample if it is time for one."""
        # Not when they end: Keras then waits for the loss of each execution.
        if self.watch is not None and batch:
            self.watch.step(self._data, batch - self._batch)
        self._batch = batch

    def _last_steps(self) -> int:
        """Return the number of steps in the last execution of an epoch."""
        count: int = self.model.steps_per_execution
        # If Keras does not know it, the execution is taken as complete.
        known: int | None = (self.params or {}).get("steps")
        return count if known is None else min(count, known - self._batch)

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Count the last steps; log the worst figures of the last sample."""
        if self.watch is not None:
            self.watch.step(self._data, self._last_steps())
            if logs is not None:
                logs.update(self.watch.logs())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write the page."""
        if self.watch is not None and self._page is not None:
            text = self.watch.page()
            pathlib.Path(self._page).write_text(text, encoding="utf-8")


class Float8Autopilot(Float8Monitor):
    """A callback that takes layers out of float8 while their figures are bad.

    It acts as `kpe.autopilot` does, and logs what `Float8Monitor` logs, and
    `float8_layers_out`, the number of layers without their own recipe. Print
    `autopilot` for the decisions.

    Args:
        data: As for `Float8Monitor`.
        every: As for `kpe.autopilot`.
        finer: As for `kpe.autopilot`.
        calm: As for `kpe.autopilot`.
        thresholds: As for `kpe.autopilot`.
        **options: `loss`, `path`, `log_dir` and `page`, as for `Float8Monitor`.

    Attributes:
        autopilot: The `Autopilot` of the model of the last `fit`; None before.

    Raises:
        TypeError, ValueError, ImportError: As `kpe.autopilot` does; of the
            model, when training begins.
    """

    def __init__(
        self,
        data: Any,
        *,
        every: int = 10,
        finer: Any = None,
        calm: int = 5,
        thresholds: Thresholds | None = None,
        **options: Any,
    ):
        if "share" in options:
            raise TypeError(
                "Float8Autopilot has no argument `share`: its decisions do "
                f"not depend on time. Received: share={options['share']!r}. "
                "Allowed: `every`, a number of steps. Leave `share` out."
            )
        check_steering(every, finer, calm)
        super().__init__(data, every=every, **options)
        Watch(None, **self._how, thresholds=thresholds)
        self.autopilot: Autopilot | None = None
        self._how.pop("share")
        self._how |= {"finer": finer, "calm": calm, "thresholds": thresholds}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the model; go on with the decisions of its earlier `fit`."""
        if self.watch is None or self.watch.model is not self.model:
            self.autopilot = autopilot(self.model, **self._how)
            self.watch = self.autopilot.watch
            self.watch.is_of_training = False

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Take a sample if it is time for one, and act on it."""
        if self.autopilot is not None:
            self.autopilot.step(self._data, max(batch - self._batch, 1))
        self._batch = batch

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Log the worst figures of the last sample, and the layers out."""
        if self.autopilot is None:
            return
        watch = self.autopilot.watch
        watch.steps += self._last_steps() - 1  # The first one is counted.
        if logs is not None:
            logs.update(watch.logs())
            logs.update(self.autopilot.logs())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write the page; warn of layers that are out."""
        super().on_train_end(logs)
        if self.autopilot is not None:
            self.autopilot.warn_of_layers_out()
