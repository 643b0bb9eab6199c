"""What `freeze` did: bytes before and after, and how much was lost."""

from __future__ import annotations

import dataclasses
import math
import shutil
from typing import Any

import keras
import numpy as np

from keras_policy_ext.conversion import summary, tables
from keras_policy_ext.conversion.report import Report, report_as
from keras_policy_ext.conversion.tables import Column, Table
from keras_policy_ext.stored_kernels import StoredKernel

_KERNELS = (
    Column("kernel", path=True, above=True),
    Column("before", right=True),
    Column("now", right=True),
    Column("SQNR in dB", right=True),
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A kernel that was stored.

    Attributes:
        path: Of the kernel.
        bytes_before: As it was.
        bytes_after: Of its codes and scales.
        sqnr_db: Signal to quantization noise ratio of the kernel, decibels.
    """

    path: str
    bytes_before: int
    bytes_after: int
    sqnr_db: float

    @classmethod
    def of(
        cls, kernel: keras.Variable, value: Any, stored: StoredKernel
    ) -> Stored:
        """The entry of a kernel.

        Args:
            kernel: The variable.
            value: Its numbers in float32.
            stored: What became of them.
        """
        width = np.dtype("float32").itemsize
        if "16" in keras.backend.standardize_dtype(kernel.dtype):
            width //= 2
        return cls(
            kernel.path,
            value.size * width,
            stored.nbytes,
            _sqnr_db(value, stored.dequantized()),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class FrozenReport(Report):
    """The report of `freeze`: `Report`, and what each kernel is stored as.

    Attributes:
        stored: One entry for each kernel that was stored.
    """

    stored: tuple[Stored, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Bytes of the stored kernels as they were."""
        return sum(each.bytes_before for each in self.stored)

    @property
    def bytes_after(self) -> int:
        """Bytes of their codes and scales."""
        return sum(each.bytes_after for each in self.stored)

    def table(self, full: bool = False, every: str | None = None) -> str:
        """See `Report.table`; the full one has a row for each kernel too."""
        text = super().table(full, every)
        if not full or not self.stored:
            return text
        rows = [
            [
                tables.printable(each.path),
                summary.readable_bytes(each.bytes_before),
                summary.readable_bytes(each.bytes_after),
                f"{each.sqnr_db:.1f}",
            ]
            for each in self.stored
        ]
        width = shutil.get_terminal_size((80, 24)).columns
        return "\n".join([text, "", *Table(_KERNELS, rows).text(width)])

    def as_dict(self) -> dict[str, Any]:
        """`Report.as_dict`, with what was stored."""
        stored = [dataclasses.asdict(each) for each in self.stored]
        return {**super().as_dict(), "stored": stored}

    def _notes(self, full: bool) -> list[str]:
        notes = super()._notes(full)
        return [*notes, *([self.kernels_note()] if self.stored else [])]

    def kernels_note(self) -> str:
        """Bytes before and now, and the kernel that lost most."""
        worst = min(self.stored, key=lambda each: each.sqnr_db)
        return (
            f"Kernels: {summary.readable_bytes(self.bytes_before)} before, "
            f"{summary.readable_bytes(self.bytes_after)} now "
            f"({self.bytes_after / self.bytes_before:.3f}). The least exact "
            f"one, {worst.path!r}, has {worst.sqnr_db:.1f} dB."
        )


def frozen_report(report: Report, stored: list[Stored]) -> FrozenReport:
    """A report of layers, with what became of their kernels."""
    return report_as(FrozenReport, report, stored=tuple(stored))


@dataclasses.dataclass(frozen=True, repr=False)
class ThawedReport(Report):
    """The report of `thaw`: `Report`, and that weights are rounded."""

    def _notes(self, full: bool) -> list[str]:
        layers = summary.counted(len(self.converted), "layer")
        rounded = (
            f"The weights of {layers} are those that `freeze` has rounded "
            "them to; what was lost does not come back."
        )
        return [*super()._notes(full), *([rounded] if self.converted else [])]


def thawed_report(report: Report) -> ThawedReport:
    """A report of layers that were frozen."""
    return report_as(ThawedReport, report)


def _sqnr_db(value: Any, approximation: Any) -> float:
    signal = float(np.linalg.norm(value.astype("float64")))
    noise = float(np.linalg.norm(value - approximation.astype("float64")))
    if not noise:
        return math.inf
    return 20 * math.log10(signal / noise) if signal else -math.inf
