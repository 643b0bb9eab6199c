"""What a conversion did."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from keras_policy_ext.conversion import summary, tables
from keras_policy_ext.conversion.summary import Overview, Row, Totals
from keras_policy_ext.conversion.tables import Column, Table

NOT_BUILT = "it has no weights yet: it was never called"
"""Why a layer that could be in float8 is skipped in a model that is built."""


@dataclasses.dataclass(frozen=True)
class Converted:
    """A layer that computes in another policy now.

    Attributes:
        path: The layer's path, e.g. `"model/block/dense"`.
        class_name: The name of its class.
        policy: The name of its policy: `float8_policy.full_name`, or that of
            a plain policy.
        parameters: Entries of the kernels that it multiplies with.
        multiplications: Multiplications, each with its addition, in the
            products of one sample with them.
        sizes_known: Whether all sizes of the inputs were known; one that is
            not counts as 1.
    """

    path: str
    class_name: str
    policy: str
    parameters: int = 0
    multiplications: int = 0
    sizes_known: bool = True

    @property
    def in_float8(self) -> bool:
        """Whether the policy is a float8 policy."""
        return self.policy.startswith("float8")

    @property
    def outcome(self) -> str:
        """The policy."""
        return self.policy


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A layer with weights that stays as it was.

    Attributes:
        path: The layer's path.
        class_name: The name of its class.
        reason: Why.
        policy: The full name of the float8 policy that it follows as before;
            None if it is not in float8.
        parameters: Entries of the kernels that it multiplies with; if there
            are none, of its own weights.
        multiplications: As for `Converted`; 0 without such a kernel.
        sizes_known: As for `Converted`.
    """

    path: str
    class_name: str
    reason: str
    policy: str | None = None
    parameters: int = 0
    multiplications: int = 0
    sizes_known: bool = True

    @property
    def in_float8(self) -> bool:
        """Whether it follows a float8 policy as before."""
        return self.policy is not None

    @property
    def outcome(self) -> str:
        """The float8 policy that it follows, or why it follows none."""
        if self.policy is None:
            return f"– {self.reason}"
        return f"{self.policy} as before"


@dataclasses.dataclass(frozen=True)
class Report:
    """What was converted, and what was not and why.

    `str(report)` says how much of the model is in float8, and has a row for
    the layers of one class with one policy or reason. It fits on a screen of
    24 lines, and is as wide as the terminal. `table(full=True)` has a row for
    every layer. Layers without weights are left out.

    Attributes:
        converted: One entry for each layer that was converted.
        skipped: One entry for each other layer that has weights.
        parameters: Entries of all weights of the model, without the float8
            state; 0 if that is not known.
    """

    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    parameters: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON types: `{"converted": […], "skipped": […], …}`."""
        return {
            "converted": [dataclasses.asdict(e) for e in self.converted],
            "skipped": [dataclasses.asdict(e) for e in self.skipped],
            "parameters": self.parameters,
        }

    def table(self, full: bool = False) -> str:
        """A table as text.

        Args:
            full: Whether it has a row for every layer with weights. False:
                one for the layers of a class with one policy or reason, those
                that multiply with a kernel.

        Returns:
            Lines as wide as the terminal; wider only where a single word is.
        """
        if not full:
            return self._overview().text()
        columns = (
            Column("layer", path=True, above=True),
            Column("class"),
            *summary.SHARES,
            Column("policy, or – why not"),
        )
        rows = [
            [
                tables.printable(e.path),
                e.class_name,
                f"{e.multiplications:,}",
                f"{e.parameters:,}",
                tables.printable(e.outcome),
            ]
            for e in self._entries
        ]
        table = Table(columns, rows)
        return summary.full_text(self._head(), table, self._notes())

    @property
    def totals(self) -> Totals:
        """Sums over all layers."""
        return Totals.of(self._entries, self.parameters)

    @property
    def groups(self) -> list[list[Converted | Skipped]]:
        """Layers that multiply with a kernel, those with one outcome together.

        Reasons that differ in numbers or names only are one outcome.
        """
        return summary.grouped(
            self._entries, lambda e: (e.class_name, _kind(e.outcome))
        )

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return self._overview().html()

    @property
    def _entries(self) -> tuple[Converted | Skipped, ...]:
        return (*self.converted, *self.skipped)

    def _head(self) -> list[str]:
        totals = self.totals
        if not totals.layers and not totals.listed_in_float8:
            return ["No layer with a kernel to multiply with"]
        if self.converted and not totals.listed_in_float8:
            layers = summary.counted(len(self.converted), "layer")
            return [f"{layers} back in plain policies; none is in float8"]
        return totals.head()

    def _notes(self) -> list[str]:
        """What to know about the numbers, and what they leave out."""
        unbuilt = [e for e in self.skipped if e.reason == NOT_BUILT]
        if not unbuilt:
            return self.totals.notes()
        first = tables.printable(unbuilt[0].path)
        layers = summary.counted(len(unbuilt), "layer")
        note = (
            f"Not counted: {layers} without weights yet, such as {first!r}. "
            "Call such layers on data, and convert again."
        )
        return [*self.totals.notes(), note]

    def _overview(self) -> Overview:
        columns = (
            Column("layers", right=True),
            Column("class"),
            *summary.SHARES,
            Column("policy, or – why not", above=True),
        )
        totals = self.totals
        rows = [
            Row(
                (
                    f"{len(group):,}",
                    group[0].class_name,
                    *summary.shares(group, totals),
                    tables.printable(outcome_of(group)),
                ),
                sum(entry.multiplications for entry in group),
                group[0].in_float8,
            )
            for group in self.groups
        ]
        every = "Every layer: report.table(full=True)"
        return Overview(self._head(), columns, rows, self._notes(), every)


def outcome_of(group: list[Converted | Skipped]) -> str:
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
