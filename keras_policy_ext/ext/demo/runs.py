"""Run the whole demo: check, train, print a table and draw a plot."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from collections.abc import Callable

from keras_policy_ext.ext.demo import train
from keras_policy_ext.ext.demo.text import Corpus, load
from keras_policy_ext.ext.sampling import machine


def prepare(settings: train.Settings) -> Callable[[], dict[str, train.Run]]:
    """Load the text, make the output folder; return what runs the demo.

    Raises:
        ValueError: If matplotlib is missing, the text cannot be read or is
            too short, or the folder cannot be made.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "matplotlib, which draws the plot, is not installed; get it with "
            "pip install keras-policy-ext[demo]"
        )
    corpus = load(settings.text, settings.context)
    folder = pathlib.Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot make the folder {folder}: {error}") from error
    plot = folder / f"demo_{machine.backend()}.png"
    return functools.partial(run, settings, corpus, plot)


def run(
    settings: train.Settings, corpus: Corpus, plot: pathlib.Path
) -> dict[str, train.Run]:
    """Train in every precision, print a table and draw a plot of the losses."""
    where = f"{machine.backend()} {machine.version_of(machine.backend())}"
    print(f"{where}, device {machine.device()}. Seed {settings.seed}.")
    if machine.slowdown() >= machine.SLOW:
        print("bfloat16 is slow on this machine. `--steps` takes fewer steps.")
    weights, runs = train.draw(corpus, settings), {}
    for name, policy in train.policies_compared(*settings.recipes).items():
        runs[name] = train.train(policy, corpus, settings, weights, name)
    print("\nprecision      validation loss  gap to bfloat16  steps/s  float8")
    base = runs[train.BASELINE].validation_loss
    for name, run in runs.items():
        gap = 100.0 * (run.validation_loss / base - 1.0)
        print(
            f"{name:<15}{run.validation_loss:15.4f}{gap:+15.2f} %"
            f"{run.steps_per_second or 0:9.2f}  {run.kernels}"
        )
    draw(runs, f"A small transformer learns English text, {where}", plot)
    print(f"Plot: {plot}")
    return runs


def draw(runs: dict[str, train.Run], title: str, path: pathlib.Path) -> None:
    """Write a PNG file of validation losses and their gaps to bfloat16's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 5.0), layout="constrained")
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    base = runs[train.BASELINE].validation
    for place, (name, run) in enumerate(runs.items()):
        curve = run.validation
        gaps = [100.0 * (loss / base[step] - 1) for step, loss in curve.items()]
        style = {"marker": "o", "linestyle": ("-", "--", ":", "-.")[place % 4]}
        losses.plot(list(curve), list(curve.values()), **style)
        label = name if run.validation is base else f"{name}: {gaps[-1]:+.2f} %"
        below.plot(list(curve), gaps, label=label, **style)
    losses.set(title=title, ylabel="validation loss, nats/character")
    below.set(ylabel="gap, %", xlabel="training step")
    names = [line.get_label() for line in below.get_lines()]
    losses.legend(names, title=f"gap to {train.BASELINE} at the end")
    figure.savefig(path, dpi=120)
