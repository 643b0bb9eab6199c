"""`watch`: what float8 does to the operands of a model over its steps."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _user_code
from keras_policy_ext.conversion import candidates
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.diagnostics.captured import (
    Batch,
    Loss,
    Use,
    by_kernel,
    captured,
    note_of,
)
from keras_policy_ext.diagnostics.figures import Figures, measured, total
from keras_policy_ext.diagnostics.page import line_plot, page, shade
from keras_policy_ext.diagnostics.rules import (
    Around,
    Rules,
    Seen,
    Thresholds,
    WatchWarning,
)
from keras_policy_ext.numerics.scale_sources import Amax
from keras_policy_ext.policies.of_layers import layers_in_float8
from keras_policy_ext.recipes import (
    OPERANDS,
    Quantization,
    Recipe,
    matmuls_of,
)

FIGURES = (
    "amax",
    "scale",
    "saturated_fraction",
    "underflow_fraction",
    "zero_fraction",
    "sqnr_db",
    "kurtosis",
    "nonfinite",
)
KEYS = ("layer", "kernel", "operand")
MOST = 64
"""Samples in memory. With 100 layers they take 0.6 MB."""
MOST_WARNINGS = 1000


class Watch:
    """The figures of a model's float8 operands over its steps; see `watch`.

    Attributes:
        model: The model.
        steps: The number of steps so far.
        unexamined: The paths of float8 layers without figures in the last
            sample, with the reasons.
        warnings: What went wrong in samples, from when it began; the newest
            1000.
        rules: What judges the samples.
        judged_as: Recipes by the `id` of a layer, by which the rules judge it
            in place of its own one.
        uses: The uses of the kernels in the last sample.
    """

    def __init__(
        self,
        model: keras.Layer,
        every: int | None,
        share: float,
        loss: Loss | None,
        path: str | pathlib.Path | None,
        thresholds: Thresholds | None = None,
    ):
        self.steps = 0
        self.warnings: list[WatchWarning] = []
        self.rules = Rules(thresholds or Thresholds())
        self.judged_as: dict[int, Recipe] = {}
        self.uses: list[list[Use]] = []
        self.unexamined: dict[str, str] = {}
        self.model, self._every, self._share = model, every, share
        self._loss = loss
        self._path = None if path is None else pathlib.Path(path)
        self._seen: list[Seen] = []
        self._samples: dict[int, Any] = {}
        self._names: dict[tuple[str, ...], None] = {}
        self._last: tuple[int, Any, list[str]] | None = None
        self._taken, self._stride, self._next = 0, 1, 0.0

    def step(self, data: Any) -> bool:
        """Count a step; take a sample if it is time for one.

        Args:
            data: A batch, as for `what_if`.

        Returns:
            Whether a sample was taken.
        """
        self.steps += 1
        if self._every is not None:
            is_due = (self.steps - 1) % self._every == 0
        else:
            is_due = time.perf_counter() >= self._next
        if is_due:
            self._take(data)
        return is_due

    def _take(self, data: Any) -> None:
        batch = Batch.read(data)
        if self._every is None and not self._taken:
            self._measure(batch)  # Compiles, which later samples do not.
        start = time.perf_counter()
        rows = self._measure(batch)
        numbers = np.full((len(self._names), len(FIGURES)), np.nan, "float32")
        notes = [""] * len(self._names)
        for place, key in enumerate(self._names):
            if key in rows:
                notes[place], numbers[place] = rows[key]
        self._last = self.steps, numbers, notes
        for found in self.rules.look(self._around(batch), self._seen):
            self.warnings = [*self.warnings[-MOST_WARNINGS + 1 :], found]
            _user_code.warn(found.message)
        if self._taken % self._stride == 0:
            self._samples[self.steps] = numbers, notes
        self._taken += 1
        if len(self._samples) > MOST:
            self._stride *= 2
            self._samples = dict(list(self._samples.items())[::2])
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                for row in self._rows(self.steps, numbers, notes):
                    file.write(json.dumps(row) + "\n")
        end = time.perf_counter()
        self._next = end + (end - start) / self._share

    def _measure(
        self, batch: Batch
    ) -> dict[tuple[str, ...], tuple[str, list[float]]]:
        """Return note and figures by layer, kernel, operand, of one step."""
        model: Any = self.model
        is_jax = keras.backend.backend() == "jax"
        if is_jax and isinstance(model, keras.Model):
            # In `fit` the trainer holds the values of variables.
            model.jax_state_sync()
        found = captured(self.model, batch, self._loss)
        self.unexamined = found.unexamined
        rows: dict[tuple[str, ...], tuple[str, list[float]]] = {}
        self.uses, self._seen = by_kernel(found.uses), []
        for uses in self.uses:
            own = self.judged_as.get(id(uses[0].layer))
            for operand in OPERANDS:
                asked, parts = _figures(uses, operand)
                figures = total(parts)
                layer = path_of(uses[0].layer)
                key = layer, uses[0].kernel.name, operand
                self._names.setdefault(key)
                note = note_of(uses[0], operand, figures)
                values = (getattr(figures, name) for name in FIGURES)
                numbers = [math.nan if x is None else x for x in values]
                rows[key] = note, numbers
                if own is not None:
                    asked, parts = _figures(uses, operand, own)
                self._seen.append(Seen(*key, parts, asked))
        return rows

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

    def _rows(
        self, step: int, numbers: Any, notes: list[str]
    ) -> list[dict[str, Any]]:
        rows = []
        for key, note, row in zip(self._names, notes, numbers, strict=False):
            values = (None if np.isnan(x) else float(x) for x in row)
            figures = dict(zip(FIGURES, values, strict=True))
            names = dict(zip(KEYS, key, strict=True))
            rows.append({"step": step, **names, **figures, "note": note})
        return rows

    @property
    def history(self) -> list[dict[str, Any]]:
        """A dict for each operand of each sample in memory.

        It has the step, from 1, the layer, kernel and operand, the figures and
        a note; None is a figure without a value. Of more than 64 samples every
        second one is dropped.
        """
        samples = self._samples.items()
        return [row for step, it in samples for row in self._rows(step, *it)]

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
            if self._last is not None:
                column = self._last[1][:, FIGURES.index(name)]
                known = column[~np.isnan(column)]
                if known.size:
                    found[f"float8_{name}"] = float(worst(known))
        return found

    def page(self) -> str:
        """Return one HTML page with figures and plots, without a network."""
        if self._last is None:
            return page("Float8 over steps", "<p>No sample was taken.</p>")
        heads = (*KEYS, *FIGURES, "SQNR over steps", "log10 amax", "note")
        lines = []
        for place, row in enumerate(self._rows(*self._last)):
            cells = "".join(_cell(name, row[name]) for name in FIGURES)
            plots = "".join(
                f"<td>{line_plot(self._curve(place, name))}</td>"
                for name in ("sqnr_db", "amax")
            )
            names = "".join(f"<th>{html.escape(row[k])}</th>" for k in KEYS)
            note = html.escape(row["note"])
            lines.append(f"<tr>{names}{cells}{plots}<td>{note}</td></tr>")
        head = "".join(f"<th>{each.replace('_', ' ')}</th>" for each in heads)
        notes = "".join(
            f"<p>{html.escape(f'{path}: {why}')}</p>"
            for path, why in self.unexamined.items()
        )
        body = (
            f"<p>Step {self._last[0]}; {len(self._samples)} samples.</p>"
            f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>"
            f"{''.join(lines)}</tbody></table></div>{notes}"
        )
        return page("Float8 over steps", body)

    def _curve(self, place: int, name: str) -> list[tuple[float, float]]:
        points = []
        for step, (numbers, _) in self._samples.items():
            if place < len(numbers):
                value = float(numbers[place, FIGURES.index(name)])
                if name == "amax":
                    value = math.log10(value) if value > 0 else math.nan
                if math.isfinite(value):
                    points.append((float(step), value))
        return points


def _cell(name: str, value: float | None) -> str:
    style = shade(value) if name == "sqnr_db" else ""
    text = "–" if value is None else f"{value:.3g}"
    return f'<td style="{style}">{text}</td>'


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
    uses: Sequence[Use], operand: str, recipe: Recipe | None = None
) -> tuple[Quantization | None, list[Figures]]:
    """Return how an operand is quantized, and its figures in each use.

    Args:
        uses: The uses of a kernel.
        operand: The operand.
        recipe: A recipe; None for that of the layer.
    """
    found: list[Figures] = []
    quantization = None
    for use in uses[:1] if operand == "kernel" else uses:
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
            known = plan.source.history_scales(*state) if state else None
            amax = Amax(ops.cast(x, "float32"), wanted=False)
            scale = plan.source.scale(operand, quantization, amax, known)
        how = plan.contraction, operand, matmul, quantization
        numbers = measured(*how, x, scale)
        found.append(Figures.read(ops.convert_to_numpy(numbers)))
    return quantization, found


def watch(
    model: keras.Layer,
    *,
    every: int | None = None,
    share: float = 0.02,
    loss: Loss | None = None,
    path: str | pathlib.Path | None = None,
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
        path: A file to append the dicts of each sample to, as JSON lines;
            None for no file.
        thresholds: When to warn; None for `kpe.callbacks.Thresholds()`.

    Returns:
        A `Watch`: call `step` with each batch.

    Raises:
        TypeError: If `model` is not a Keras model or layer.
        ValueError: If the model is not built or has no layer in float8, or
            `every` or `share` is out of range.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> report = kpe.convert(model, "current")
        >>> watch = kpe.watch(model, every=10)
        >>> watch.step(np.ones((4, 8)))
        True
        >>> [row["operand"] for row in watch.history]
        ['inputs', 'kernel', 'outputs_grad']
    """
    candidates.check(model)
    if not layers_in_float8(model):
        raise ValueError(
            f"{model.name!r} has nothing to watch. Received: a model without "
            "layers in float8. Allowed: one that has some. Call "
            "keras_policy_ext.convert first, or keras_policy_ext.what_if."
        )
    if every is not None and every < 1:
        raise ValueError(
            f"`every` is not a number of steps. Received: {every!r}. Allowed: "
            "an integer >= 1, or None. Leave it out to sample by time."
        )
    if not 0 < share < 1:
        raise ValueError(
            f"`share` is not a share of the time. Received: {share!r}. "
            "Allowed: a number between 0 and 1, such as 0.02."
        )
    return Watch(model, every, share, loss, path, thresholds)
