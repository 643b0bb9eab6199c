"""How much of a model is in float8, in a few lines.

What the report of a conversion and `inspect` have in common: layers of one
class that are treated alike are one row, and layers that multiply with no
kernel are none.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from keras_policy_ext.conversion import tables
from keras_policy_ext.conversion.tables import Column, Table

LINES = 24
"""What fits on one screen."""

SHARES = (Column("MACs", right=True), Column("parameters", right=True))
"""Columns of multiplications, which the head explains, and of parameters."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the layers of a model.

    Attributes:
        listed: How many layers there are.
        listed_in_float8: How many of them are in float8.
        layers: How many multiply with a kernel.
        in_float8: How many of these do so in float8.
        multiplications: Of one sample.
        multiplications_in_float8: Those that are in float8.
        parameters: Entries of all weights.
        parameters_in_float8: Entries of kernels in float8.
        sizes_known: Whether no size was unknown.
    """

    listed: int
    listed_in_float8: int
    layers: int
    in_float8: int
    multiplications: int
    multiplications_in_float8: int
    parameters: int
    parameters_in_float8: int
    sizes_known: bool

    @classmethod
    def of(cls, entries: Iterable[Any], parameters: int) -> Totals:
        """Add up layers; `parameters` are all of the model, 0 if not known."""
        entries = list(entries)
        multiplying = [e for e in entries if e.multiplications]
        in_float8 = [e for e in multiplying if e.in_float8]
        return cls(
            len(entries),
            sum(e.in_float8 for e in entries),
            len(multiplying),
            len(in_float8),
            sum(e.multiplications for e in multiplying),
            sum(e.multiplications - e.plain_multiplications for e in in_float8),
            max(parameters, sum(e.parameters for e in entries)),
            sum(e.parameters for e in in_float8),
            all(e.sizes_known for e in multiplying),
        )

    def head(self) -> list[str]:
        """What is in float8, in two sentences; in one if work is not known."""
        if not self.multiplications:
            layers = counted(self.listed, "layer")
            return [f"{self.listed_in_float8} of {layers} in float8"]
        products = percent(self.multiplications_in_float8, self.multiplications)
        weights = percent(self.parameters_in_float8, self.parameters)
        return [
            f"{products} of the multiplications and {weights} of the "
            "parameters are in float8",
            f"{self.in_float8} of {counted(self.layers, 'layer')} with a "
            f"kernel; {amount(self.multiplications)} multiplications (MACs) "
            f"per sample, {amount(self.parameters)} parameters",
        ]

    def notes(self) -> list[str]:
        """What to know about the numbers."""
        if self.sizes_known:
            return []
        return [
            "Some sizes of inputs are not known, such as those that are None, "
            "or how often a layer is called. They count as 1 in the "
            "multiplications."
        ]


class LayerTables(tables.Page):
    """The layers of a model in a short table and in a full one.

    The base of reports and of what `inspect` returns. `_entries` are layers
    with the fields that `Totals` adds up.
    """

    parameters: int

    _treatment: Callable[[Any], Any]
    """What the layers of one row have in common beside their class."""

    _cells: Callable[[Any], Sequence[str]]
    """A row of the short table, of a group of layers, under `_columns`."""

    _full_rows: Callable[[Any], Sequence[Sequence[str]]]
    """The rows of a layer in the full table."""

    _columns: ClassVar[Sequence[Column]]
    """Columns of the short table, after those of numbers and shares."""

    _full_columns: ClassVar[Sequence[Column]]
    """Columns of the full table."""

    _every: ClassVar[str]
    """How to see every layer."""

    @property
    def _entries(self) -> Sequence[Any]:
        """The layers, in order."""
        raise NotImplementedError

    @property
    def totals(self) -> Totals:
        """Sums over all layers."""
        return Totals.of(self._entries, self.parameters)

    @property
    def groups(self) -> list[list[Any]]:
        """Layers that multiply with a kernel, those treated alike together."""
        groups: dict[Any, list[Any]] = {}
        for entry in self._entries:
            if entry.multiplications or entry.in_float8:
                key = entry.class_name, self._treatment(entry)
                groups.setdefault(key, []).append(entry)
        return list(groups.values())

    def table(self, full: bool = False, every: str | None = None) -> str:
        """A table as text.

        Args:
            full: Whether it has rows for every layer with weights. False: one
                for the layers of a class that are treated alike, those that
                multiply with a kernel, as many as fit on one screen.
            every: What the short table says of how to see every layer.

        Returns:
            Lines as wide as the terminal; wider only where a single word is.
        """
        width = shutil.get_terminal_size((80, 24)).columns
        head = _wrapped(self._head(), width)
        notes = self._notes(full)
        if full:
            rows = [
                r for entry in self._entries for r in self._full_rows(entry)
            ]
            table = Table(self._full_columns, rows).text(width)
            lines = [*head, "", *table, "", *_wrapped(notes, width)]
            return "\n".join(lines).rstrip()

        def lines_of(number: int, most: int | None) -> list[str]:
            below = [*self._left_out(number), *notes, every or self._every]
            table = self._short_table(number).text(width, most)
            return [*head, "", *table, "", *_wrapped(below, width)]

        number = len(self.groups)
        if not number:
            return "\n".join([*head, *_wrapped(notes, width)])
        return "\n".join(tables.fitted(number, lines_of, LINES))

    def _page(self) -> Iterator[str | Table]:
        """The short table with all rows."""
        number = len(self.groups)
        yield from self._head()
        if number:
            yield self._short_table(number)
        yield from self._notes(full=False)
        yield self._every

    def _by_work(self) -> list[list[Any]]:
        return sorted(self.groups, key=lambda group: -work(group))

    def _short_table(self, number: int) -> Table:
        """The groups with the most work, those in float8 first.

        Columns in which nothing but a dash would stand are left out.
        """
        numbers = (Column("layers", right=True), Column("class"), *SHARES)
        columns, totals = [*numbers, *self._columns], self.totals
        groups = self._by_work()
        rows = [
            [
                f"{len(group):,}",
                group[0].class_name,
                *shares(group, totals),
                *self._cells(group),
            ]
            for group in groups
        ]
        used = [
            column
            for column in range(len(columns))
            if any(row[column] != "–" for row in rows)
        ]
        shown = sorted(range(number), key=lambda n: not groups[n][0].in_float8)
        return Table(
            [columns[column] for column in used],
            [[rows[n][column] for column in used] for n in shown],
        )

    def _left_out(self, number: int) -> list[str]:
        groups = self._by_work()
        left = groups[number:]
        if not left:
            return []
        share = percent(sum(map(work, left)), sum(map(work, groups)))
        return [f"and {len(left)} more, with {share} of the multiplications"]

    def _head(self) -> list[str]:
        """Sentences above a table."""
        totals = self.totals
        if not totals.layers and not totals.listed_in_float8:
            return ["No layer with a kernel to multiply with"]
        return totals.head()

    def _notes(self, full: bool) -> list[str]:
        """Sentences below a table: what to know about the numbers."""
        return self.totals.notes()


def shares(group: Sequence[Any], totals: Totals) -> list[str]:
    """The cells of `SHARES` for some layers; dashes without a kernel."""
    if not work(group):
        return ["–", "–"]
    return [
        percent(work(group), totals.multiplications),
        percent(sum(e.parameters for e in group), totals.parameters),
    ]


def percent(part: int, whole: int) -> str:
    """A share as text: "0 %" and "100 %" only where that is exact."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    share = 100 * part / whole
    if share < 0.1:
        return "<0.1 %"
    return ">99.9 %" if share > 99.9 else f"{share:.1f} %"


def amount(number: int) -> str:
    """A number as text, to three digits."""
    for factor, sign in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if number >= factor:
            return f"{number / factor:.3g}{sign}"
    return f"{number:,}"


def readable_bytes(number: int) -> str:
    """Bytes as text, to three digits."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"


def counted(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def work(group: Iterable[Any]) -> int:
    """The multiplications of some layers."""
    return sum(entry.multiplications for entry in group)


def _wrapped(sentences: Iterable[str], width: int) -> list[str]:
    lines = (tables.wrap(sentence, width) for sentence in sentences)
    return list(itertools.chain.from_iterable(lines))
