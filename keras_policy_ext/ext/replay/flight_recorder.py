"""`record`: keep what is needed to compute a bad step of training again."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import pathlib
import shutil
import statistics
import tempfile
import time
import weakref
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import user_code
from keras_policy_ext.conversion.candidates import check as check_convertible
from keras_policy_ext.conversion.training import replicas
from keras_policy_ext.ext.replay import recording_files
from keras_policy_ext.ext.replay.recording_files import (
    RandomState,
    Recording,
    Step,
)
from keras_policy_ext.ext.sampling import machine
from keras_policy_ext.ext.sampling.captured import as_parts, synchronize
from keras_policy_ext.ext.sampling.samples import check_sampling

_LOGGER = logging.getLogger("keras_policy_ext")

EARLIER = 32
"""The number of losses that a spike is judged against."""

_FEWEST = 8
"""The number of losses before there can be a spike."""

SPARE = 2**14
"""The bytes of a recording beside the model and the steps, at most."""


class Recorder:
    """Keeps the last steps of training; see `record`.

    Attributes:
        model: The model.
        path: The file to write.
        steps: The number of steps so far.
        reason: Why the file was written: `"nonfinite"` or `"spike"`; "" as
            long as there is none.
    """

    def __init__(
        self,
        model: Any,
        path: pathlib.Path,
        every: int | None,
        share: float,
        spike: float | None,
        max_bytes: int,
    ):
        self.model, self.path = model, path
        self.steps, self.reason = 0, ""
        self._every, self._share = every, share
        self._spike, self._most = spike, max_bytes
        self._losses: collections.deque[float]
        self._losses = collections.deque(maxlen=EARLIER)
        self._folder = pathlib.Path(
            tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
        )
        # Also when the recorder is garbage, and when Python ends.
        remove = shutil.rmtree
        self._end = weakref.finalize(self, remove, self._folder, True)
        self._saves = 0
        self._starts: list[_Start] = []
        try:
            if not model.optimizer.built:  # As the first step would do.
                with replicas(model):
                    model.optimizer.build(model.trainable_variables)
            self.save()
        except Exception as error:
            self._end()
            raise ValueError(
                f"{model.name!r} cannot be recorded, because it cannot be "
                f"saved. Received: {error} Allowed: a model for which "
                "model.save works. A layer of your own needs get_config."
            ) from error
        try:
            self._check_size(self._starts[0])
        except ValueError:
            self._end()
            raise

    def save(self) -> None:
        """Save the model as it is now; a recording begins with it."""
        # The save before is kept until the next loss is good: if not, the step
        # before this save may have been the one that broke the weights.
        if not self._end.alive:
            return
        start = time.perf_counter()
        synchronize(self.model)
        self._saves += 1
        file = self._folder / f"{self._saves}.keras"
        self.model.save(file)
        random = RandomState.of(self.model)
        nbytes = file.stat().st_size + random.nbytes + SPARE
        earlier = tuple(self._losses)
        self._starts.append(_Start(file, random, earlier, nbytes))
        end = time.perf_counter()
        self._next = end + (end - start) / self._share

    def _check_size(self, start: _Start) -> None:
        """Raise if the model and the steps since are too large for the file."""
        kept = start.kept_bytes
        if start.nbytes + kept > self._most:
            raise ValueError(
                f"{self.model.name!r} cannot be recorded: it is too large. "
                f"Received: max_bytes={self._most:,}, for a file of "
                f"{start.nbytes:,} bytes with model and optimizer, and "
                f"{kept:,} bytes of batches. Allowed: at least "
                f"{start.nbytes + kept:,}. Raise max_bytes."
            )

    def step(self, batch: Any, loss: Any) -> bool:
        """Tell of a step of training, after it.

        Args:
            batch: The batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)`; a
                list is read as a tuple, since data loaders return lists.
            loss: The loss of the batch, a scalar.

        Returns:
            Whether the file was written.

        Raises:
            TypeError: If the batch has something else than numbers.
            ValueError: If the loss is no scalar; in the first step, if the
                model and a batch are larger than `max_bytes`.
        """
        is_recording = self._end.alive
        arrays = (
            recording_files.copied(as_parts(batch)) if is_recording else None
        )
        return self.step_of_copy(arrays, loss)

    def step_of_copy(self, arrays: Any, loss: Any) -> bool:
        """Tell of a step like `step`; the NumPy arrays must stay unchanged."""
        value = np.asarray(ops.convert_to_numpy(loss))
        if value.size != 1:
            raise ValueError(
                "`loss` is not the loss of a step. Received: "
                f"{loss!r}. Allowed: one number. Of train_on_batch take "
                '["loss"], with return_dict=True.'
            )
        self.steps += 1
        if not self._end.alive:
            return False
        step = Step(self.steps, float(value.reshape(())), arrays)
        for start in self._starts:
            start.keep(step)
        reason = self._judge(step.loss)
        is_new = reason == "nonfinite" or bool(reason and not self.reason)
        try:
            if self.steps == 1:
                self._check_size(self._starts[0])
            if is_new:
                self._write(reason)
            self._go_on(step, reason)
        except (OSError, ValueError) as error:
            self._end()
            if self.steps == 1:
                raise
            user_code.warn(f"The flight recorder stopped. {error}")
            return False
        return is_new

    def _go_on(self, step: Step, reason: str) -> None:
        """Prepare for the next step; save the model if it is time."""
        if reason == "nonfinite":
            self._end()
            return
        if not reason:
            self._losses.append(step.loss)
        for start in self._starts[:-1]:
            start.file.unlink()
        self._starts = self._starts[-1:]
        if self._is_due(step):
            self.save()
            self._check_size(self._starts[-1])

    def _judge(self, loss: float) -> str:
        if not math.isfinite(loss):
            return "nonfinite"
        return "spike" if is_spike(loss, self._losses, self._spike) else ""

    def _is_due(self, step: Step) -> bool:
        start = self._starts[-1]
        # With room for one more step as large as this one.
        nbytes = start.nbytes + start.kept_bytes + step.nbytes
        if nbytes > self._most:
            return True
        if self._every is not None:
            return self.steps % self._every == 0
        return time.perf_counter() >= self._next

    def _write(self, reason: str) -> None:
        start = self._starts[0]
        self._check_size(start)
        found = Recording(
            reason,
            self._spike,
            start.earlier,
            tuple(start.kept),
            start.random,
            machine.facts(),
        )
        recording_files.write(self.path, start.file, found)
        self.reason = reason
        _LOGGER.warning(
            "The loss of step %d is %g. Recorded in %s. See where it began: "
            "keras-policy-ext replay %s",
            *(self.steps, start.kept[-1].loss, self.path, self.path),
        )


@dataclasses.dataclass
class _Start:
    """A saved model, with which a recording can begin.

    Attributes:
        file: Its file.
        random: The random state then.
        earlier: The last losses before.
        nbytes: The bytes in the file of a recording but for the steps.
        kept: The steps since.
        kept_bytes: The bytes of them.
    """

    file: pathlib.Path
    random: RandomState
    earlier: tuple[float, ...]
    nbytes: int
    kept: list[Step] = dataclasses.field(default_factory=list)
    kept_bytes: int = 0

    def keep(self, step: Step) -> None:
        """Append a step."""
        self.kept.append(step)
        self.kept_bytes += step.nbytes


def is_spike(
    loss: float, earlier: Iterable[float], factor: float | None
) -> bool:
    """Return whether a loss is `factor` times the median of earlier ones.

    With fewer than 8 earlier ones it is not. Of losses below 0 the distance
    from the median counts, in magnitudes of the median.
    """
    known = list(earlier)
    if factor is None or len(known) < _FEWEST:
        return False
    median = statistics.median(known)
    return loss - median > (factor - 1) * abs(median)


def record(
    model: keras.Model,
    path: str | pathlib.Path,
    *,
    every: int | None = None,
    share: float = 0.02,
    spike: float | None = 3.0,
    max_bytes: int = 4 * 2**30,
) -> Recorder:
    """Record the steps before a loss that is not finite, or that jumps.

    ```python
    recorder = kpe.record(model, "crash.zip")
    for x, y in batches:
        logs = model.train_on_batch(x, y, return_dict=True)
        recorder.step((x, y), logs["loss"])
    ```

    Now and then the model is saved into a folder beside `path`, with its
    optimizer, its float8 states and its random seeds. The batches since are
    kept in the memory of the host. If a loss is bad, both go to the file, and
    `replay` computes the steps again. Training does not change.

    Args:
        model: A built and compiled model, in float8 or not. Its steps are to
            be those of `train_on_batch`, which `replay` takes.
        path: The `.zip` file to write.
        every: Save the model after so many steps. None: as often as saving
            takes no more than `share` of the time. It is also saved when the
            batches since would be too large.
        share: The share of the time, between 0 and 1.
        spike: Also write the file if a loss is so many times the median of the
            last 32. Of spikes only the first is written, and a loss that is
            not finite replaces it. None for no spikes.
        max_bytes: The most bytes of the file, and of the batches in memory.
            The folder has as many, at times twice as many.

    Returns:
        A `Recorder`: call `step` after each step, with the batch and the loss.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the model is not built or not compiled, or cannot be
            saved, or is larger than `max_bytes`; if `path` exists or is no
            `.zip` file in a folder that exists; if a number is out of range.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> recorder = kpe.record(model, "crash.zip")
        >>> x, y = np.ones((4, 8)), np.full((4, 4), np.nan)
        >>> recorder.step((x, y), model.train_on_batch(x, y))
        True
        >>> recorder.reason
        'nonfinite'
    """
    check_convertible(model, "can be recorded")
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"{model.name!r} cannot be recorded. Received: "
            f"{type(model).__name__}, not compiled. Allowed: a model "
            "with a loss and an optimizer, so that its steps can be computed "
            "again. Call model.compile with those of your loop."
        )
    output = check(path, every, share, spike)
    return Recorder(model, output, every, share, spike, max_bytes)


def check(
    path: str | pathlib.Path,
    every: int | None = None,
    share: float = 0.02,
    spike: float | None = 3.0,
    max_bytes: int = 0,
) -> pathlib.Path:
    """Check arguments of `record`; return the absolute path of the file."""
    output = pathlib.Path(path).absolute()
    if output.suffix != ".zip" or not output.parent.is_dir() or output.exists():
        raise ValueError(
            f"`path` is no place for a recording. Received: {str(path)!r}. "
            "Allowed: a new .zip file in a folder that exists. An earlier "
            "recording is not overwritten: move it, or pass another path."
        )
    check_sampling(every, share)
    if spike is not None and not spike > 1:
        raise ValueError(
            f"`spike` is not a factor. Received: {spike!r}. Allowed: a number "
            "> 1, or None for losses that are not finite alone."
        )
    return output
