"""Reports: text as wide as the terminal, HTML in a notebook, and a dict."""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import rich.cells
import rich.table
import rich.text
from rich.console import Console

__all__ = [
    "EVERY",
    "BaseReport",
    "Column",
    "Table",
    "amount",
    "counted",
    "percent",
    "readable_bytes",
]

LINES = 24
"""The number of lines that fit on one screen."""

EVERY = "Every layer: report.table(full=True)"
"""The sentence of a short text on how to see all layers."""

NARROW = 18
"""The minimum width of columns with sentences, in characters."""

COMFORTABLE = 28
"""Their minimum width if a path can be put above its row instead."""

Cells = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Column:
    """The heading, alignment and wrapping of a table column."""

    heading: str
    right: bool = False  # Whether its cells are aligned to the right.
    # Whether its cells are wrapped. If even that is too wide, the cells of the
    # last column are put below their rows.
    wraps: bool = False
    # Whether its cells are put above their rows if the columns do not fit side
    # by side; for the first column only.
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text: columns, rows and a title."""

    # The layout of the columns. Without headings there is no line below them.
    columns: Sequence[Column]
    rows: Sequence[Cells | str]  # The rows from top to bottom.
    title: str = ""  # The title above the headings.
    spaced: bool = False  # Whether blank lines separate the rows.

    def text(self, width: int, most: int | None = None) -> list[str]:
        """Return the table as lines; a wrapped cell has at most `most` lines.

        No word is cut: a table may be wider. An ellipsis marks what is cut off.
        """
        columns, rows, heading_rows = list(self.columns), list(self.rows), 0
        if self.spaced:
            rows = [part for row in rows for part in ("", row)][1:]
        has_headings = any(column.heading for column in columns)
        if has_headings and not all(isinstance(row, str) for row in rows):
            rows, heading_rows = [[c.heading for c in columns], *rows], 1
        gaps = len(columns) - 1
        least = sum(_least_widths(columns, rows, COMFORTABLE))
        # Put the first cell of each row, also of the headings, above its row.
        if columns[0].apart and least + 2 * gaps > width:
            columns[0] = Column("")
            rows = _split_rows(rows, lambda row: (row[0], ["", *row[1:]]))
            heading_rows *= 2
        least = sum(_least_widths(columns, rows))
        # Put the last cell of each row below its row.
        if columns[-1].wraps and least + gaps > width:
            del columns[-1]
            rows = _split_rows(rows, lambda row: (row[:-1], "    " + row[-1]))
            heading_rows += bool(heading_rows)
        gaps = len(columns) - 1
        gap = 2 if sum(_least_widths(columns, rows)) + 2 * gaps <= width else 1
        widths = _widths(columns, rows, width - gap * gaps)
        lines = wrap(self.title, width)
        heads, others = rows[:heading_rows], rows[heading_rows:]
        if heads:
            lines += _lines(columns, heads, widths, gap, width)
            lines.append("─" * (sum(widths) + gap * gaps))
        return lines + _lines(columns, others, widths, gap, width, most)

    def html(self) -> str:
        """Return the whole table as the HTML element `<table>`."""
        title = html.escape(printable(self.title))
        caption = f"<caption>{title}</caption>" if title else ""
        heads = self._html("th", [column.heading for column in self.columns])
        body = "".join(self._html("td", row) for row in self.rows)
        return (
            f"<table>{caption}<thead>{heads}</thead>"
            f"<tbody>{body}</tbody></table>"
        )

    def _html(self, tag: str, row: Cells | str) -> str:
        """Return a row of cells `td` or `th`; a text spans all columns."""
        if isinstance(row, str):
            cell = _element(tag, Column(""), row, len(self.columns))
            return f"<tr>{cell}</tr>"
        pairs = zip(self.columns, row, strict=True)
        return f"<tr>{''.join(_element(tag, *pair) for pair in pairs)}</tr>"


class BaseReport:
    """The base class of all reports: text, HTML and a dict.

    `str` and `repr` return its text, and a notebook shows its HTML.
    Dataclasses that derive from it need `repr=False`, because Python would
    otherwise give each a `repr` of its fields.
    """

    _every: ClassVar[str] = ""
    """The sentence of the short text on how to see everything."""

    def _count(self) -> int:
        """Return the number of table rows that the short text may leave out."""
        return 0

    def _parts(self, full: bool, number: int) -> Iterable[str | Table]:
        """Yield the sentences and tables of the report, from top to bottom.

        The short text has `number` of the rows that may be left out.
        """
        raise NotImplementedError

    def table(self, full: bool = False, every: str | None = None) -> str:
        """Return the report as text: short, or in full.

        Args:
            full: Whether to include everything. False: as much as fits on one
                screen.
            every: The sentence of the short text on how to see everything.

        Returns:
            Lines; wider than the terminal only if a single word is.
        """
        count = self._count()
        if full:
            return "\n".join(_text(self._parts(True, count)))
        every = every or self._every
        # Shorten the cells first, to ever fewer lines, and then leave out rows.
        for most in (None, 5, 4, 3, 2):
            lines = _text(_with(self._parts(False, count), every), most)
            if len(lines) <= LINES or not count:
                break
        while len(lines) > LINES and count > 1:
            # At `most=2` lines a cell, a row has three lines at most.
            count = max(1, count - max(1, (len(lines) - LINES) // 3))
            lines = _text(_with(self._parts(False, count), every), most=2)
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict of JSON types."""
        fields: Any = self
        return _as_json(dataclasses.asdict(fields))

    def __repr__(self) -> str:  # Also what `str` returns.
        return self.table()

    def _repr_html_(self) -> str:
        """Return the report as HTML for a notebook, with all text escaped."""
        return self.html(every=self._every)

    def html(self, full: bool = False, every: str = "") -> str:
        """Return the report as HTML, with all text escaped.

        Args:
            full: Whether to include everything, or what fits on one screen.
            every: The sentence of the short text on how to see everything.
        """
        return "".join(
            part.html()
            if isinstance(part, Table)
            else f"<p>{html.escape(printable(part))}</p>"
            for part in _with(self._parts(full, self._count()), every)
        )


