"""What a conversion did, as data and as a table, and when it warns."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import keras

from keras_policy_ext import _user_code
from keras_policy_ext.conversion import (
    kept_numbers,
    summary,
    tables,
    work,
)
from keras_policy_ext.conversion.candidates import (
    NOT_BUILT,
    Unconverted,
    path_of,
)
from keras_policy_ext.conversion.summary import LayerTables
from keras_policy_ext.conversion.tables import Column
from keras_policy_ext.conversion.work import Work
from keras_policy_ext.layers.stored_weights import is_state
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    source_policy_of,
)

LITTLE = 0.1
"""A smaller share of the multiplications in float8 is warned of."""

REASONS = 3
"""How many reasons that warning names: those of the most multiplications."""


MULTIPLIES_OTHERS = (
    "its own code multiplies with weights of other layers or with constants, "
    "such as the table of an embedding, and stays as it is"
)
"""Why a layer without kernels of its own is not in float8."""

_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)


@dataclasses.dataclass(frozen=True)
class Converted(Work):
    """A layer that computes in another policy now, and its `Work`.

    Attributes:
        path: The layer's path, e.g. `"model/block/dense"`.
        class_name: The name of its class.
        policy: The name of its policy: `float8_policy.full_name`, or that of
            a plain policy.
        per_tensor: Whether it has one scale for a tensor where its recipe has
            one for a row or a block: a convolution does, and what multiplies
            activations only.
        kept_bytes: In how many bytes a number of its inputs is kept for the
            backward pass, without scales; None if that is not in float8.
        kept_bytes_before: The same without float8.
        parameters, multiplications, plain_multiplications, sizes_known: As
            for `work.Work`.
    """

    path: str
    class_name: str
    policy: str
    per_tensor: bool = False
    kept_bytes: int | None = None
    kept_bytes_before: int | None = None

    @property
    def in_float8(self) -> bool:
        """Return True if the policy is a float8 policy."""
        return self.policy.startswith("float8")

    @property
    def outcome(self) -> str:
        """The policy."""
        return self.policy


@dataclasses.dataclass(frozen=True)
class Skipped(Work):
    """A layer with weights that stays as it was, and its `Work`.

    Attributes:
        path: The layer's path.
        class_name: The name of its class.
        reason: Why.
        policy: The full name of the float8 policy that it follows as before;
            None if it is not in float8.
        per_tensor: As for `Converted`.
        parameters, multiplications, plain_multiplications, sizes_known: As
            for `work.Work`.
    """

    path: str
    class_name: str
    reason: str
    policy: str | None = None
    per_tensor: bool = False

    @property
    def in_float8(self) -> bool:
        """Return True if it follows a float8 policy as before."""
        return self.policy is not None

    @property
    def outcome(self) -> str:
        """The float8 policy that it follows, or why it follows none."""
        if self.policy is None:
            return f"– {self.reason}"
        return f"{self.policy} as before"


@dataclasses.dataclass(frozen=True, repr=False)
class Report(LayerTables):
    """What was converted, and what was not and why.

    `str(report)` says how much of the model is in float8, and has a row for
    the layers of one class with one policy or reason. It fits on a screen of
    24 lines, and is as wide as the terminal. `table(full=True)` has a row for
    every layer. Layers without weights are left out. Reasons that differ in
    numbers or names only are one.

    Attributes:
        converted: One entry for each layer that was converted.
        skipped: One entry for each other layer that has weights.
        parameters: Entries of all weights of the model, without the float8
            state; 0 if that is not known.
        retraced: Compiled functions of the model that are traced anew at
            their next call: paths of layers, with attributes.
        without_effect: Sentences on arguments that had none.
    """

    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    parameters: int = 0
    retraced: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()

    _columns = (Column("policy / reason not converted", above=True),)
    _full_columns = (
        Column("layer", path=True, above=True),
        Column("class"),
        *summary.SHARES,
        Column("policy / reason not converted"),
    )
    _every = "Every layer: report.table(full=True)"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON types: `{"converted": […], "skipped": […], …}`."""
        return {
            "converted": [dataclasses.asdict(e) for e in self.converted],
            "skipped": [dataclasses.asdict(e) for e in self.skipped],
            "parameters": self.parameters,
            "retraced": list(self.retraced),
            "without_effect": list(self.without_effect),
        }

    @property
    def _entries(self) -> tuple[Converted | Skipped, ...]:
        return (*self.converted, *self.skipped)

    def _treatment(self, entry: Converted | Skipped) -> str:
        return _kind(entry.outcome)

    def _cells(self, group: Sequence[Converted | Skipped]) -> list[str]:
        return [tables.printable(outcome_of(group))]

    def _full_rows(self, entry: Converted | Skipped) -> list[list[str]]:
        cells = [
            tables.printable(entry.path),
            entry.class_name,
            f"{entry.multiplications:,}",
            f"{entry.parameters:,}",
            tables.printable(entry.outcome),
        ]
        return [cells]

    def _head(self) -> list[str]:
        totals = self.totals
        if self.converted and totals.layers and not totals.listed_in_float8:
            layers = summary.counted(len(self.converted), "layer")
            return [f"{layers} back in plain policies; none is in float8"]
        return super()._head()

    def _notes(self, full: bool) -> list[str]:
        notes = [*super()._notes(full), *self.without_effect]
        notes += kept_numbers.note(self.converted)
        coarser = [e.class_name for e in self._entries if e.per_tensor]
        if coarser:
            counts = collections.Counter(coarser).items()
            layers = ", ".join(f"{number:,} {name}" for name, number in counts)
            notes.append(
                f"Scaled per tensor, in eight bits: {layers}. Rows and blocks "
                "are those of matrix products with a kernel."
            )
        if self.retraced:
            shown = ", ".join(map(tables.printable, self.retraced))
            notes.append(
                f"Traced anew at their next call: {shown}. Compile functions "
                "that are not kept in the model yourself again."
            )
        idle = [
            e
            for e in self.converted
            if e.in_float8 and not e.multiplications and e.parameters
        ]
        if idle and self.totals.sizes_known:
            first = tables.printable(idle[0].path)
            layers = summary.counted(len(idle), "layer")
            notes.append(
                f"In float8, and no part of the call of the model: {layers}, "
                f"such as {first!r}. Another layer reads the kernel, or "
                "nothing calls the layer."
            )
        unbuilt = [e for e in self.skipped if e.reason == NOT_BUILT]
        if unbuilt:
            first = tables.printable(unbuilt[0].path)
            layers = summary.counted(len(unbuilt), "layer")
            notes.append(
                f"Not counted: {layers} without weights yet, such as "
                f"{first!r}. Call such layers on data, and convert again."
            )
        return notes


