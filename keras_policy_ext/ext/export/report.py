"""The report of an export: what was written, and what in float."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator

from keras_policy_ext.ext.export.exported_kernels import Scheme
from keras_policy_ext.reports import BaseReport, Column, Table, percent


@dataclasses.dataclass(frozen=True)
class Written:
    """One weight in an export: name, dtype, bytes, and why it is in float.

    Attributes:
        name: Its name in the export.
        path: The path of the weight in the model; several if one tensor
            holds several weights.
        shape: Its shape in the export.
        dtype: Its dtype, e.g. `"float8_e4m3fn"` or `"bfloat16"`.
        reason: Why it is in float; empty if it is quantized.
        nbytes: Its bytes in the export, scales included.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    nbytes: int

    @property
    def quantized(self) -> bool:
        """True if the weight was written in few bits."""
        return not self.reason


@dataclasses.dataclass(frozen=True, repr=False)
class ExportReport(BaseReport):
    """The report of `export`: the weights that were written, and where.

    `str(report)` is a table with a row for each group of weights that are
    treated alike; `table(full=True)` has a row for each weight.

    Attributes:
        path: The file or folder.
        format: The format of the export.
        scheme: A description, such as `"float8_e4m3fn per channel, inputs
            dynamic"`.
        weights: One entry for each weight.
        notes: Sentences on how to read it.
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
        """Return the report of an export from the weights that were written."""
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
        """The total bytes of all weights and scales in the export."""
        return sum(written.nbytes for written in self.weights)

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield the heading, the table of weights, and the notes."""
        first = (
            Column("weight", apart=True)
            if full
            else Column("weights", right=True)
        )
        columns = [
            first,
            Column("bytes", right=True),
            Column("dtype"),
            Column("why in float, or an example", wraps=True),
        ]
        yield from self._head()
        yield Table(columns, self._full_rows() if full else self._rows())
        yield from self.notes

    def _head(self) -> list[str]:
        quantized = [w for w in self.weights if w.quantized]
        part, whole = (_numbers(each) for each in (quantized, self.weights))
        dtypes = {each.dtype.partition("_")[0] for each in quantized}
        stored_as = " and ".join(sorted(dtypes)) or "float8"
        return [
            f"{self.path}: {self.format}, {self.scheme}",
            f"{self.nbytes:,} bytes; {percent(part, whole)} of "
            f"{whole:,} parameters are in {stored_as}",
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
                group[0].reason or group[0].name,
            ]
            for group in ordered
        ]

    def _full_rows(self) -> list[list[str]]:
        return [
            [w.name, f"{w.nbytes:,}", w.dtype, w.reason] for w in self.weights
        ]


def _numbers(weights: Iterable[Written]) -> int:
    return sum(math.prod(written.shape) for written in weights)
