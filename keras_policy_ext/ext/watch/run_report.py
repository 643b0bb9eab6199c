"""What a run in float8 was like: a table that fits on a screen, and a page."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from keras_policy_ext.ext.sampling.page import (
    cell_of,
    in_percent,
    line_plot,
    name_of,
    page,
    shade,
    table_of_operands,
)
from keras_policy_ext.ext.sampling.samples import KEYS, Row, Samples
from keras_policy_ext.reports import BaseReport, Column, Table, counted

TITLE = "Float8 over steps"

_FRACTIONS = {
    "saturated_fraction": "saturated",
    "underflow_fraction": "underflow",
    "zero_fraction": "zeros",
}


_SHOWN = ("sqnr_db", "saturated_fraction", "underflow_fraction", "amax")


class RunReport(BaseReport):
    """The last figures of each operand, the lowest SQNR first; `page` has all.

    Args:
        samples: The samples of the run.
    """

    _every = "Every operand: report.table(full=True); plots: report.page()"

    def __init__(self, samples: Samples):
        self._samples = samples

    def _count(self) -> int:
        return len(self._samples.last())

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        """Yield a sentence on the samples, a table of operands, and notes."""
        rows = self._samples.last()
        if not rows and not self._samples.unexamined:
            yield "No sample was taken."
            return
        yield _heading(self._samples)
        columns = [
            Column("layer", apart=True),
            Column("operand"),
            *(
                Column(heading, right=True)
                for heading in ("SQNR dB", "saturated", "underflow", "amax")
            ),
        ]
        has_notes = any(map(_note, rows))
        if has_notes:
            columns.append(Column("note"))
        shown = rows
        if not full:
            shown = sorted(rows, key=_level)[:number]
        cells = [
            [
                _name(row),
                row["operand"],
                *(_text(name, row[name]) for name in _SHOWN),
                *([_note(row)] if has_notes else []),
            ]
            for row in shown
        ]
        yield Table(columns, cells)
        if left := len(rows) - len(shown):
            yield f"and {left} more"
        if bad := sorted({r["layer"] for r in rows if r["nonfinite"]}):
            yield f"Infinite or NaN values: {', '.join(bad)}."
        if missing := self._samples.unexamined:
            items = list(missing.items())[: None if full else 3]
            words = "; ".join(f"{path}: {why}" for path, why in items)
            layers = counted(len(missing), "layer")
            yield f"Without figures: {layers}. {words}."

    def as_dict(self) -> dict[str, Any]:
        """Return the rows of all samples in memory, of JSON types."""
        return {
            "samples": self._samples.history(),
            "unexamined": dict(self._samples.unexamined),
        }

    def page(self) -> str:
        """Return one HTML page with figures and plots, without a network."""
        return page(TITLE, self.html(full=True))

    def html(self, full: bool = False, every: str = "") -> str:
        """Return the report as HTML; with `full`, as figures and plots.

        Args:
            full: Whether to include everything.
            every: As for `table`.
        """
        rows = self._samples.last()
        if not full or not rows:
            return super().html(full, every)
        over_steps = "<th class=text>over steps</th>"
        heads = ["<th>SQNR dB</th>", over_steps, "<th>amax</th>", over_steps]
        others = (*_FRACTIONS.values(), "scale", "kurtosis")
        heads += [f"<th>{each}</th>" for each in others]
        table = table_of_operands(
            heads,
            (
                (_name(row), row["operand"], _note(row), self._cells(row))
                for row in rows
            ),
        )
        notes = "".join(
            f"<li>{html.escape(f'{path}: {why}')}</li>"
            for path, why in self._samples.unexamined.items()
        )
        if notes:
            notes = f"<h2>Layers without figures</h2><ul>{notes}</ul>"
        heading = f"<p>{_heading(self._samples)}</p>"
        return f"{heading}{table}{notes}{_WORDS}"

    def _cells(self, row: Row) -> str:
        key = row["layer"], row["kernel"], row["operand"]
        sqnr = self._samples.curve(key, "sqnr_db")
        amax = self._samples.curve(key, "amax", "peak_amax")
        cells = [
            cell_of(_text("sqnr_db", row["sqnr_db"]), shade(row["sqnr_db"])),
            f"<td>{line_plot(sqnr)}</td>",
            cell_of(_text("amax", row["amax"])),
            f"<td>{line_plot(amax, log=True)}</td>",
            *(cell_of(_text(name, row[name])) for name in _FRACTIONS),
            *(
                cell_of(_text(name, row[name]))
                for name in ("scale", "kurtosis")
            ),
        ]
        return "".join(cells)


_WORDS = (
    "<p>SQNR: the signal-to-quantization-noise ratio; –: no value changes. "
    "amax: the largest magnitude. Its plot is logarithmic, and under delayed "
    "scaling it has the largest amax of all steps since the sample before. "
    "Saturated and underflow: nonzero values that round beyond the largest "
    "number of the format, or to 0. Kurtosis: 3 for normal numbers, more with "
    "rare and large outliers.</p>"
)


def _heading(samples: Samples) -> str:
    operands = counted(len(samples.last()), "operand")
    taken = counted(len(samples), "sample")
    return f"{operands} of float8 layers at step {samples.last_step}; {taken}."


def _level(row: Row) -> float:
    level = row["sqnr_db"]
    return float("inf") if level is None else float(level)


def _name(row: Row) -> str:
    return name_of(*(str(row[key]) for key in KEYS[:2]))


def _note(row: Row) -> str:
    bad = f"{row['nonfinite']:.0f} not finite" if row["nonfinite"] else ""
    uses = f"{row['uses']} uses" if row["uses"] > 1 else ""
    return ", ".join(filter(None, (row["note"], bad, uses)))


def _text(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name in _FRACTIONS:
        return in_percent(value)
    return f"{value:.1f}" if name == "sqnr_db" else f"{value:.3g}"
