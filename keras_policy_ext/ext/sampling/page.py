"""One HTML page without anything from elsewhere: no script, font or image."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto;
  max-width: 76rem; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; }
table { display: block; overflow-x: auto; border-collapse: collapse;
  font-variant-numeric: tabular-nums; overflow-wrap: normal;
  margin-bottom: 1rem; }
caption { text-align: left; font-weight: 600; padding: .4rem .55rem; }
th, td { padding: .2rem .55rem; border-bottom: 1px solid var(--line); }
.figures th, .figures td { text-align: right; white-space: nowrap; }
.figures .text, .figures th:first-child { text-align: left; }
.figures th:first-child { position: sticky; left: 0; background: Canvas;
  white-space: normal; max-width: 20rem; }
th[colspan] span { position: sticky; left: .3rem; }
tbody th { font-weight: 500; }
small { opacity: .75; }
svg { width: 150px; height: 44px; display: block; }
polyline { fill: none; stroke: #3b7dd8; stroke-width: 1.5; }
text { font-size: 10px; fill: currentColor; }
@media (max-width: 30rem) { .figures th, .figures td { padding: .2rem .3rem; } }
"""

_LOW, _HIGH = 5.0, 40.0
"""The SQNR, in dB, of the reddest and of the greenest colour."""


def page(title: str, body: str) -> str:
    """Return a whole page.

    Args:
        title: Its title, as text.
        body: What is below the title, as HTML.
    """
    name = html.escape(title)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{name}</h1>{body}</body></html>\n"
    )


def shade(level: float | None) -> str:
    """Return the style of a cell for an SQNR in dB: red, yellow, green."""
    if level is None:
        return ""
    share = min(max((level - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
    return f"background: hsl({120 * share:.0f} 65% 75%); color: #111"


def table_of_operands(
    heads: Iterable[str], rows: Iterable[tuple[str, str, str, str]]
) -> str:
    """Return a table with a heading for each layer, and below it its operands.

    Args:
        heads: The headings of the columns after the operand, as `<th>`.
        rows: The name of the layer, the operand, a note or "", and the cells,
            as `<td>`.
    """
    heads = ["<th>operand</th>", *heads]
    lines = []
    for layer, own in itertools.groupby(rows, lambda row: row[0]):
        name = re.sub("([/_])", r"\1<wbr>", html.escape(layer))
        across = f"<th colspan={len(heads)}><span>{name}</span></th>"
        lines.append(f"<tr>{across}</tr>")
        for _, operand, note, cells in own:
            about = f"<br><small>{html.escape(note)}</small>" if note else ""
            head = f"<th>{html.escape(operand)}{about}</th>"
            lines.append(f"<tr>{head}{cells}</tr>")
    return (
        f"<table class=figures><thead><tr>{''.join(heads)}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def cell_of(text: str, style: str = "") -> str:
    """Return a table cell with a text, and a style such as `shade` returns."""
    attribute = f' style="{style}"' if style else ""
    return f"<td{attribute}>{html.escape(text)}</td>"


def in_percent(fraction: float) -> str:
    """Return a fraction in percent, such as "0 %", "<0.1 %" or "12.3 %"."""
    if not fraction:
        return "0 %"
    return "<0.1 %" if fraction < 0.001 else f"{100 * fraction:.1f} %"


def name_of(layer: str, kernel: str) -> str:
    """Return the name of a layer, with that of a kernel not named `kernel`."""
    return layer if kernel == "kernel" else f"{layer} {kernel}"


def line_plot(points: Sequence[tuple[float, float]], log: bool = False) -> str:
    """Return a small plot as SVG, with the least and the largest value.

    Args:
        points: From left to right.
        log: Whether the plot is logarithmic; it leaves out values up to 0.
    """
    if log:
        points = [(x, math.log10(y)) for x, y in points if y > 0]
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    levels = [y for _, y in points]
    least, most = min(levels), max(levels)
    # One step, or values that do not change, are a line in the middle.
    if len(points) == 1:
        points = [*points, (last + 1.0, levels[0])]
    width = (points[-1][0] - first) or 1.0
    height = most - least
    line = " ".join(
        f"{100 * (x - first) / width:.1f},"
        f"{36 - 32 * (y - least) / height if height else 20:.1f}"
        for x, y in points
    )
    texts = [(10, most), (39, least)] if height else [(24, most)]
    labels = "".join(
        f'<text x="104" y="{y}">{10**level if log else level:.3g}</text>'
        for y, level in texts
    )
    return (
        f'<svg viewBox="0 0 150 44"><polyline points="{line}"/>{labels}</svg>'
    )