def percent(part: float, whole: float) -> str:
    """Format a share as "12.3 %"; "0 %" and "100 %" only if exact."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    share = 100 * part / whole
    if share < 0.1:
        return "<0.1 %"
    return ">99.9 %" if share > 99.9 else f"{share:.1f} %"


def amount(number: int) -> str:
    """Format a count, such as "950,000", "1.23M" or "4.56G"."""
    for factor, sign in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if number >= factor:
            return f"{number / factor:.3g}{sign}"
    return f"{number:,}"


def readable_bytes(number: int) -> str:
    """Format a number of bytes with three digits and a unit."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number} B"


def counted(number: int, noun: str) -> str:
    """Format a number with a noun: "1 layer", "2 layers"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def printable(text: str) -> str:
    """Replace the characters of a text that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for sign in text
    )


class _Sentences(textwrap.TextWrapper):
    """A text wrapper that breaks lines at blanks, not before a percent sign."""

    wordsep_simple_re = re.compile(r"( +(?!%))")


class _Cells(textwrap.TextWrapper):
    """A text wrapper that breaks lines after "/" and in policy names too."""

    wordsep_simple_re = re.compile(r"( +(?!%))|(?<=/)|(?<=_from_)")


def wrap(
    text: str,
    width: int,
    most: int | None = None,
    wrapper: type[textwrap.TextWrapper] = _Cells,
) -> list[str]:
    """Wrap a text to this width; "…" marks the end after `most` lines."""
    text = printable(text)
    indent = " " * (len(text) - len(text.lstrip()))
    return wrapper(
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most,
        placeholder="…",
    ).wrap(text)


def _text(parts: Iterable[str | Table], most: int | None = None) -> list[str]:
    """Return report parts as lines, with a blank line around each table."""
    width = shutil.get_terminal_size((80, 24)).columns
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Table):
            if lines and lines[-1]:
                lines.append("")
            lines += [*part.text(width, most), ""]
        else:
            lines += wrap(part, width, wrapper=_Sentences)
    return lines[:-1] if lines and not lines[-1] else lines  # No last blank.


