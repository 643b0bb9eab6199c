"""The demo from the first step to the last line."""

from __future__ import annotations

import functools
import pathlib
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from keras_policy_ext.diagnostics import machine, plots
from keras_policy_ext.diagnostics.demo import report, train
from keras_policy_ext.diagnostics.demo.settings import Settings
from keras_policy_ext.diagnostics.demo.text import Corpus, load


class Prepared(NamedTuple):
    """All that the demo needs, checked; the folder exists."""

    settings: Settings
    corpus: Corpus
    folder: pathlib.Path


class Outcome(NamedTuple):
    """What the demo leaves behind: a run for each precision, and files."""

    runs: list[train.Run]
    plot: pathlib.Path
    csv: pathlib.Path


def prepare(settings: Settings) -> Prepared:
    """Check what can be checked before training; make the output folder.

    Raises:
        ValueError: If matplotlib is missing, the text cannot be read or is
            too short, or the folder cannot be made.
    """
    plots.require_matplotlib()
    corpus = load(settings.text, settings.size.context)
    folder = pathlib.Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"Cannot make the folder {folder}: {reason}.") from (
            error
        )
    return Prepared(settings, corpus, folder)


def run(prepared: Prepared, console: Console | None = None) -> Outcome:
    """Train in every precision, print the tables, write the files."""
    settings, corpus, folder = prepared
    console = console or Console()
    console.print(_introduction(settings, corpus), highlight=False)
    runs = _train_all(settings, corpus, console)
    console.print(report.results(runs))
    for trained in runs:
        if trained.matmuls:
            console.print(report.matmuls(trained))
    outcome = Outcome(
        runs,
        folder / f"demo_{machine.backend()}.png",
        folder / f"demo_{machine.backend()}.csv",
    )
    report.write_csv(runs, outcome.csv)
    _plot(settings, outcome)
    console.print(f"Plot: {outcome.plot}\nLosses: {outcome.csv}")
    return outcome


def _introduction(settings: Settings, corpus: Corpus) -> str:
    count = len(corpus.train) + len(corpus.validation)
    return (
        f"{_where()}, device {machine.device()}. Text: {corpus.source}, "
        f"{count:,} characters, {corpus.tokens} different tokens. "
        f"{settings.steps} steps of {settings.windows} windows of "
        f"{settings.size.context} characters, seed {settings.seed}, recipe "
        f"{settings.recipe}."
    )


def _where() -> str:
    backend = machine.backend()
    return f"{backend} {machine.version_of(backend)}"


def _train_all(
    settings: Settings, corpus: Corpus, console: Console
) -> list[train.Run]:
    weights = train.initial_weights(corpus, settings)
    compared = train.policies_compared(settings.recipe)
    runs = []
    with _progress(console) as progress:
        tasks = {
            name: progress.add_task(name, total=settings.steps, loss="")
            for name in compared
        }
        for name, policy in compared.items():
            progress.reset(tasks[name])
            advance = functools.partial(_advance, progress, tasks[name])
            runs.append(
                train.train(name, policy, corpus, settings, weights, advance)
            )
    return runs


def _advance(progress: Progress, task: TaskID, loss: float) -> None:
    progress.update(task, advance=1, loss=f"loss {loss:.3f}")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _plot(settings: Settings, outcome: Outcome) -> None:
    curves = {run.precision: run.validation for run in outcome.runs}
    baseline = curves[train.BASELINE]
    gaps = {
        name: {
            step: 100.0 * (loss / baseline[step] - 1.0)
            for step, loss in curve.items()
        }
        for name, curve in curves.items()
    }
    title = f"A small transformer learns English text, {_where()}"
    plots.loss_curves(curves, gaps, title, outcome.plot)
