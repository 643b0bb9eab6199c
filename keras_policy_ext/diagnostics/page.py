"""One HTML page without anything from elsewhere: no script, font or image."""

from __future__ import annotations

import html
from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto;
  max-width: 76rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .55rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
tbody th { font-weight: 500; }
th:first-child, td:nth-child(2), td:last-child { text-align: left; }
svg { width: 11rem; height: 2.6rem; display: block; }
polyline { fill: none; stroke: #3b7dd8; stroke-width: 1.5; }
text { font-size: 9px; fill: currentColor; }
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


def line_plot(points: Sequence[tuple[float, float]]) -> str:
    """Return a small plot as SVG, with the least and the largest value."""
    if not points:
        return ""
    (first, *_), (least, most) = (
        sorted(x for x, _ in points),
        (min(y for _, y in points), max(y for _, y in points)),
    )
    width = (max(x for x, _ in points) - first) or 1.0
    height = (most - least) or 1.0
    line = " ".join(
        f"{130 * (x - first) / width:.1f},{36 - 32 * (y - least) / height:.1f}"
        for x, y in points
    )
    return (
        f'<svg viewBox="0 0 176 40"><polyline points="{line}"/>'
        f'<text x="134" y="9">{most:.3g}</text>'
        f'<text x="134" y="38">{least:.3g}</text></svg>'
    )
