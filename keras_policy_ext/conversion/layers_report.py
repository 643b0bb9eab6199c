"""A summary of how much of a model is in float8.

The report of a conversion and `inspect` share it. Layers of one class with the
same treatment share a row, and layers that multiply with no kernel have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from keras_policy_ext import policy_names
from keras_policy_ext.reports import (
    BaseReport,
    Column,
    Table,
    amount,
    counted,
    percent,
)

_MACS = Column("MACs", right=True)

SHARES = (_MACS, Column("parameters", right=True))
"""The columns of the shares of multiplications and parameters."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over layers of parameters and multiplications, also in float8."""

    listed: int  # How many layers there are.
    listed_in_float8: int  # How many of them are in float8.
    layers: int  # How many multiply with a kernel.
    in_float8: int  # How many of these are in float8.
    stored: int  # How many of these multiply in floats, by stored kernels.
    # Multiplications of one sample; 0 if not counted, as the two that follow.
    multiplications: int
    multiplications_in_float8: int  # Those that are in float8.
    # Those in floats, with kernels that are stored, or rounded in each step.
    multiplications_of_stored: int
    parameters: int  # Entries of all weights.
    # Entries of kernels in float8, and of tables that are stored in it.
    parameters_in_float8: int
    sizes_known: bool  # Whether no size was unknown.
    partly_stored: int  # How many kernels stay in floats beside stored ones.
    is_counted: bool  # Whether multiplications are counted.
    # How many layers of these in float8 are trained for a grid instead.
    on_grid: int = 0
    # What kernels are stored as, in words.
    stored_as: str = "in float8"

    @classmethod
    def of(cls, entries: Iterable[Any], parameters: int) -> Totals:
        """Add up the entries of layers; `parameters` is the model's, or 0."""
        entries = list(entries)
        multiplying = [e for e in entries if e.multiplications != 0]
        # `freeze` lists what it left of a layer that it has frozen.
        kernels = [e for e in entries if getattr(e, "is_kernel", False)]
        in_float8 = [e for e in multiplying if e.in_float8]
        stored = [
            e
            for e in in_float8
            if e.frozen and e.plain_multiplications == e.multiplications
        ]
        return cls(
            listed=len(entries),
            listed_in_float8=sum(e.in_float8 for e in entries),
            layers=sum(e not in kernels for e in multiplying),  # Whole ones.
            in_float8=len(in_float8),
            stored=len(stored),
            multiplications=multiplications_of(multiplying),
            multiplications_in_float8=multiplications_of(in_float8)
            - sum(e.plain_multiplications or 0 for e in in_float8),
            multiplications_of_stored=multiplications_of(
                [*stored, *filter(_is_on_grid, in_float8)]
            ),
            # Of a tied table two layers have an entry.
            parameters=parameters or sum(e.parameters for e in entries),
            parameters_in_float8=sum(
                e.parameters - e.plain_parameters
                for e in entries
                if e.frozen or (e.in_float8 and e.multiplications != 0)
            ),
            sizes_known=all(e.sizes_known for e in multiplying),
            partly_stored=len(kernels)
            + sum(e.plain_parameters > 0 for e in stored),
            is_counted=all(e.multiplications is not None for e in entries),
            on_grid=sum(_is_on_grid(e) for e in in_float8),
            stored_as=_stored_as(stored),
        )

    def head(self) -> list[str]:
        """Return sentences on how much of the model is in float8."""
        if self.is_counted and not self.multiplications:
            layers = counted(self.listed, "layer")
            return [f"{self.listed_in_float8} of {layers} in float8"]
        if self.stored and self.stored == self.in_float8:
            return self._head_of_stored_kernels()
        share = self._share_of_parameters
        if self.on_grid and self.on_grid == self.in_float8:
            layers = counted(self.layers, "layer")
            return [
                f"Kernels are rounded in each step, {share}. Matmuls and "
                "gradients are in floats.",
                f"{self.on_grid} of {layers} with a kernel; {self._sizes}",
            ]
        if self.is_counted:
            of_products = percent(
                self.multiplications_in_float8, self.multiplications
            )
            share = f"{of_products} of the multiplications and {share}"
        layers = counted(self.layers, "layer")
        sentences = [
            f"{share} are in float8",
            f"{self.in_float8} of {layers} with a kernel; {self._sizes}",
        ]
        if self.stored:
            stored = counted(self.stored, "layer")
            sentences.append(
                f"The matmuls of {stored} run in floats, with kernels that "
                f"are stored {self.stored_as}"
            )
        if self.on_grid:
            rounded = counted(self.on_grid, "layer")
            sentences.append(
                f"The matmuls of {rounded} run in floats, with kernels that "
                "are rounded in each step"
            )
        return sentences

    def _head_of_stored_kernels(self) -> list[str]:
        """Return the sentences for a model whose matmuls are all in floats."""
        layers = counted(self.layers, "layer")
        which = f"The kernels of {self.stored} of {layers}"
        if self.partly_stored:
            which = "Some kernels"
        elif self.stored == self.layers:
            which = "All kernels"
        return [
            f"{which} are stored {self.stored_as}, "
            f"{self._share_of_parameters}. Matmuls run in floats.",
            f"{layers} with a kernel; {self._sizes}",
        ]

    @property
    def _share_of_parameters(self) -> str:
        """The share of the parameters that is in float8, in words."""
        share = percent(self.parameters_in_float8, self.parameters)
        return f"{share} of the parameters"

    @property
    def _sizes(self) -> str:
        """The numbers of multiplications, if counted, and of parameters."""
        parameters = f"{amount(self.parameters)} parameters"
        if not self.is_counted:
            return parameters
        products = amount(self.multiplications)
        return f"{products} multiplications (MACs) per sample, {parameters}"

    def notes(self) -> list[str]:
        """Return a note if input sizes were unknown, else an empty list."""
        if self.sizes_known:
            return []
        return [
            "Some sizes of inputs are not known, such as those that are None, "
            "or how often a layer is called. They count as 1 in the "
            "multiplications."
        ]