ReportClass = TypeVar("ReportClass", bound=Report)


@dataclasses.dataclass(frozen=True, repr=False)
class RevertedReport(Report):
    """The report of `revert`: `Report`, which says if there was nothing."""

    def _head(self) -> list[str]:
        if not self.converted and not self.totals.listed_in_float8:
            return ["No layer was in float8; there is nothing to revert"]
        return super()._head()


def report_as(
    cls: type[ReportClass], report: Report, **more: Any
) -> ReportClass:
    """A report of another class that says the same.

    Args:
        cls: The class.
        report: The report.
        **more: Fields that the class has in addition.
    """
    fields = dataclasses.fields(Report)
    said = {field.name: getattr(report, field.name) for field in fields}
    return cls(**said, **more)


def reverted_report(report: Report) -> RevertedReport:
    """A report of layers that were in float8."""
    return report_as(RevertedReport, report)


def report_of(
    model: keras.Layer,
    converted: Sequence[keras.Layer],
    left: Sequence[Unconverted],
    names_others: bool = False,
    without_effect: Sequence[str] = (),
    retraced: Sequence[str] = (),
) -> Report:
    """The report of a change that was made, with the work of each layer.

    Args:
        model: The model or layer that was changed.
        converted: Layers in it that follow another policy now.
        left: Layers in it that do not.
        names_others: Whether layers without kernels of their own that
            multiply nevertheless are among those that do not.
        without_effect: Sentences on arguments that had none.
        retraced: Names of compiled functions that are traced anew.
    """
    works = work.Works(model)
    listed = {id(x) for x in converted} | {id(each.layer) for each in left}
    left = [
        *left,
        *(
            Unconverted(layer, MULTIPLIES_OTHERS)
            for layer in works.multiplying
            if names_others and id(layer) not in listed
        ),
    ]
    done = [
        Converted(
            path_of(layer),
            type(layer).__name__,
            _float8_policy(layer) or source_policy_of(layer).name,
            _per_tensor(layer),
            *(kept_numbers.itemsizes(layer) or ()),
            **dataclasses.asdict(works.of(layer)),
        )
        for layer in converted
    ]
    rest = [
        Skipped(
            path_of(each.layer),
            type(each.layer).__name__,
            each.reason,
            _float8_policy(each.layer),
            _per_tensor(each.layer),
            **dataclasses.asdict(works.of(each.layer)),
        )
        for each in left
    ]
    weights = [v for v in model.weights if not is_state(v)]
    return Report(
        tuple(done),
        tuple(rest),
        work.scalars(weights),
        tuple(retraced),
        tuple(without_effect),
    )


