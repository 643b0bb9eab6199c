"""A callback for `fit` that records the steps before a bad loss."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_policy_ext.ext.replay.flight_recorder import Recorder, check, record
from keras_policy_ext.ext.replay.recording_files import copied
from keras_policy_ext.ext.sampling.captured import as_parts


class FlightRecorder(keras.callbacks.Callback):
    """A callback that records the steps before a bad loss, by `kpe.record`.

    ```python
    recorder = kpe.callbacks.FlightRecorder("crash.zip")
    batches = recorder.watching(dataset)
    model.fit(
        batches, steps_per_epoch=100, shuffle=False, callbacks=[recorder]
    )
    ```

    Callbacks do not get the batches of `fit`, so `fit` gets them through
    `watching`. Keras waits for the loss of each step.

    Args:
        path: As for `record`.
        **options: `every`, `share`, `spike` and `max_bytes`, as for `record`.

    Attributes:
        recorder: The `Recorder` of the model of the last `fit`; None before.

    Raises:
        ValueError: As `record` does; of the model, when training begins. Then
            also if `fit` does not get its batches through `watching`, or takes
            several steps in one execution.
    """

    def __init__(self, path: str | pathlib.Path, **options: Any):
        super().__init__()
        check(path, **options)
        self.recorder: Recorder | None = None
        self._path, self._options = path, options
        self._ahead: collections.deque[Any] = collections.deque()
        self._sum = 0.0

    def watching(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches for `fit`, again and again, and remember them.

        Pass `steps_per_epoch` to `fit`, since this has no end.

        Args:
            batches: Batches, `(x, y)` or `(x, y, sample_weight)`, or `x`, such
                as a dict: a `tf.data.Dataset`, a `PyDataset`, a data loader of
                PyTorch, a list. It is
                iterated anew after its end; an iterator or a generator cannot
                be, and ends.
        """
        self._ahead.clear()
        is_first = True
        while is_first or iter(batches) is not batches:
            is_empty = True
            for batch in batches:
                is_first = is_empty = False
                parts = as_parts(batch)  # Keras takes tuples alone.
                parts = parts if isinstance(parts, tuple) else (parts,)
                self._ahead.append(copied(parts))
                yield parts
            if is_empty:
                raise ValueError(
                    f"`watching` got no batch. Received: {batches!r}, which "
                    "is empty. Allowed: batches, as tuples. Pass a dataset."
                )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the model, and save it."""
        self._check_batches()
        if (steps := self.model.steps_per_execution) > 1:
            raise ValueError(
                "The flight recorder needs the loss of each step. Received: "
                f"a model with steps_per_execution={steps}. Allowed: 1. "
                "Compile the model without it."
            )
        if self.recorder is None or self.recorder.model is not self.model:
            self.recorder = record(self.model, self._path, **self._options)
        else:
            self.recorder.save()

    def _check_batches(self) -> None:
        if not self._ahead:
            raise ValueError(
                "The flight recorder does not get the batches. Received: `fit` "
                "with other data. Allowed: what `watching` of this callback "
                "returns. Call fit(recorder.watching(dataset), "
                "steps_per_epoch=..., callbacks=[recorder])."
            )

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Begin the mean of losses anew, as Keras does."""
        self._sum = 0.0

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Tell the recorder of the batch and its loss."""
        if self.recorder is None:
            return
        self._check_batches()
        logs = logs or {}
        if "loss" not in logs:
            raise ValueError(
                "The flight recorder needs the loss of each step. Received: "
                f"logs with {sorted(logs)}. Allowed: logs with 'loss'. "
                "Return it in `train_step` of the model, or call "
                "keras_policy_ext.record in a loop of your own."
            )
        # Keras logs the mean of the epoch so far.
        total = logs["loss"] * (batch + 1)
        loss, self._sum = total - self._sum, total
        self.recorder.step_of_copy(self._ahead.popleft(), loss)
