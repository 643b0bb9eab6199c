"""Tables for people: plain text as wide as the terminal, and HTML."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

GAP = "  "

NARROW = 28
"""Sentences are not set in columns that are narrower, in characters."""


@dataclasses.dataclass(frozen=True)
class Column:
    """How the cells of a column are set.

    Attributes:
        heading: Its heading.
        right: Whether its cells stand at its right edge.
        path: Whether its cells are paths, which break after a `/` only; other
            cells break at blanks, and those at a right edge not at all.
        above: Whether its cells go above the rest of their rows where the
            columns do not fit side by side.
    """

    heading: str
    right: bool = False
    path: bool = False
    above: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text, with a cell for each column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]

    def text(self, width: int, most: int | None = None) -> list[str]:
        """The table as lines, of which a cell has at most so many.

        No word is ever cut: a table whose words do not fit is wider. An
        ellipsis stands for what is left out.
        """
        above = [n for n, column in enumerate(self.columns) if column.above]
        if above and sum(self._least()) + self._gaps > width:
            return self._stacked(width, most)
        widths = self._widths(width)
        headings = self._lines([c.heading for c in self.columns], widths, None)
        rule = "─" * (sum(widths) + self._gaps)
        cells = [self._lines(row, widths, most) for row in self.rows]
        return [*headings, rule, *itertools.chain.from_iterable(cells)]

    def html(self) -> str:
        """The table as an HTML element, with nothing left out."""
        heads = (_element("th", c, c.heading) for c in self.columns)
        rows = (
            "".join(
                _element("td", column, cell)
                for column, cell in zip(self.columns, row, strict=True)
            )
            for row in self.rows
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        head = f"<thead><tr>{''.join(heads)}</tr></thead>"
        return f"<table>{head}<tbody>{body}</tbody></table>"

    @property
    def _gaps(self) -> int:
        return len(GAP) * (len(self.columns) - 1)

    def _cells(self, number: int) -> list[str]:
        heading = self.columns[number].heading
        return [heading, *(row[number] for row in self.rows)]

    def _least(self) -> list[int]:
        """How narrow each column may get."""
        return [
            max(_narrowest(cell, column) for cell in self._cells(number))
            for number, column in enumerate(self.columns)
        ]

    def _widths(self, width: int) -> list[int]:
        """Widths of the columns; the widest are cut until all fit."""
        least = self._least()
        widths = [max(map(len, self._cells(n))) for n in range(len(least))]
        while sum(widths) + self._gaps > width:
            spare = [n for n in range(len(least)) if widths[n] > least[n]]
            if not spare:
                break
            widths[max(spare, key=widths.__getitem__)] -= 1
        return widths

    def _lines(
        self, row: Sequence[str], widths: Sequence[int], most: int | None
    ) -> list[str]:
        """The lines of one row."""
        wrapped = [
            _shortened(wrap(cell, width, column.path), width, most)
            for cell, column, width in zip(
                row, self.columns, widths, strict=True
            )
        ]
        return [
            GAP.join(
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, column, width in zip(
                    line, self.columns, widths, strict=True
                )
            ).rstrip()
            for line in itertools.zip_longest(*wrapped, fillvalue="")
        ]

    def _stacked(self, width: int, most: int | None) -> list[str]:
        """The lines with some columns above the others, which are indented."""
        rest = Table(
            [c for c in self.columns if not c.above],
            [self._split(row)[1] for row in self.rows],
        )
        widths = rest._widths(width - len(GAP))
        headings = [column.heading for column in self.columns]
        above, beside = self._split(headings)
        lines = [
            *self._above(above, width, None),
            *(GAP + line for line in rest._lines(beside, widths, None)),
            "─" * (len(GAP) + sum(widths) + rest._gaps),
        ]
        for row in self.rows:
            above, beside = self._split(row)
            lines.extend(self._above(above, width, most))
            cells = rest._lines(beside, widths, most)
            lines.extend(GAP + line for line in cells)
        return lines

    def _split(self, row: Sequence[str]) -> tuple[list[str], list[str]]:
        """The cells that go above, and the others."""
        pairs = list(zip(row, self.columns, strict=True))
        return (
            [cell for cell, column in pairs if column.above],
            [cell for cell, column in pairs if not column.above],
        )

    def _above(
        self, cells: Sequence[str], width: int, most: int | None
    ) -> list[str]:
        """Cells on one line if they fit, else each on its own lines."""
        if not any(cells):
            return []
        together = GAP.join(cells)
        if len(together) <= width:
            return [together]
        columns = [column for column in self.columns if column.above]
        lines = (
            _shortened(wrap(cell, width, column.path), width, most)
            for cell, column in zip(cells, columns, strict=True)
        )
        return list(itertools.chain.from_iterable(lines))


class Page:
    """The base of reports: text where they are printed, HTML in a notebook.

    Dataclasses that derive from it say `repr=False`, or Python would write a
    `repr` of fields for each.
    """

    _page: Callable[[], Iterable[str | Table]]
    """Sentences and tables, from top to bottom, with all rows."""

    table: Callable[..., str]
    """The same as text, as wide as the terminal."""

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """The page for a notebook; everything in it is escaped."""
        return "".join(
            part.html()
            if isinstance(part, Table)
            else f"<p>{html.escape(part)}</p>"
            for part in self._page()
        )


def printable(text: str) -> str:
    """The text on one line, without signs that would steer a terminal."""
    return "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for sign in text
    )


def wrap(text: str, width: int, path: bool = False) -> list[str]:
    """Break a text into lines, and no word in two; at least one line.

    A path breaks after a `/`, and not at blanks.
    """
    lines = [""]
    for word in _words(text, path):
        if lines[-1] and len(lines[-1] + word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def fitted(
    count: int, lines_of: Callable[[int, int | None], list[str]], height: int
) -> list[str]:
    """Leave out as little as is needed to fit on a screen.

    First cells get shorter, down to two lines; then there are fewer rows.

    Args:
        count: How many rows there are.
        lines_of: The lines of a table, for a number of rows and the most lines
            of a cell.
        height: The most lines; more only if one row does not fit.
    """
    tries = [(count, most) for most in (None, 5, 4, 3)]
    tries += [(number, 2) for number in range(count, 0, -1)]
    for number, most in tries:
        lines = lines_of(number, most)
        if len(lines) <= height:
            break
    return lines


def _narrowest(text: str, column: Column) -> int:
    """Paths and numbers stay whole; a sentence is hard to read if narrow."""
    if column.path or column.right:
        return len(text)
    longest = max(len(word.rstrip()) for word in _words(text, path=False))
    return max(longest, min(len(text), NARROW))


def _words(text: str, path: bool) -> list[str]:
    """What is not broken, each with the blanks or the `/` that follow it."""
    unbroken = r"[^/]*/|[^/]+" if path else r"[^ ]+(?: %)? *"
    return re.findall(unbroken, text) or [""]


def _shortened(lines: list[str], width: int, most: int | None) -> list[str]:
    if most is None or len(lines) <= most:
        return lines
    last = lines[most - 1]
    while len(last) >= width and " " in last:
        last = last.rpartition(" ")[0]
    return [*lines[: most - 1], last.rstrip(",; ") + "…"]


def _element(tag: str, column: Column, text: str) -> str:
    side = "right" if column.right else "left"
    style = f'style="text-align: {side}; vertical-align: top"'
    return f"<{tag} {style}>{html.escape(text)}</{tag}>"