def warn_of_little(report: Report, model: keras.Layer) -> None:
    """Warn of a model with less than a tenth of its work in float8."""
    totals = report.totals
    part, whole = totals.multiplications_in_float8, totals.multiplications
    if part >= LITTLE * whole and whole:
        return
    if whole:
        share = f"Only {summary.percent(part, whole)}" if part else "None"
        message = (
            f"{share} of the multiplications of {model.name!r} are in float8 "
            "after `convert`. "
            f"{_reasons(report)}{_unknown(totals)} To have more in float8, "
            "change `include`, `exclude`, `filter`, `min_size` or the rules of "
            "the policy where one of these is the reason. Where it is the "
            "class of a layer, use a class that has a float8 form, or derive "
            "yours from Float8Mixin; if neither is possible, there is little "
            "to gain, and `kpe.revert` takes the rest out. `print(report)` "
            "tells more."
        )
    else:
        message = (
            f"`convert` has changed nothing: no layer of {model.name!r} "
            "multiplies with a kernel that Keras knows as a weight. Pass the "
            "model that has the layers, or write layers of your own with "
            "Float8Mixin."
        )
    _user_code.warn(message)


def warn_of_no_effect(report: Report) -> None:
    """Warn of arguments that had no effect."""
    for sentence in report.without_effect:
        _user_code.warn(sentence)


def outcome_of(group: Sequence[Converted | Skipped]) -> str:
    """What became of a group of layers; an example where they differ."""
    first = group[0]
    if len({entry.outcome for entry in group}) == 1:
        return first.outcome
    mark, _, reason = first.outcome.partition(" ")
    return f"{mark} e.g. {reason}"


def _kind(outcome: str) -> str:
    """What reasons have in common that differ in numbers or names only."""
    if not outcome.startswith("–"):
        return outcome
    return re.sub(r"'[^']*'|\d[\d,.]*", "#", outcome)


def _reasons(report: Report) -> str:
    """Where the most multiplications are that are not in float8, and why."""
    totals = report.totals
    groups = [group for group in report.groups if not group[0].in_float8]
    groups.sort(key=lambda group: -summary.work(group))
    found = []
    for group in groups[:REASONS]:
        share, _ = summary.shares(group, totals)
        layers = summary.counted(len(group), "layer")
        reason = outcome_of(group).removeprefix("– ")
        found.append(
            f"{share} are in {layers} of class {group[0].class_name}: {reason}."
        )
    return " ".join(found)


def _unknown(totals: summary.Totals) -> str:
    return "".join(f" {note}" for note in totals.notes())


def _float8_policy(layer: keras.Layer) -> str | None:
    policy = float8_policy_of(layer)
    return None if policy is None else policy.full_name


def _per_tensor(layer: keras.Layer) -> bool:
    """Return True if a layer is scaled per tensor, and its recipe is finer."""
    policy = float8_policy_of(layer)
    if policy is None or policy.recipe.granularity == "tensorwise":
        return False
    return isinstance(layer, _CONVOLUTIONS) or not layer.float8_contracted
