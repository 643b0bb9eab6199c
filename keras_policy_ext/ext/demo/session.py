"""Run the whole demo: check, train, print and write files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from keras_policy_ext import recipes
from keras_policy_ext.ext.demo import plots, report, train
from keras_policy_ext.ext.demo.settings import Settings
from keras_policy_ext.ext.demo.text import Corpus, load
from keras_policy_ext.ext.sampling import machine

LINES = 10
"""The number of progress lines per precision without a terminal."""


class Prepared(NamedTuple):
    """The demo's settings, its text and the output folder, all checked."""

    settings: Settings
    corpus: Corpus
    folder: pathlib.Path


class Outcome(NamedTuple):
    """The training runs of the demo, and the paths of its plot and CSV file."""

    runs: list[train.Run]
    plot: pathlib.Path
    csv: pathlib.Path


def prepare(settings: Settings) -> Prepared:
    """Check the demo's settings, load its text, and make the output folder.

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
    """Train the demo in every precision, print tables, and write files."""
    settings, corpus, folder = prepared
    console = console or Console()
    console.print(_introduction(settings, corpus), highlight=False)
    settings = in_time(settings, corpus, console)
    runs = _train_all(settings, corpus, console)
    for part in (
        "",
        *report.results(runs).text(console.width),
        *("", report.caption(runs), ""),
        *report.matmuls(runs).text(console.width),
        "",
    ):
        console.print(part, highlight=False, markup=False)
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
    console.print(report.conclusion(runs), highlight=False)
    return outcome


def in_time(settings: Settings, corpus: Corpus, console: Console) -> Settings:
    """Return the settings, with fewer steps if training would take too long."""
    compared = train.policies_compared(*settings.recipes)
    start = train.draw(corpus, settings, settings.seeds[0])
    found = train.forecast(compared, corpus, settings, start)
    if found is None:
        return settings
    steps = found.steps(settings) if settings.may_shorten else settings.steps
    told = train.told(found, settings, steps)
    console.print(told, highlight=False)
    return dataclasses.replace(settings, steps=steps)


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
    with show_progress(console, compared, total) as advance:
        for name, policy in compared.items():
            runs += [
                train.train(
                    name,
                    policy,
                    corpus,
                    settings,
                    start,
                    functools.partial(advance, name),
                )
                for start in starts
            ]
    return runs


Advance = Callable[[str, float], None]
"""Called after each step with the name of the precision and the loss."""


@contextlib.contextmanager
def show_progress(
    console: Console, names: Iterable[str], total: int
) -> Iterator[Advance]:
    """In the block, show progress: bars in a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield _lines(console, total)
        return
    width = max(map(len, names))
    with _bars(console, width) as progress:
        tasks = {n: progress.add_task(n, total=total, loss="") for n in names}
        started = set()

        def advance(name: str, loss: float) -> None:
            if name not in started:  # Its time starts with its first step.
                started.add(name)
                progress.reset(tasks[name])
            progress.update(tasks[name], advance=1, loss=f"loss {loss:.3f}")

        yield advance


def _lines(console: Console, total: int) -> Advance:
    """Return a function that prints a line after each tenth of the steps."""
    taken: Counter[str] = Counter()
    began: dict[str, float] = {}

    def advance(name: str, loss: float) -> None:
        taken[name] += 1
        done = taken[name]
        now = time.perf_counter()
        passed = now - began.setdefault(name, now)
        if done * LINES // total > (done - 1) * LINES // total:
            console.print(
                f"{name}: step {done} of {total}, loss {loss:.3f}, "
                f"{passed:.0f} s",
                highlight=False,
                markup=False,
            )

    return advance


def _bars(console: Console, width: int) -> Progress:
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
