"""What the demo prints and the CSV file that it writes."""

from __future__ import annotations

import csv
import pathlib
import re
from collections import Counter

from rich.table import Table

from keras_policy_ext.diagnostics.demo.train import BASELINE, Matmul, Run

CSV_COLUMNS = (
    "precision",
    "policy",
    "step",
    "training_loss",
    "validation_loss",
)


def results(runs: list[Run]) -> Table:
    """One row for each precision."""
    table = Table(
        title="Validation loss in nats per character",
        caption="steps/s: of the median step; compilation and validation "
        "are left out",
    )
    table.add_column("precision")
    for heading in (
        "validation loss",
        "gap to bfloat16",
        "steps/s",
        "in float8",
    ):
        table.add_column(heading, justify="right")
    for row in result_rows(runs):
        table.add_row(*row)
    return table


def result_rows(runs: list[Run]) -> list[tuple[str, ...]]:
    """The cells of `results`."""
    baseline = next(run for run in runs if run.precision == BASELINE)
    return [
        (
            run.precision,
            f"{run.validation_loss:.4f}",
            "–" if run is baseline else f"{run.gap_percent(baseline):+.2f} %",
            f"{run.steps_per_second:.2f}" if run.steps_per_second else "–",
            _kinds(run.matmuls),
        )
        for run in runs
    ]


def matmuls(run: Run) -> Table:
    """Which matmuls of the model ran native or emulated, and why."""
    table = Table(title=f"Matmuls under {run.policy}")
    table.add_column("layers", overflow="fold")
    table.add_column("contraction", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in matmul_rows(run.matmuls):
        table.add_row(*row)
    return table


def matmul_rows(matmuls: tuple[Matmul, ...]) -> list[tuple[str, ...]]:
    """The cells of `matmuls`: those that are alike share a row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for matmul in matmuls:
        key = (matmul.equation.replace(" ", ""), matmul.kind, matmul.reason)
        name = re.sub(r"^block_\d+_", "", matmul.layer)
        alike.setdefault(key, []).append(name)
    return [
        (
            ", ".join(dict.fromkeys(names)),
            equation,
            f"{len(names)} {kind}",
            reason,
        )
        for (equation, kind, reason), names in alike.items()
    ]


def write_csv(runs: list[Run], path: pathlib.Path) -> None:
    """Write every loss in full precision, one line for each step."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for run in runs:
            for step, loss in enumerate((None, *run.losses)):
                writer.writerow(
                    (
                        run.precision,
                        run.policy,
                        step,
                        loss,
                        run.validation.get(step),
                    )
                )


def _kinds(matmuls: tuple[Matmul, ...]) -> str:
    counts = Counter(matmul.kind for matmul in matmuls)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"