def _is_on_grid(entry: Any) -> bool:
    """Return True if a layer is trained in floats for a grid of few bits."""
    return str(entry.policy).startswith(f"{policy_names.QAT}/")


def _stored_as(entries: Iterable[Any]) -> str:
    """Return what the kernels of frozen layers are stored as, in words."""
    are_integers = {"weights='int" in str(each.policy) for each in entries}
    if are_integers == {True}:
        return "as integers"
    return "as integers or in float8" if True in are_integers else "in float8"


class LayersReport(BaseReport):
    """Base class of reports on layers: those of conversions, and `inspect`.

    `_entries` are layers with the fields that `Totals` adds up.
    """

    parameters: int

    _treatment: Callable[[Any], Any]
    """Returns what the layers of one row share, besides their class."""

    _cells: Callable[[Any], Sequence[str]]
    """Returns the cells of a group of layers for `_columns`."""

    _full_rows: Callable[[Any], Sequence[Sequence[str] | str]]
    """Returns the rows of a layer in the full table."""

    _columns: ClassVar[Sequence[Column]]
    """Columns of the short table, after those of counts and shares."""

    _full_columns: ClassVar[Sequence[Column]]
    """Columns of the full table."""

    @property
    def _entries(self) -> Sequence[Any]:
        """The entries of the report, one per layer, in the model's order."""
        raise NotImplementedError

    @property
    def totals(self) -> Totals:
        """The sums over all layers of the report."""
        return Totals.of(self._entries, self.parameters)

    @property
    def groups(self) -> list[list[Any]]:
        """Groups of layers with equal class and treatment, if they multiply."""
        groups: dict[Any, list[Any]] = {}
        for entry in self._entries:
            if entry.multiplications != 0 or entry.in_float8:
                key = entry.class_name, self._treatment(entry)
                groups.setdefault(key, []).append(entry)
        return list(groups.values())

    def _count(self) -> int:
        return len(self.groups)  # Each is a row that may be left out.

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield text and a table: all layers in full, else `number` groups."""
        yield from self._head()
        groups = sorted(self.groups, key=lambda x: -multiplications_of(x))
        is_counted = self.totals.is_counted
        if full:
            rows = [r for each in self._entries for r in self._full_rows(each)]
            columns = list(self._full_columns)
            if not is_counted and _MACS in columns:  # Leave the column out.
                place = columns.index(_MACS)
                rows = [[*row[:place], *row[place + 1 :]] for row in rows]
                del columns[place]
            yield Table(columns, rows)
        elif number:
            yield self._short_table(groups[:number])
        if not_shown := groups[number:]:
            more = f"and {len(not_shown)} more"
            if is_counted:
                counts = [multiplications_of(group) for group in groups]
                share = percent(sum(counts[number:]), sum(counts))
                more += f", with {share} of the multiplications"
            yield more
        yield from self._notes(full)

    def _short_table(self, groups: list[list[Any]]) -> Table:
        """Return a table with a row per group; groups in float8 come first."""
        # Columns that would hold only dashes are left out.
        numbers = (Column("layers", right=True), Column("class"), *SHARES)
        columns, totals = [*numbers, *self._columns], self.totals
        rows = [
            [
                f"{len(group):,}",
                group[0].class_name,
                *shares(group, totals),
                *self._cells(group),
            ]
            for group in sorted(groups, key=lambda g: not g[0].in_float8)
        ]
        used = [
            column
            for column in range(len(columns))
            if any(row[column] != "–" for row in rows)
        ]
        return Table(
            [columns[column] for column in used],
            [[row[column] for column in used] for row in rows],
        )

    def _head(self) -> list[str]:
        """Return the sentences to print above the table."""
        totals = self.totals
        if not totals.layers and not totals.listed_in_float8:
            return ["No layer with a kernel to multiply with"]
        return totals.head()

    def _notes(self, full: bool) -> list[str]:
        """Return the sentences to print below the table."""
        return self.totals.notes()


def shares(group: Sequence[Any], totals: Totals) -> list[str]:
    """Return a group's shares of multiplications and parameters, as cells."""
    if all(e.multiplications == 0 for e in group):
        return ["–", "–"]
    return [
        percent(multiplications_of(group), totals.multiplications)
        if totals.is_counted
        else "–",
        percent(sum(e.parameters for e in group), totals.parameters),
    ]


def multiplications_of(group: Iterable[Any]) -> int:
    """Return the multiplications of a group of layers, as far as counted."""
    return sum(entry.multiplications or 0 for entry in group)