def _with(parts: Iterable[str | Table], every: str) -> list[str | Table]:
    """Append the sentence `every` to report parts if there is a table."""
    listed = list(parts)
    is_more = every and any(isinstance(part, Table) for part in listed)
    return [*listed, every] if is_more else listed


def _split_rows(
    rows: Iterable[Cells | str],
    split: Callable[[Cells], tuple[Cells | str, Cells | str]],
) -> list[Cells | str]:
    """Split each row of cells in two; leave out a part of blank text."""
    parts: list[Cells | str] = []
    for row in rows:
        if isinstance(row, str):
            parts.append(row)
        else:
            two = split(row)
            parts += [x for x in two if not isinstance(x, str) or x.strip()]
    return parts


def _least_widths(
    columns: Sequence[Column], rows: Iterable[Cells | str], narrow: int = NARROW
) -> list[int]:
    """Return the minimum width of each column, from its cells."""
    cells = [row for row in rows if not isinstance(row, str)]
    return [
        max((_least_width(column, row[n], narrow) for row in cells), default=0)
        for n, column in enumerate(columns)
    ]


def _least_width(column: Column, cell: str, narrow: int) -> int:
    """Return the minimum width of a cell; a cell that wraps can be narrow."""
    length = rich.cells.cell_len(printable(cell))
    if not column.wraps:
        return length
    # At least its longest word, and `narrow` if it has several words.
    words = [rich.cells.cell_len(word) for word in wrap(cell, width=1)]
    return max([min(length, narrow) if " " in cell else 0, *words])


def _widths(
    columns: Sequence[Column], rows: Sequence[Cells | str], width: int
) -> list[int]:
    """Return the column widths; the widest are narrowed until all fit."""
    least = _least_widths(columns, rows)
    # Columns that do not wrap are as wide as their longest cell.
    widths = _least_widths([Column("")] * len(columns), rows)
    while sum(widths) > width:
        can_shrink = [n for n, size in enumerate(widths) if size > least[n]]
        if not can_shrink:
            break
        widths[max(can_shrink, key=widths.__getitem__)] -= 1
    return widths


def _lines(
    columns: Sequence[Column],
    rows: Sequence[Cells | str],
    widths: Sequence[int],
    gap: int,
    width: int,
    most: int | None = None,
) -> list[str]:
    """Return table rows as lines of text, at these column widths."""
    lines: list[str] = []
    for are_texts, run in itertools.groupby(
        rows, lambda row: isinstance(row, str)
    ):
        if are_texts:  # Rows of one text span all columns.
            wrapped = (wrap(str(text), width, most) or [""] for text in run)
            lines += itertools.chain.from_iterable(wrapped)
            continue
        grid = rich.table.Table.grid(padding=(0, gap, 0, 0))
        for column, size in zip(columns, widths, strict=True):
            side: Any = "right" if column.right else "left"
            grid.add_column(width=size, justify=side, overflow="fold")
        for row in run:
            cells = (
                wrap(cell, size, most) if column.wraps else [printable(cell)]
                for cell, size, column in zip(row, widths, columns, strict=True)
            )
            grid.add_row(*(rich.text.Text("\n".join(cell)) for cell in cells))
        total = sum(widths) + gap * (len(columns) - 1)
        console = Console(
            file=io.StringIO(),
            width=total,
            force_jupyter=False,
            legacy_windows=False,
            color_system=None,
        )
        for line in console.render_lines(grid):
            lines.append("".join(part.text for part in line).rstrip())
    return lines


def _element(tag: str, column: Column, cell: str, span: int = 1) -> str:
    """Return a table cell, `td` or `th`, across `span` columns."""
    side = "right" if column.right else "left"
    style = f'style="text-align: {side}; vertical-align: top"'
    across = f' colspan="{span}"' if span > 1 else ""
    return f"<{tag}{across} {style}>{html.escape(printable(cell))}</{tag}>"


def _as_json(value: Any) -> Any:
    """Return a value with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return value
