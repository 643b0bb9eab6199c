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

from keras_policy_ext import recipes
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
    """What the demo leaves behind: runs by precision and seed, and files."""

    runs: list[train.Run]
    plot: pathlib.Path
    csv: pathlib.Path


def prepare(settings: Settings) -> Prepared:
    """Check what can be checked before training; make the output folder.

    Raises:
        ValueError: If matplotlib is missing, the text cannot be read or is
            too short, a recipe does not exist, or a folder cannot be made.
    """
    plots.require_matplotlib()
    corpus = load(settings.text, settings.size.context)
    for spec in settings.recipes:
        recipes.parse(spec)
    folder = pathlib.Path(settings.out)
    _make(folder)
    if settings.json is not None:
        _make(pathlib.Path(settings.json).parent)
    return Prepared(settings, corpus, folder)


def _make(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"Cannot make the folder {folder}: {reason}.") from (
            error
        )


def run(prepared: Prepared, console: Console | None = None) -> Outcome:
    """Train in every precision, print the tables, write the files."""
    settings, corpus, folder = prepared
    console = console or Console()
    console.print(_introduction(settings, corpus), highlight=False)
    runs = _train_all(settings, corpus, console)
    console.print(report.results(runs))
    console.print(report.matmuls(runs))
    outcome = Outcome(
        runs,
        folder / f"demo_{machine.backend()}.png",
        folder / f"demo_{machine.backend()}.csv",
    )
    report.write_csv(runs, outcome.csv)
    _plot(outcome)
    console.print(f"Plot: {outcome.plot}\nLosses: {outcome.csv}")
    if settings.json is not None:
        report.write_json(runs, settings, pathlib.Path(settings.json))
        console.print(f"Numbers: {settings.json}")
    return outcome


def _introduction(settings: Settings, corpus: Corpus) -> str:
    count = len(corpus.train) + len(corpus.validation)
    seeds = ", ".join(map(str, settings.seeds))
    return (
        f"{_where()}, device {machine.device()}. Text: {corpus.source}, "
        f"{count:,} characters, {corpus.tokens} different tokens. "
        f"{settings.steps} steps of {settings.windows} windows of "
        f"{settings.size.context} characters, seed {seeds}, recipe "
        f"{', '.join(settings.recipes)}."
    )


def _where() -> str:
    backend = machine.backend()
    return f"{backend} {machine.version_of(backend)}"


def _train_all(
    settings: Settings, corpus: Corpus, console: Console
) -> list[train.Run]:
    starts = [train.draw(corpus, settings, seed) for seed in settings.seeds]
    compared = train.policies_compared(*settings.recipes)
    total = settings.steps * len(starts)
    runs = []
    with _progress(console, max(map(len, compared))) as progress:
        tasks = {
            name: progress.add_task(name, total=total, loss="")
            for name in compared
        }
        for name, policy in compared.items():
            progress.reset(tasks[name])
            advance = functools.partial(_advance, progress, tasks[name])
            runs += [
                train.train(name, policy, corpus, settings, start, advance)
                for start in starts
            ]
    return runs


def _advance(progress: Progress, task: TaskID, loss: float) -> None:
    progress.update(task, advance=1, loss=f"loss {loss:.3f}")


def _progress(console: Console, width: int) -> Progress:
    return Progress(
        TextColumn(f"{{task.description:<{width}}}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _plot(outcome: Outcome) -> None:
    curves = {
        name: [run.validation for run in own]
        for name, own in report.by_precision(outcome.runs).items()
    }
    title = f"A small transformer learns English text, {_where()}"
    plots.loss_curves(curves, train.BASELINE, title, outcome.plot)
