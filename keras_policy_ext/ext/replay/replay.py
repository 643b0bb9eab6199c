"""`replay`: compute the steps of a recording again, and under other recipes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext import backends
from keras_policy_ext.conversion import convert, revert
from keras_policy_ext.conversion.candidates import survey
from keras_policy_ext.conversion.in_place import converted
from keras_policy_ext.ext.replay import recording_files
from keras_policy_ext.ext.replay._keras import compiled_as_saved
from keras_policy_ext.ext.replay.flight_recorder import is_spike
from keras_policy_ext.ext.replay.recording_files import (
    RandomState,
    Recording,
    Step,
)
from keras_policy_ext.ext.sampling import machine
from keras_policy_ext.ext.sampling.captured import as_tensor
from keras_policy_ext.ext.sampling.recipes_compared import (
    NOTHING_ROUNDED,
    read_recipes,
)
from keras_policy_ext.ext.sampling.symbolic_batches import map_arrays
from keras_policy_ext.ext.watch.monitor import Watch
from keras_policy_ext.ext.watch.rules import WORDS, WatchWarning
from keras_policy_ext.policies.of_layers import is_frozen, layers_in_float8
from keras_policy_ext.recipes import Recipe
from keras_policy_ext.reports import BaseReport, Column, Table, counted
from keras_policy_ext.saving import load_model

AS_RECORDED, WITHOUT = "as recorded", "without float8"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The last steps of a recording, under a recipe.

    Attributes:
        recipe: The recipe, as in the names of policies; or `"as recorded"`,
            or `"without float8"`.
        losses: The losses of these steps, to the first that is not finite.
        survived: Whether all are finite, and the last one is no spike.
    """

    recipe: str
    losses: tuple[float, ...]
    survived: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Replay(BaseReport):
    """The result of `replay`. `print` it for a report on one screen.

    Attributes:
        recording: What the file has.
        versions: The backend, the device and the versions of this process.
        losses: The losses of the steps here.
        warnings: What went wrong in the operands of float8 layers in the last
            steps; numbers of steps are those of the recording.
        origin: Where it began: the first operand with values that are not
            finite; for a spike, the first warning of the bad step, else the
            first warning. None if there is none.
        trials: The last steps as recorded, without float8, and under each
            recipe.
        has_seeds: Whether the model has as many seed generators as the file,
            so that their states were restored.
    """

    recording: Recording
    versions: dict[str, str]
    losses: tuple[float, ...]
    warnings: tuple[WatchWarning, ...]
    origin: WatchWarning | None
    trials: tuple[Trial, ...]
    has_seeds: bool

    _every = "Every step: report.table(full=True)"

    @property
    def survivors(self) -> tuple[str, ...]:
        """The recipes that would have survived."""
        return tuple(
            trial.recipe
            for trial in self.trials
            if trial.survived and trial.recipe != AS_RECORDED
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON types; losses that are not finite are texts."""
        steps = zip(self.recording.steps, self.losses, strict=True)
        origin = self.origin
        return {
            "reason": self.recording.reason,
            "recorded_by": self.recording.versions,
            "replayed_by": self.versions,
            "steps": [
                {
                    "step": step.number,
                    "recorded": _json(step.loss),
                    "loss": _json(loss),
                }
                for step, loss in steps
            ],
            "origin": None if origin is None else origin.as_dict(),
            "warnings": [each.as_dict() for each in self.warnings],
            "trials": [
                {
                    "recipe": trial.recipe,
                    "losses": [_json(x) for x in trial.losses],
                    "survived": trial.survived,
                }
                for trial in self.trials
            ],
            "has_seeds": self.has_seeds,
        }

    def _count(self) -> int:
        return len(self.losses)

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        last = self.recording.steps[-1]
        what = "is not finite"
        if self.recording.reason == "spike":
            what = "is a spike"
        yield (
            f"The loss of step {last.number} {what}: {last.loss:.6g}. Recorded "
            f"with {_named(self.recording.versions)}; replayed with "
            f"{_named(self.versions)}."
        )
        yield self._agreement()
        yield self._began()
        number = min(number, 4)
        shown = list(zip(self.recording.steps, self.losses, strict=True))
        shown = shown if full else shown[-number:]
        yield Table(
            [
                Column("step", right=True),
                Column("recorded loss", right=True),
                Column("loss here", right=True),
            ],
            [
                (str(step.number), f"{step.loss:.6g}", f"{loss:.6g}")
                for step, loss in shown
            ],
        )
        if self.trials:
            yield self._of_trials()
            names = ", ".join(self.survivors) or "none of them"
            yield f"Would have survived: {names}."
        for each in self.warnings if full else ():
            yield each.message
        if not self.has_seeds:
            yield (
                "The random seeds are not those of the recording: the loaded "
                "model has other seed generators than the recorded one."
            )

    def _agreement(self) -> str:
        pairs = list(zip(self.recording.steps, self.losses, strict=True))
        if all(_is_same(step.loss, loss) for step, loss in pairs):
            return "All losses are those of the recording, bit for bit."
        loss = self.losses[-1]
        if self.recording.reason == "nonfinite" and math.isfinite(loss):
            return f"It is {loss:.6g} here: it does not happen again."
        both = [x for x in pairs if math.isfinite(x[0].loss + x[1])]
        differences = [abs(x - s.loss) / (abs(s.loss) or 1) for s, x in both]
        most = max(differences, default=0.0)
        return f"Losses differ from the recorded ones by at most {most:.2g}."

    def _began(self) -> str:
        origin = self.origin
        if origin is None:
            return (
                "No operand of a layer that can be in float8 shows where it "
                "began: look at the loss, at other layers and at the batch. "
                "Frozen layers have no figures."
            )
        return (
            f"It began at step {origin.since}, layer {origin.layer!r}, "
            f"{WORDS[origin.operand]} ({origin.sign}). {origin.message}"
        )

    def _of_trials(self) -> Table:
        steps = counted(len(self.trials[0].losses), "step")
        return Table(
            [
                Column("recipe", wraps=True),
                Column("last loss", right=True),
                Column("survived"),
            ],
            [
                (
                    trial.recipe,
                    f"{trial.losses[-1]:.6g}",
                    "yes" if trial.survived else "no",
                )
                for trial in self.trials
            ],
            f"The last {steps} under each recipe",
        )


def _json(loss: float) -> float | str:
    return loss if math.isfinite(loss) else str(loss)


def _named(versions: dict[str, str]) -> str:
    backend = versions.get("backend", "?")
    return f"{backend} {versions.get(backend, '')}".rstrip()


def _is_same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def replay(
    path: str | pathlib.Path,
    *,
    steps: int = 10,
    recipes: Sequence[Recipe | str] | Recipe | str | None = None,
    custom_objects: dict[str, object] | None = None,
    safe_mode: bool = True,
) -> Replay:
    """Compute the steps of a recording again, and say where it began.

    The steps are taken by `train_on_batch`, from the model, the optimizer, the
    states and the random seeds in the file. Before each of the last steps, the
    operands of all layers that can be in float8 are judged by the rules of
    `watch`. Then the last steps are taken without float8 and under each
    recipe. On the backend of the recording the losses are the recorded ones;
    on another one sums round otherwise, and dropout drops other values.

    Args:
        path: What `record` or `kpe.callbacks.FlightRecorder` wrote.
        steps: The number of last steps that are judged, and taken under each
            recipe.
        recipes: Recipes, or their names; None for all names, `[]` for none.
        custom_objects: As for `load_model`.
        safe_mode: As for `load_model`; False for a model of yours with a
            `Lambda` layer, whose code is run.

    Returns:
        A report: `origin`, `survivors`, `losses`, `trials`.

    Raises:
        ValueError: If the file is damaged or of a newer version, a class of
            the model is not known, there is no such recipe, or `steps` is
            below 1.
        OSError: If there is no such file.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> recorder = kpe.record(model, "nan.zip")
        >>> batch = np.full((4, 8), np.nan), np.ones((4, 4))
        >>> recorder.step(batch, model.train_on_batch(*batch))
        True
        >>> report = kpe.replay("nan.zip", recipes="current")
        >>> report.origin.operand, report.survivors
        ('inputs', ())
    """
    if steps < 1:
        raise ValueError(
            f"`steps` is not a number of steps. Received: {steps!r}. Allowed: "
            "an integer >= 1. Leave it out for 10."
        )
    is_none = isinstance(recipes, (list, tuple)) and not recipes
    wanted = [] if is_none else read_recipes(recipes)
    with (
        tempfile.TemporaryDirectory() as name,
        backends.current.unchanged_random_state(),
        compiled_as_saved(),
    ):
        folder = pathlib.Path(name)
        recording = recording_files.read(pathlib.Path(path), folder)
        load = functools.partial(
            load_model, custom_objects=custom_objects, safe_mode=safe_mode
        )
        model = load(folder / recording_files.MODEL)
        was = recording.versions.get("backend")
        is_same = was == keras.backend.backend()
        known = recording.random.restore(model, is_same)
        last = recording.steps[-steps:]
        start = folder / "start.keras"
        losses = [_train(model, x) for x in recording.steps[: -len(last)]]
        model.save(start)
        random = RandomState.of(model)
        own, judge = _judged(model, last)
        losses += own
        trials = []
        if wanted:
            earlier = [*recording.earlier, *(x.loss for x in recording.steps)]
            limits = _Limits(recording, earlier[:-1])
            trials.append(limits.trial(AS_RECORDED, own))
            tried: list[Recipe | None] = []
            if _can_train(model):  # Frozen layers have no other recipe.
                tried = list(wanted)
            if _trained(model):
                tried.insert(0, None)
            for recipe in tried:
                model = load(start)
                random.restore(model, True)
                trials.append(limits.trial(*_under(recipe, model, last)))
    return Replay(
        recording,
        machine.facts(),
        tuple(losses),
        tuple(judge.warnings),
        _origin(recording, judge),
        tuple(trials),
        known,
    )


def _trained(model: keras.Model) -> list[keras.Layer]:
    """Return the layers in float8 that are not frozen."""
    return [x for x in layers_in_float8(model) if not is_frozen(x)]


def _can_train(model: keras.Model) -> bool:
    """Return True if a layer of the model can train in float8."""
    found = survey(model).candidates
    return any(not is_frozen(each.layer) for each in found)


def _train(model: keras.Model, step: Step) -> float:
    """Take a step of training; return the loss of its batch."""
    batch: Any = step.batch
    parts = batch if isinstance(batch, tuple) else (batch,)
    if keras.backend.backend() == "torch":
        # Keras hands arrays on as they are, and in `fit` they are tensors.
        parts = map_arrays(as_tensor, parts)
    logs: Any = model.train_on_batch(*parts, return_dict=True)
    return float(logs["loss"])


def _judged(
    model: keras.Model, steps: Sequence[Step]
) -> tuple[list[float], Watch]:
    """Take steps; return the losses, and what judged the operands before."""
    judge = Watch(model, 1, 0.5, None, None, None)
    losses = []
    for step in steps:
        judge.steps = step.number - 1
        inside: AbstractContextManager[Any] = contextlib.nullcontext()
        if _can_train(model) and not _trained(model):
            inside = converted(model, NOTHING_ROUNDED)
        with warnings.catch_warnings(), inside:
            warnings.simplefilter("ignore")  # The report has them.
            judge.step(step.batch)
        losses.append(_train(model, step))
    return losses, judge


def _origin(recording: Recording, judge: Watch) -> WatchWarning | None:
    """Return where a bad step began; see `Replay`."""
    found = [x for x in judge.warnings if x.sign == "nonfinite"]
    if recording.reason == "spike":
        found = [*judge.rules.present, *judge.warnings]
    return found[0] if found else None


def _under(
    recipe: Recipe | None, model: keras.Model, steps: Sequence[Step]
) -> tuple[str, list[float]]:
    """Take steps under a recipe, or without float8; return name and losses."""
    name = WITHOUT if recipe is None else recipe.spec or recipe.name
    layers = set(map(id, _trained(model)))
    if recipe is None:
        revert(model)
    elif layers:
        convert(model, recipe, filter=lambda layer: id(layer) in layers)
    else:
        convert(model, recipe)
    losses: list[float] = []
    for step in steps:
        losses.append(_train(model, step))
        if not math.isfinite(losses[-1]):
            break
    return name, losses


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Says whether losses are as good as those of a recording before."""

    recording: Recording
    earlier: Sequence[float]

    def trial(self, name: str, losses: Sequence[float]) -> Trial:
        factor = self.recording.spike or 3.0
        good = all(map(math.isfinite, losses)) and not is_spike(
            losses[-1], self.earlier, factor
        )
        return Trial(name, tuple(losses), good)
