"""`autopilot`: take layers out of float8 while their figures are bad."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import policies, recipes, user_code
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.conversion.in_place import declare_policies
from keras_policy_ext.conversion.training import changing
from keras_policy_ext.ext.sampling.captured import Loss
from keras_policy_ext.ext.sampling.samples import check_count
from keras_policy_ext.ext.watch.monitor import Watch, watch
from keras_policy_ext.ext.watch.rules import (
    OF_PRECISION,
    WORDS,
    Thresholds,
    WatchWarning,
)
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    layers_in_float8,
    source_policy_of,
)
from keras_policy_ext.recipes import MATMULS, OPERANDS, Recipe, matmuls_of
from keras_policy_ext.reports import BaseReport, Column, Table, counted

_LOGGER = logging.getLogger("keras_policy_ext")

_OUT: weakref.WeakSet[Any] = weakref.WeakSet()
"""The layers that an autopilot has taken out of their own recipes."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """A change of the recipe of a layer.

    Attributes:
        step: The step, from 1, before which it was made.
        layer: The path of the layer.
        what: What was decided, in words.
        recipe: The recipe from then on, as in names of policies.
        out: Its matmuls that are not in float8 from then on.
        reason: The warnings that led to it, or how long there was none.
    """

    step: int
    layer: str
    what: str
    recipe: str
    out: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"Step {self.step}, {self.layer}: {self.what}. {self.reason}"


@dataclasses.dataclass
class _Steered:
    """A layer that the autopilot has taken out of float8 at some time.

    Attributes:
        layer: The layer.
        own: Its own recipe.
        out: Its matmuls that are not in float8.
        finer: Whether it follows the finer recipe.
        calm: The number of samples without a warning since.
        times: How often it was taken out.
        renewed: The kernels and operands whose histories began anew.
    """

    layer: Any
    own: Recipe
    out: frozenset[str] = frozenset()
    finer: bool = False
    calm: int = 0
    times: int = 0
    renewed: frozenset[tuple[str, str]] = frozenset()

    @property
    def is_out(self) -> bool:
        """True while it does not follow its own recipe."""
        return self.finer or bool(self.out)


class Autopilot(BaseReport):
    """Decides from samples which layers leave float8; see `autopilot`.

    `str` is a report that fits on a screen; `as_dict` has JSON types.

    Attributes:
        watch: The `Watch` that takes the samples and warns.
        decisions: The decisions so far.
    """

    def __init__(self, watch: Watch, finer: Recipe | None, calm: int):
        self.watch = watch
        self.decisions: list[Decision] = []
        self._finer, self._calm = finer, calm
        self._steered: dict[int, _Steered] = {}

    def step(self, data: Any, steps: int = 1) -> bool:
        """Count steps; take a sample if it is time, and act on it.

        Call it before the step of training on that batch: then it sees what
        that step would see, and acts in time.

        Args:
            data: A batch, as for `what_if`.
            steps: The number of training steps since the call before, an
                integer >= 1, such as those of one execution.

        Returns:
            Whether the recipe of a layer changed. Keras's compiled steps are
            traced anew then; compile your own ones again.

        Raises:
            ValueError: If `steps` is no such number.
        """
        if not self.watch.step(data, steps):
            return False
        before = len(self.decisions)
        known = {k: dataclasses.replace(x) for k, x in self._steered.items()}
        changes = self._decide()
        try:
            if changes:
                model = self.watch.model
                with changing(model):
                    for steered, recipe in changes:
                        _follow(steered.layer, recipe)
                    declare_policies(model)
        except BaseException:  # The layers have their former recipes again.
            self._steered = known
            del self.decisions[before:]
            raise
        self.watch.judged_as = {
            key: each.own for key, each in self._steered.items() if each.is_out
        }
        for each in self._steered.values():
            (_OUT.add if each.is_out else _OUT.discard)(each.layer)
        for decision in self.decisions[before:]:
            _LOGGER.info("%s", decision)
        return bool(changes)

    def warn_of_layers_out(self) -> None:
        """Warn if layers stay without their own recipe, as training ends."""
        if self.out:
            user_code.warn(
                f"The autopilot ends with {_some(list(self.out))} out of their "
                "own recipes. They stay so, and in files too. Pass this "
                "autopilot to the next training, which may bring them back, or "
                "call `keras_policy_ext.convert` with the policy you want."
            )

    def logs(self) -> dict[str, float]:
        """Return `float8_layers_out`, the number of layers that are out."""
        return {"float8_layers_out": float(len(self.out))}

    @property
    def out(self) -> dict[str, str]:
        """The recipes of layers without their own, by their paths."""
        found = (each for each in self._steered.values() if each.is_out)
        return {self._label(x.layer): self._recipe(x).spec for x in found}

    def _decide(self) -> list[tuple[_Steered, Recipe]]:
        """Decide by the last sample; return layers to change, and recipes."""
        changes: list[tuple[_Steered, Recipe]] = []
        if any(x.sign == "nonfinite" for x in self.watch.rules.present):
            return changes  # The figures leave such values out.
        layers = {id(uses[0].layer): uses[0].layer for uses in self.watch.uses}
        for key, layer in layers.items():
            policy, path = float8_policy_of(layer), self._label(layer)
            found = [
                each
                for each in self.watch.rules.present
                if each.layer == path and each.sign in OF_PRECISION
            ]
            if found and policy is not None and key not in self._steered:
                self._steered[key] = _Steered(layer, policy.recipe)
            steered = self._steered.get(key)
            if steered is None or policy is None:
                continue
            left = [each for each in found if not self._renew(steered, each)]
            if left and self._take_out(steered, left):
                reason = " ".join(each.message for each in left)
                what = f"{', '.join(_sorted(steered.out))} in the compute dtype"
                if not steered.out:
                    what = f"recipe {self._recipe(steered).spec}"
            elif not found and self._is_calm(steered):
                wait = counted(steered.calm, "sample")
                what, reason = "its own recipe again", f"No warning in {wait}."
                steered.out, steered.finer, steered.calm = frozenset(), False, 0
            else:
                continue
            changes.append((steered, self._recipe(steered)))
            self._note(steered, what, reason)
        return changes

    def _renew(self, steered: _Steered, found: WatchWarning) -> bool:
        """Begin a history of other values anew; return whether it is."""
        key = found.kernel, found.operand
        # One that was begun anew before is wrong for another reason.
        is_new = key not in steered.renewed
        if found.sign != "scale" or steered.is_out or not is_new:
            return False
        steered.renewed |= {key}
        state = steered.layer.float8_state
        for variable in state.matrices:
            if variable.kernel.name == found.kernel:
                _forget(variable, found.operand)
        what = f"the history of its {WORDS[found.operand]} begins anew"
        self._note(steered, what, found.message)
        return True

    def _take_out(
        self, steered: _Steered, found: Iterable[WatchWarning]
    ) -> bool:
        """Choose what a layer leaves; return whether that is something new."""
        steered.calm = 0
        if not steered.is_out:
            steered.times += 1
            if self._finer is not None:
                steered.finer = True
                return True
        before = steered.out
        steered.out |= {m for each in found for m in matmuls_of(each.operand)}
        return steered.out != before

    def _is_calm(self, steered: _Steered) -> bool:
        """Count a sample without warnings; return whether it was the last."""
        steered.calm += 1
        wait = self._calm * 2 ** max(steered.times - 1, 0)
        return steered.is_out and steered.calm >= wait

    def _label(self, layer: keras.Layer) -> str:
        return self.watch.labels.get(id(layer), path_of(layer))

    def _recipe(self, steered: _Steered) -> Recipe:
        recipe: Any = steered.own
        if steered.finer:
            recipe = self._finer
        out = dict.fromkeys(steered.out, "high_precision")
        return dataclasses.replace(recipe, **out)

    def _note(self, steered: _Steered, what: str, reason: str) -> None:
        self.decisions.append(
            Decision(
                self.watch.steps,
                self._label(steered.layer),
                what,
                self._recipe(steered).spec,
                _sorted(steered.out),
                reason,
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """Return decisions, warnings and layers that are out, as JSON types."""
        return {
            "steps": self.watch.steps,
            "out": self.out,
            "decisions": [dataclasses.asdict(x) for x in self.decisions],
            "warnings": [x.as_dict() for x in self.watch.warnings],
        }

    def _count(self) -> int:
        return len(self.decisions)

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        decisions = counted(len(self.decisions), "decision")
        yield f"{decisions} in {counted(self.watch.steps, 'step')}."
        if self.decisions:
            columns = [
                Column("step", right=True),
                Column("layer", wraps=True),
                Column("decision", wraps=True),
                Column("reason", wraps=True),
            ]
            shown = self.decisions[-(len(self.decisions) if full else number) :]
            rows = [(str(x.step), x.layer, x.what, x.reason) for x in shown]
            yield Table(columns, rows, spaced=True)
        out = "; ".join(f"{path}: {spec}" for path, spec in self.out.items())
        yield f"Without their own recipe now: {out or 'none'}."


def _some(paths: list[str]) -> str:
    return f"{counted(len(paths), 'layer')}, such as {paths[0]!r},"


def _sorted(matmuls: Iterable[str]) -> tuple[str, ...]:
    return tuple(each for each in MATMULS if each in matmuls)


def _follow(layer: Any, recipe: Recipe) -> None:
    """Set another recipe in a layer, which keeps its variables."""
    was = layer.float8_policy.recipe
    source = source_policy_of(layer).name
    layer.dtype_policy = policies.Float8DTypePolicy(source, recipe=recipe)
    if recipe.remembers and not was.remembers:
        for variable in layer.float8_state.matrices:
            for operand in OPERANDS:
                _forget(variable, operand)


def _forget(variable: Any, operand: str) -> None:
    """Begin the history of an operand anew."""
    if variable.observes_amaxes:
        matrix = np.array(ops.convert_to_numpy(variable.value))
        rows = variable.rows_of(operand)
        matrix[rows] = variable.rows_layout.never_observed()[rows]
        variable.enter(matrix)


def autopilot(
    model: keras.Layer,
    *,
    every: int = 10,
    finer: Recipe | str | None = None,
    calm: int = 5,
    loss: Loss | None = None,
    thresholds: Thresholds | None = None,
    path: str | pathlib.Path | None = None,
    log_dir: str | pathlib.Path | None = None,
) -> Autopilot:
    """Take layers out of float8 while their figures are bad, in your own loop.

    ```python
    autopilot = kpe.autopilot(model)
    for x, y in batches:
        autopilot.step((x, y))
        model.train_on_batch(x, y)
    print(autopilot)
    ```

    The figures are those of `watch`. If an operand of a layer passes a
    threshold, the matmuls that read it are computed in the compute dtype from
    then on. If it stays below the thresholds for some samples, judged by the
    recipe that the layer had, the layer gets that recipe back. A history of
    amaxes that is of other values begins anew. Weights, states and optimizers
    stay as they are; a compiled step of Keras is traced anew once for all
    changes after a sample.

    Decisions depend on the figures alone: the same seed brings the same ones.

    Args:
        model: A built model with layers in float8.
        every: Take a sample before the first of so many steps.
        finer: A recipe to try first, without state, such as `"rowwise"`. If
            the warnings go on, the matmuls leave float8 after all.
        calm: The number of samples without a warning after which a layer gets
            its recipe back; twice as many each time it is taken out again.
        loss: As for `what_if`.
        thresholds: None for `kpe.callbacks.Thresholds()`.
        path: As for `watch`.
        log_dir: As for `watch`.

    Returns:
        An `Autopilot`: call `step` with each batch.

    Raises:
        TypeError, ValueError: As `watch` does; if `calm` is out of range, or
            if `finer` is no recipe for training or has a state.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model.compile("sgd", "mse")
        >>> report = kpe.convert(model)
        >>> autopilot = kpe.autopilot(model, every=1)
        >>> autopilot.step((np.ones((4, 8)), np.ones((4, 4))))
        False
        >>> autopilot.decisions
        []
    """
    recipe = check_steering(every, finer, calm)
    watched = watch(
        model,
        every=every,
        loss=loss,
        thresholds=thresholds,
        path=path,
        log_dir=log_dir,
    )
    left = [path_of(x) for x in layers_in_float8(model) if x in _OUT]
    if left:
        user_code.warn(
            f"An earlier autopilot of {model.name!r} took {_some(left)} out of "
            "their own recipes, and this one takes what they follow now for "
            "their own. Pass the earlier one on, or call "
            "`keras_policy_ext.convert` with the policy you want first."
        )
        _OUT.difference_update(layers_in_float8(model))
    return Autopilot(watched, recipe, calm)


def check_steering(every: Any, finer: Any, calm: Any) -> Recipe | None:
    """Check arguments of `autopilot`; return the recipe that `finer` means."""
    recipe = None if finer is None else recipes.get(finer)
    if recipe is not None and (recipe.remembers or not recipe.trains):
        raise ValueError(
            "`finer` is not a recipe that layers can follow for a while. "
            f"Received: {finer!r}. Allowed: a recipe for training without a "
            "state, such as 'current', 'rowwise' or 'mxfp8'. Pass one of them, "
            "or None."
        )
    if every is None:
        raise ValueError(
            "`every` is not a number of steps. Received: None. Allowed: an "
            "integer >= 1: decisions must not depend on time. Leave it out "
            "for 10."
        )
    check_count("calm", calm, "samples", 5)
    return recipe
