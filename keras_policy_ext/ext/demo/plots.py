"""Draw plots with matplotlib, which is an optional dependency."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

COLORS = (
    "#4c566a",
    "#3b7dd8",
    "#e07b39",
    "#2a9d5c",
    "#b0479b",
    "#c9a227",
    "#c0392b",
    "#17a2b8",
)
STYLES = ("-", "--", ":", "-.")

Curves = Mapping[str, Sequence[Mapping[int, float]]]
"""Losses by step, for each seed, by name."""


def require_matplotlib() -> None:
    """Raise if matplotlib is not installed, without importing it.

    Raises:
        ValueError: If it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "matplotlib, which draws the plot, is not installed; get it with "
            "pip install keras-policy-ext[demo]"
        )


def loss_curves(
    curves: Curves, baseline: str, title: str, path: pathlib.Path
) -> None:
    """Draw validation losses, and below them the gaps to a baseline, as PNG.

    With several seeds it draws the mean losses, and the range of the gaps as
    an area. All points are within the axes. The legend has each name with the
    gap after the last step.

    Args:
        curves: Losses in nats per character.
        baseline: The name of the curves that the gaps are measured from.
        title: The title above the plot.
        path: The path of the file.
    """
    from matplotlib.figure import Figure

    relative = gaps(curves, baseline)
    many = len(curves) > 3
    figure = Figure(
        figsize=(9.0, 7.0) if many else (7.0, 5.0), layout="constrained"
    )
    heights = (4, 5) if many else (5, 2)
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw(losses, curves, spread=False)
    _draw(below, relative, spread=True)
    losses.set_title(title)
    losses.set_ylabel("validation loss, nats/character")
    losses.legend(
        losses.get_lines(),
        _labels(relative, baseline),
        title=f"gap to {baseline} at the end",
        loc="upper right",
        frameon=False,
    )
    below.axhline(0.0, color="#999999", linewidth=0.8)
    below.set_ylabel("gap, %")
    below.set_xlabel("training step")
    for axes in (losses, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def gaps(curves: Curves, baseline: str) -> dict[str, list[dict[int, float]]]:
    """Return by how many percent losses exceed the baseline of equal seed."""
    return {
        name: [
            {step: 100.0 * (y / base[step] - 1.0) for step, y in points.items()}
            for points, base in zip(seeds, curves[baseline], strict=True)
        ]
        for name, seeds in curves.items()
    }


def _labels(relative: Curves, baseline: str) -> list[str]:
    """Return the legend's labels: each name with the mean gap at the end."""
    last = {
        name: np.mean([list(points.values())[-1] for points in seeds])
        for name, seeds in relative.items()
    }
    return [
        name if name == baseline else f"{name}: {gap:+.2f} %"
        for name, gap in last.items()
    ]


def _draw(axes: Any, curves: Curves, spread: bool) -> None:
    for place, (name, seeds) in enumerate(curves.items()):
        steps = list(seeds[0])
        values = np.array([list(points.values()) for points in seeds])
        color = COLORS[place % len(COLORS)]
        axes.plot(
            steps,
            values.mean(0),
            label=name,
            color=color,
            linestyle=STYLES[place % len(STYLES)],
            marker="o",
            markersize=3.5,
            linewidth=2.0,
        )
        if spread and len(seeds) > 1:
            least, most = values.min(0), values.max(0)
            axes.fill_between(
                steps, least, most, color=color, alpha=0.12, linewidth=0
            )
