"""What an export wrote, and why some of it in float."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from keras_policy_ext.conversion import summary, tables
from keras_policy_ext.conversion.tables import Column, Table
from keras_policy_ext.export.kernels import Scheme


@dataclasses.dataclass(frozen=True)
class Written:
    """One weight of a model in an export.

    Attributes:
        name: Its name there.
        path: The path of the weight in the model; several if they are one
            tensor there.
        shape: Its shape there.
        dtype: Of its numbers, e.g. `"float8_e4m3fn"` or `"bfloat16"`.
        reason: Why it is in float; empty if it is quantized.
        nbytes: Bytes there, scales included.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    nbytes: int

    @property
    def quantized(self) -> bool:
        """Return True if it is in float8."""
        return not self.reason


@dataclasses.dataclass(frozen=True, repr=False)
class ExportReport(tables.Page):
    """What was written where.

    `str(report)` is a table with a row for the weights that are treated
    alike; `table(full=True)` has a row for each.

    Attributes:
        path: The file or folder.
        format: What `export` was asked for.
        scheme: In words, such as `"float8_e4m3fn per channel, inputs
            dynamic"`.
        weights: One entry for each weight.
        notes: What to know about reading it.
    """

    path: str
    format: str
    scheme: str
    weights: tuple[Written, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        format: str,
        scheme: Scheme,
        written: Iterable[Written],
        notes: tuple[str, ...] = (),
    ) -> ExportReport:
        """The report of an export whose kernels are stored in one way."""
        inputs = scheme.activations or "not quantized"
        return cls(
            os.fspath(path),
            format,
            f"{scheme.weights} per {scheme.granularity}, inputs {inputs}",
            tuple(written),
            notes,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and scales."""
        return sum(written.nbytes for written in self.weights)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON types."""
        return dataclasses.asdict(self)

    def table(self, full: bool = False) -> str:
        """The report as text, as wide as the terminal.

        Args:
            full: Whether it has a row for every weight.
        """
        width = shutil.get_terminal_size((80, 24)).columns
        head, notes = (
            [line for text in texts for line in tables.wrap(text, width)]
            for texts in (self._head(), self.notes)
        )
        lines = [*head, "", *self._as_table(full).text(width)]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _page(self) -> Iterator[str | Table]:
        """The short table and the notes."""
        yield from self._head()
        yield self._as_table()
        yield from self.notes

    def _as_table(self, full: bool = False) -> Table:
        first = Column("weight", path=True, above=True)
        counted = Column("weights", right=True)
        columns = [
            first if full else counted,
            Column("bytes", right=True),
            Column("dtype"),
            Column("why in float, or an example"),
        ]
        return Table(columns, self._full_rows() if full else self._rows())

    def _head(self) -> list[str]:
        quantized = [w for w in self.weights if w.quantized]
        part, whole = (_numbers(each) for each in (quantized, self.weights))
        return [
            f"{self.path}: {self.format}, {self.scheme}",
            f"{self.nbytes:,} bytes; {summary.percent(part, whole)} of "
            f"{whole:,} parameters are in float8",
        ]

    def _rows(self) -> list[list[str]]:
        groups: dict[tuple[str, str], list[Written]] = {}
        for written in self.weights:
            key = written.dtype, written.reason
            groups.setdefault(key, []).append(written)
        ordered = sorted(groups.values(), key=lambda g: -_numbers(g))
        return [
            [
                f"{len(group):,}",
                f"{sum(w.nbytes for w in group):,}",
                group[0].dtype,
                tables.printable(group[0].reason or group[0].name),
            ]
            for group in ordered
        ]

    def _full_rows(self) -> list[list[str]]:
        return [
            [
                tables.printable(w.name),
                f"{w.nbytes:,}",
                w.dtype,
                tables.printable(w.reason),
            ]
            for w in self.weights
        ]


def _numbers(weights: Iterable[Written] | Sequence[Written]) -> int:
    return sum(math.prod(written.shape) for written in weights)
