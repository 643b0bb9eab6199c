"""Draws the charts of docs/benchmarks.md from the committed results.

    python integration/benchmarks/charts.py [--check]

Each is an SVG of horizontal bars, with bfloat16 as a line at 1: drawn by
hand, so that it is the same on every machine. `--check` writes nothing, and
fails where a file is another.
"""

import html
import json
import pathlib
from typing import NamedTuple

from generated import write_or_check

RESULTS = pathlib.Path(__file__).parent / "results"
IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"
FRAMEWORKS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "PyTorch"}
COLOURS = {
    "float8 delayed": "#d9662c",
    "float8 current": "#2f7ed8",
    "stock float8": "#8a8f98",
}
NAMES = {
    "float8 delayed": "delayed scaling",
    "float8 current": "current scaling",
    "stock float8": "Keras's own float8",
}
SPEED = "speedup_over_bfloat16"
WIDTH, LEFT, RIGHT = 480, 150, 46
BAR, GAP, TOP = 15, 10, 62


class Group(NamedTuple):
    """Bars under one label: values by the name of a way to compute."""

    label: str
    values: dict[str, float]


class Chart(NamedTuple):
    """The name of a file, what it says, and its bars."""

    name: str
    title: str
    axis: str
    groups: list[Group]


def rows_of(benchmark, framework):
    path = RESULTS / f"{benchmark}_{framework}_cpu.json"
    return json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []


def by_case(rows, value):
    """Values of the ways that have a colour, by the case."""
    found = {}
    for row in rows:
        if row["variant"] in COLOURS:
            found.setdefault(row["case"], {})[row["variant"]] = value(row)
    return found


def step_times():
    """Times of a training step of one Dense layer on a CPU."""
    groups = [
        Group(f"{name}, {case.removeprefix('layer ')}", values)
        for framework, name in FRAMEWORKS.items()
        for case, values in by_case(
            [
                row
                for row in rows_of("layer", framework)
                if row["case"].startswith("layer")
            ],
            lambda row: 1 / row[SPEED],
        ).items()
    ]
    return Chart(
        "step_time",
        "Time of a step of one Dense layer, CPU, measured",
        "time, bfloat16 = 1 (shorter is better)",
        groups,
    )


def memory():
    """The most memory that a step of twelve blocks holds on a CPU."""
    groups = []
    for framework in ("jax", "torch"):
        found = by_case(
            rows_of("memory", framework), lambda row: row["of_bfloat16"]
        )
        for case, values in found.items():
            if "in turn" in case and "again" not in case:
                activation = case.split(", ")[1]
                name = {"relu": "ReLU", "gelu": "GELU", "swiglu": "SwiGLU"}
                label = f"{FRAMEWORKS[framework]}, {name[activation]}"
                groups.append(Group(label, values))
    return Chart(
        "step_memory",
        "Memory of a step of twelve blocks, CPU, measured",
        "memory, bfloat16 = 1 (shorter is better)",
        groups,
    )


def recipes():
    """Times of a step of one Dense layer under each recipe."""
    groups = [
        Group(row["variant"], {"float8 delayed": 1 / row[SPEED]})
        for row in rows_of("recipes", "jax")
        if row["variant"] != "bfloat16"
    ]
    return Chart(
        "recipes",
        "Time of a step by recipe, JAX on a CPU, measured",
        "time, bfloat16 = 1 (shorter is better)",
        groups,
    )


def charts():
    return [
        step_times(),
        memory(),
        recipes(),
    ]


def svg(chart):
    """The text of the file."""
    most = max(max(group.values.values()) for group in chart.groups)
    scale = (WIDTH - LEFT - RIGHT) / max(1.15, most)
    used = [n for n in COLOURS if any(n in g.values for g in chart.groups)]
    legend = used if len(used) > 1 else []
    top = TOP + (18 if legend else 0)
    parts, y = [], top
    for group in chart.groups:
        middle = y + len(group.values) * BAR / 2 + 4
        parts.append(text(LEFT - 8, middle, group.label, anchor="end"))
        for name in used:
            if name not in group.values:
                continue
            value = group.values[name]
            width = value * scale
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" '
                f'height="{BAR - 2}" fill="{COLOURS[name]}"/>'
            )
            parts.append(text(LEFT + width + 4, y + 11, f"{value:.2f}", 11))
            y += BAR
        y += GAP
    one = LEFT + scale
    line = (
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{top - 6}" y2="{y}" '
        'stroke="#222" stroke-dasharray="3 3"/>'
    )
    height = y + 14
    head = [
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" fill="#222">',
        f"<title>{html.escape(chart.title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(8, 20, chart.title, 15, weight="bold"),
        text(8, 38, chart.axis, 12),
    ]
    x = 8
    for name in legend:
        head.append(
            f'<rect x="{x}" y="48" width="11" height="11" '
            f'fill="{COLOURS[name]}"/>'
        )
        head.append(text(x + 15, 58, NAMES[name], 12))
        x += 130
    return "\n".join([*head, line, *parts, "</svg>"]) + "\n"


def text(x, y, words, size=12, anchor="start", weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" '
        f'text-anchor="{anchor}" font-weight="{weight}" stroke="white" '
        'stroke-width="3" paint-order="stroke">'
        f"{html.escape(words)}</text>"
    )


def main():
    for chart in charts():
        write_or_check(IMAGES / f"{chart.name}.svg", svg(chart))


if __name__ == "__main__":
    main()
