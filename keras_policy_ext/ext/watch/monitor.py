"""`watch`: what float8 does to the operands of a model over its steps."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import user_code
from keras_policy_ext.conversion.candidates import check as check_convertible
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.ext.sampling.captured import (
    SQUARES,
    Batch,
    Loss,
    NoBatchLeft,
    Product,
    Use,
    by_kernel,
    captured,
    check_loss,
    differing,
    note_of,
    synchronize,
)
from keras_policy_ext.ext.sampling.figures import Figures, measured, total
from keras_policy_ext.ext.sampling.samples import (
    FIGURES,
    Key,
    Measured,
    Samples,
    check_count,
    check_sampling,
    named,
)
from keras_policy_ext.ext.watch.rules import (
    Around,
    Rules,
    Seen,
    Thresholds,
    WatchWarning,
)
from keras_policy_ext.ext.watch.run_files import EventFile, RowFile
from keras_policy_ext.ext.watch.run_report import RunReport
from keras_policy_ext.numerics.scale_sources import Amax
from keras_policy_ext.policies.of_layers import layers_in_float8
from keras_policy_ext.recipes import OPERANDS, Quantization, Recipe, matmuls_of

MOST_WARNINGS = 1000


class Watch:
    """The figures of a model's float8 operands over its steps; see `watch`.

    Attributes:
        model: The model.
        steps: The number of steps so far.
        warnings: What went wrong in samples, from when it began; the newest
            1000.
        rules: What judges the samples.
        judged_as: Recipes by the `id` of a layer, by which the rules judge it
            in place of its own one.
        uses: The uses of the kernels in the last sample.
        labels: The names of layers in figures, by the `id` of a layer: its
            path; of several layers with one path all but the first have a
            number too.
        is_of_training: Whether the batches of `step` are those of training.
            If not, gradients count as large as training steps have observed
            them: the mean of a loss over fewer examples has larger ones.
    """

    is_of_training = True

    def __init__(
        self,
        model: keras.Layer,
        every: int | None,
        share: float,
        loss: Loss | None,
        path: str | pathlib.Path | None,
        log_dir: str | pathlib.Path | None,
        thresholds: Thresholds | None = None,
    ):
        check_sampling(every, share)
        check_loss(loss)
        if thresholds is not None and not isinstance(thresholds, Thresholds):
            raise TypeError(
                f"`thresholds` has the wrong type. Received: {thresholds!r} "
                f"(of type {type(thresholds).__name__}). Allowed: "
                "keras_policy_ext.callbacks.Thresholds(...), or None."
            )
        self.steps = 0
        self.warnings: list[WatchWarning] = []
        self.rules = Rules(thresholds or Thresholds())
        self.judged_as: dict[int, Recipe] = {}
        self.uses: list[list[Use]] = []
        self.labels: dict[int, str] = {}
        self._seen: list[Seen] = []
        self._sizes: dict[tuple[str, str], float] = {}
        self._has_ended = False
        self.model, self._every, self._share = model, every, share
        self._loss, self._kind = loss, ""
        self._files: list[RowFile | EventFile] = []
        if path is not None:
            self._files.append(RowFile(path))
        if log_dir is not None:
            self._files.append(EventFile(log_dir))
        self._samples = Samples()
        self._next = 0.0
        self._due = -1  # the number of the sample that was due last, from 0

    def step(self, data: Any, steps: int = 1) -> bool:
        """Count steps; take a sample if it is time for one.

        Args:
            data: A batch, as for `what_if`.
            steps: The number of training steps since the call before, an
                integer >= 1, such as those of one execution.

        Returns:
            Whether a sample was taken.

        Raises:
            ValueError: If `steps` is no such number.
        """
        check_count("steps", steps, "steps", 1)
        self.steps += steps
        if self._every is not None:
            due = (self.steps - 1) // self._every
            is_due, self._due = due != self._due, due
        else:
            is_due = time.perf_counter() >= self._next
        if not is_due or self._has_ended:
            return False
        try:
            self._take(data)
        except NoBatchLeft as error:
            if self.is_of_training:
                raise
            self._has_ended = True  # The training goes on.
            user_code.warn(
                f"No more samples from step {self.steps} on. {error}"
            )
        return not self._has_ended

    def _take(self, data: Any) -> None:
        start = time.perf_counter()
        batch = Batch.read(data)
        if self._every is None and not self._samples:
            self._measure(batch)  # Compiles, which later samples do not.
            start = time.perf_counter()
        sample = self._measure(batch)
        if self._kind == SQUARES and not self._samples:
            user_code.warn(
                f"The loss of {self.model.name!r} is not known. The gradients "
                f"in samples are those of {SQUARES}, and warnings about "
                "gradients may be wrong. Compile the model with its loss, or "
                "pass `loss=`, a function f(y, outputs)."
            )
        self._samples.add(self.steps, *sample)
        for found in self.rules.look(self._around(batch), self._seen):
            self.warnings = [*self.warnings[-MOST_WARNINGS + 1 :], found]
            user_code.warn(found.message)
        for file in tuple(self._files):
            try:
                file.append(self._samples.last_of_layers())
            except OSError as error:  # The training goes on.
                self._files.remove(file)
                user_code.warn(
                    f"The samples from step {self.steps} on are in no file: "
                    f"{error}. Make room, or pass another path to a new watch."
                )
        end = time.perf_counter()
        self._next = end + (end - start) / self._share

    def _measure(
        self, batch: Batch
    ) -> tuple[dict[Key, Measured], dict[str, str]]:
        """Return figures by layer, kernel, operand; and unexamined layers."""
        synchronize(self.model)
        found = captured(self.model, batch, self._loss)
        self._kind, self.labels = found.loss, _labels(self.model)
        steps = self.steps - (self._samples.last_step or 0)
        rows: dict[Key, Measured] = {}
        self.uses, self._seen = by_kernel(found.uses), []
        for uses in self.uses:
            first = uses[0]
            layer = self.labels.get(id(first.layer), path_of(first.layer))
            name = first.kernel.name
            peaks = _peaks(first, steps)
            own = self.judged_as.get(id(first.layer))
            last = self._resize_gradients(uses, (layer, name))
            for operand in OPERANDS:
                known = last if operand == "outputs_grad" else None
                asked, parts = _figures(uses, operand, given=known)
                figures = total(parts)
                values = [
                    peaks.get(operand)
                    if n == "peak_amax"
                    else getattr(figures, n)
                    for n in FIGURES
                ]
                rows[layer, name, operand] = Measured(
                    [math.nan if x is None else x for x in values],
                    len(uses),
                    note_of(uses, operand, figures),
                )
                # The rules for kernels are for weights.
                if operand != "kernel" or not isinstance(first.kernel, Product):
                    if own is not None:
                        asked, parts = _figures(uses, operand, own)
                    self._seen.append(Seen(layer, name, operand, parts, asked))
        return rows, found.unexamined

    def _resize_gradients(
        self, uses: list[Use], key: tuple[str, str]
    ) -> float | None:
        """Resize output gradients as in the last step; return its scale."""
        found = [x.outputs_grad for x in uses if x.outputs_grad is not None]
        found = [x for x in found if 0 not in x.shape]
        if self.is_of_training or not (uses[0].state and found):
            return None
        layer: Any = uses[0].layer
        observed = _observed(layer.float8_state.of(uses[0].kernel), 1)
        if "outputs_grad" not in observed:
            return None
        scale, newest = (float(x.max()) for x in observed["outputs_grad"])
        amax = max(float(ops.max(ops.abs(x))) for x in found)
        is_out = id(layer) in self.judged_as
        # A recipe without histories finds its scales in what it is given. A
        # layer that has left float8 keeps the factor from before.
        if newest and amax and math.isfinite(amax) and not is_out:
            self._sizes[key] = newest / amax
        for use in uses:
            if use.outputs_grad is not None:
                use.outputs_grad = use.outputs_grad * self._sizes.get(key, 1.0)
        return scale if scale and key in self._sizes and not is_out else None

    def _around(self, batch: Batch) -> Around:
        """Return what the rules know of a sample beside the figures."""
        optimizer = getattr(self.model, "optimizer", None)
        leaves = keras.tree.flatten((batch.x, batch.y, batch.sample_weight))
        return Around(
            self.steps,
            all(map(_is_finite, leaves)),
            _number(optimizer, "learning_rate", math.nan),
            _loss_scale(optimizer),
        )

    @property
    def taken(self) -> int:
        """The number of samples so far."""
        return len(self._samples)

    @property
    def unexamined(self) -> dict[str, str]:
        """The float8 layers without figures in the last sample, and why."""
        return self._samples.unexamined

    @property
    def history(self) -> list[dict[str, Any]]:
        """A dict for each operand of each sample in memory.

        It has the step, from 1, the layer, kernel and operand, the figures,
        the number of uses and a note; None is a figure without a value. Of
        more than 64 samples every second one is dropped.
        """
        return self._samples.history()

    def amaxes(self) -> list[dict[str, Any]]:
        """Return the amax of each operand in each of the last steps.

        Delayed scaling observes them in the training step itself, and its
        states keep the last ones: 1024 by default. So they cost no pass, and
        each step has them. Other recipes remember none.

        Returns:
            A dict for each operand of each kernel with a history: `layer`,
            `kernel`, `operand`; `scale`, float, which the last step used, 0
            before there is one; `amaxes`, a list of floats, the newest last,
            at most one for each step that was counted.
        """
        synchronize(self.model)
        found, labels = [], _labels(self.model)
        for layer in layers_in_float8(self.model):
            for kernel in layer.float8_contracted:
                known = _observed(layer.float8_state.of(kernel), self.steps)
                for operand, (scale, amaxes) in known.items():
                    names = named(labels[id(layer)], kernel.name, operand)
                    observed = np.trim_zeros(amaxes, "b")[::-1].tolist()
                    numbers = {"scale": float(scale), "amaxes": observed}
                    found.append({**names, **numbers})
        return found

    def logs(self) -> dict[str, float]:
        """Return the worst figures of the last sample, for logs.

        The lowest `float8_sqnr_db`, and the largest
        `float8_saturated_fraction` and `float8_underflow_fraction`; {} before
        the first sample.
        """
        found = {}
        for name, worst in (
            ("sqnr_db", np.min),
            ("saturated_fraction", np.max),
            ("underflow_fraction", np.max),
        ):
            known = self._samples.column(name)
            if known.size:
                found[f"float8_{name}"] = float(worst(known))
        return found

    def report(self) -> RunReport:
        """Return the figures of the run as a table; see `RunReport`."""
        return RunReport(self._samples)

    def page(self) -> str:
        """Return one HTML page with figures and plots, without a network."""
        return self.report().page()


def _labels(model: keras.Layer) -> dict[int, str]:
    """Return names of float8 layers by their `id`; see `Watch`."""
    found: dict[int, str] = {}
    numbers: collections.Counter[str] = collections.Counter()
    for layer in layers_in_float8(model):
        path = path_of(layer)
        numbers[path] += 1
        more = f" ({numbers[path]})" if numbers[path] > 1 else ""
        found[id(layer)] = path + more
    return found


def _peaks(use: Use, steps: int) -> dict[str, float]:
    """Return the largest amax of the last training steps, by operand."""
    layer: Any = use.layer
    if not use.state:
        return {}
    observed = _observed(layer.float8_state.of(use.kernel), steps)
    found = {name: float(x[:steps].max()) for name, (_, x) in observed.items()}
    return {name: peak for name, peak in found.items() if peak}


def _observed(state: Any, steps: int) -> dict[str, tuple[Any, np.ndarray]]:
    """Return scale and amaxes of the last steps, newest first, by operand."""
    known = {} if state is None else state.rows()
    return {name: (scale, x[:steps]) for name, (scale, x) in known.items()}


def _is_finite(x: Any) -> bool:
    if x is None or not keras.backend.is_float_dtype(x.dtype):
        return True
    return bool(ops.all(ops.isfinite(x)))


def _loss_scale(optimizer: Any) -> float:
    first = getattr(optimizer, "initial_scale", 1.0)  # until it is built
    return _number(optimizer, "dynamic_scale", float(first))


def _number(thing: Any, name: str, default: float) -> float:
    value = getattr(thing, name, None)
    return default if value is None else float(ops.convert_to_numpy(value))


def _figures(
    uses: Sequence[Use],
    operand: str,
    recipe: Recipe | None = None,
    given: float | None = None,
) -> tuple[Quantization | None, list[Figures]]:
    """Return how an operand is quantized, and its figures in each use."""
    # By `recipe` or the layer's own; with the scale `given` or the recipe's.
    found: list[Figures] = []
    quantization = None
    for use in differing(uses, operand):
        plan, x = use.plan, use.operand(operand)
        if recipe is not None:
            plan = dataclasses.replace(plan, recipe=recipe)
        if x is None or 0 in x.shape:
            continue
        asked = {
            m: plan.operands.quantizations[operand, m]
            for m in matmuls_of(operand)
        }
        matmul = next((m for m in asked if asked[m]), matmuls_of(operand)[0])
        quantization, scale = asked[matmul], None
        if quantization is not None:
            state = use.state
            known = plan.source.read(*state) if state else None
            wanted = plan.source.observes_amaxes
            amax = Amax(ops.cast(x, "float32"), wanted)
            scale = plan.source.scale(operand, quantization, amax, known)
            if given is not None and len(scale.shape) == 0:
                scale = ops.convert_to_tensor(given, "float32")
        how = plan.contraction, operand, matmul, quantization
        numbers = measured(*how, x, scale)
        found.append(Figures.read(ops.convert_to_numpy(numbers)))
    return quantization, found


def watch(
    model: keras.Layer,
    *,
    every: int | None = None,
    share: float = 0.015,
    loss: Loss | None = None,
    path: str | pathlib.Path | None = None,
    log_dir: str | pathlib.Path | None = None,
    thresholds: Thresholds | None = None,
) -> Watch:
    """Follow what float8 does to each layer, in a training loop of your own.

    ```python
    watch = kpe.watch(model)
    for x, y in batches:
        train_step(x, y)
        watch.step((x, y))
    pathlib.Path("watch.html").write_text(watch.page())
    ```

    A sample is one more forward and backward pass over the batch, outside of
    the training step, with the states and scales of the model at that time. It
    changes neither the model nor its compiled step.

    Args:
        model: A built model with layers in float8.
        every: Take a sample at the first of so many steps. None: as often as
            samples take no more than `share` of the time.
        share: The share of the time, between 0 and 1. The first sample, which
            compiles, is not counted.
        loss: As for `what_if`.
        path: A file to append the dicts of each sample to: JSON lines if it
            ends with `.jsonl`, or `.csv`; None for no file. The command
            `keras-policy-ext report` makes a page of it.
        log_dir: A folder for an event file of TensorBoard, which has to be
            installed; None for none.
        thresholds: When to warn; None for `kpe.callbacks.Thresholds()`.

    Returns:
        A `Watch`: call `step` with each batch.

    Raises:
        TypeError: If `model` is not a Keras model or layer, or `loss` or
            `thresholds` has the wrong type.
        ValueError: If the model is not built or has no layer in float8, or
            `every` or `share` is out of range, or `path` has another suffix.
        ImportError: If `log_dir` is given and TensorBoard is not installed.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> report = kpe.convert(model, "current")
        >>> watch = kpe.watch(model, every=10)
        >>> watch.step((np.ones((4, 8)), np.ones((4, 4))))
        True
        >>> [row["operand"] for row in watch.history]
        ['inputs', 'kernel', 'outputs_grad']
    """
    check_convertible(model, "can be watched")
    if not layers_in_float8(model):
        raise ValueError(
            f"{model.name!r} has nothing to watch. Received: a model without "
            "layers in float8. Allowed: one that has some. Call "
            "keras_policy_ext.convert first, or keras_policy_ext.what_if."
        )
    return Watch(model, every, share, loss, path, log_dir, thresholds)
