"""Plots, by matplotlib, which is an optional dependency."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

COLORS = ("#4c566a", "#3b7dd8", "#e07b39")
STYLES = ("-", "--", ":")


def require_matplotlib() -> None:
    """Check that there is matplotlib, without importing it.

    Raises:
        ValueError: If there is none.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "matplotlib, which draws the plot, is not installed; get it with "
            "pip install keras-policy-ext[demo]"
        )


def loss_curves(
    curves: Mapping[str, Mapping[int, float]],
    gaps: Mapping[str, Mapping[int, float]],
    title: str,
    path: pathlib.Path,
) -> None:
    """Draw validation losses and, below, their gaps to a baseline, as PNG.

    Args:
        curves: By name of the precision: loss in nats per character by step.
        gaps: Likewise, in percent of the baseline's loss.
        title: Above the plot.
        path: Of the file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 5.0), layout="constrained")
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    _draw(losses, curves, list(curves))
    _draw(below, gaps, list(curves))
    losses.set_title(title)
    losses.set_ylabel("validation loss, nats/character")
    losses.legend(frameon=False)
    below.axhline(0.0, color="#999999", linewidth=0.8)
    below.set_ylabel("gap to bfloat16, %")
    below.set_xlabel("training step")
    for axes in (losses, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _draw(
    axes: Any, curves: Mapping[str, Mapping[int, float]], names: Sequence[str]
) -> None:
    for name, points in curves.items():
        place = names.index(name)
        axes.plot(
            list(points),
            list(points.values()),
            label=name,
            color=COLORS[place % len(COLORS)],
            linestyle=STYLES[place % len(STYLES)],
            marker="o",
            markersize=3.5,
            linewidth=2.0,
        )
