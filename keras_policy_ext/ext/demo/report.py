"""Print the results of the demo, and write CSV and JSON files."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from keras_policy_ext.ext.demo.settings import Settings
from keras_policy_ext.ext.demo.train import BASELINE, Matmul, Run
from keras_policy_ext.ext.sampling import machine
from keras_policy_ext.reports import Column, Table, counted

CSV_COLUMNS = (
    "precision",
    "policy",
    "seed",
    "step",
    "training_loss",
    "validation_loss",
)


def by_precision(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group training runs by the name of their precision."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.precision, []).append(run)
    return found


def gaps(runs: Sequence[Run], baselines: Sequence[Run]) -> list[float]:
    """Return each run's gap in percent to the baseline run of equal seed."""
    of_seed = {run.seed: run for run in baselines}
    return [run.gap_percent(of_seed[run.seed]) for run in runs]


def results(runs: Sequence[Run]) -> Table:
    """Return a table of losses and speeds, with a row for each precision."""
    columns = (
        Column("precision"),
        Column("loss", right=True),
        Column("gap to bfloat16", right=True, wraps=True),
        Column("steps/s", right=True),
        Column("state", right=True),
        Column("in float8", wraps=True),
    )
    title = "Validation loss in nats per character"
    return Table(columns, result_rows(runs), title)


def caption(runs: Sequence[Run]) -> str:
    """Return the text that explains the columns of the `results` table."""
    seeds = {run.seed for run in runs}
    means = f"means of {len(seeds)} seeds, and the least and largest gap. "
    return (means if len(seeds) > 1 else "") + (
        "steps/s: of the median step; compilation and validation are left "
        "out. state: bytes of scales, histories and counters"
    )


def result_rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the rows of the `results` table, one for each precision."""
    found = by_precision(runs)
    return [
        (
            name,
            f"{statistics.fmean(run.validation_loss for run in own):.4f}",
            "–" if name == BASELINE else _spread(gaps(own, found[BASELINE])),
            _steps_per_second(own),
            f"{own[0].state_bytes:,}",
            _kinds(own[0].matmuls),
        )
        for name, own in found.items()
    ]


def _spread(percent: list[float]) -> str:
    mean = f"{statistics.fmean(percent):+.2f} %"
    if len(percent) == 1:
        return mean
    return f"{mean} ({min(percent):+.2f} … {max(percent):+.2f})"


def _steps_per_second(runs: list[Run]) -> str:
    known = [run.steps_per_second for run in runs if run.steps_per_second]
    return f"{statistics.median(known):.2f}" if known else "–"


def conclusion(runs: Sequence[Run]) -> str:
    """Return sentences that compare the float8 losses with bfloat16."""
    found = by_precision(runs)
    bases = found[BASELINE]
    means = {
        name: statistics.fmean(gaps(own, bases))
        for name, own in found.items()
        if own[0].matmuls
    }
    steps = len(runs[0].losses)
    kinds = {m.kind for run in runs for m in run.matmuls}
    how = {
        frozenset({"native"}): "Its matmuls ran natively.",
        frozenset({"emulated"}): "Its matmuls were emulated, which shows what "
        "float8 training computes and not how fast it is.",
    }.get(frozenset(kinds), "Some of its matmuls ran natively.")
    if len(means) == 1:
        ((name, gap),) = means.items()
        return (
            f"After {counted(steps, 'step')} the validation loss in {name} is "
            f"{_compared(gap)} the one in {BASELINE}. {how}"
        )
    best, worst = (f(means, key=lambda n: means[n]) for f in (min, max))
    return (
        f"After {counted(steps, 'step')} the validation losses in float8 are "
        f"from {_compared(means[best])} (under {best}) to "
        f"{_compared(means[worst])} (under {worst}) the one in {BASELINE}. "
        f"{how}"
    )


def _compared(gap: float) -> str:
    side = "below" if gap < 0 else "above"
    return f"{abs(gap):.2f} % {side}"


def matmuls(runs: Sequence[Run]) -> Table:
    """Return a table of the model's matmuls: native or emulated, and why."""
    found = by_precision(run for run in runs if run.matmuls)
    title = "Matmuls in the forward pass"
    if len(found) == 1:
        ((only, *_),) = found.values()
        title = f"Matmuls under {only.policy}"
    columns = [
        Column(heading, wraps=heading not in ("contraction", "kernel"))
        for heading in ("recipes", "layers", "contraction", "kernel", "why")
    ]
    rows = matmul_rows({n: own[0].matmuls for n, own in found.items()})
    return Table(columns, rows, title)


def matmul_rows(
    found: dict[str, tuple[Matmul, ...]],
) -> list[tuple[str, ...]]:
    """Return the rows of the `matmuls` table; equal rows are merged."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for precision, own in found.items():
        for row in _rows_of_layers(own):
            shared.setdefault(row, []).append(precision)
    return [(", ".join(names), *row) for row, names in shared.items()]


def _rows_of_layers(matmuls: tuple[Matmul, ...]) -> list[tuple[str, ...]]:
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


def write_csv(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Write the loss of every step of every run to a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for run in runs:
            head = (run.precision, run.policy, run.seed)
            for step, loss in enumerate((None, *run.losses)):
                validation_loss = run.validation.get(step)
                writer.writerow((*head, step, loss, validation_loss))


def write_json(
    runs: Sequence[Run], settings: Settings, path: pathlib.Path
) -> None:
    """Write results, machine and settings of the demo to a JSON file."""
    baselines = by_precision(runs)[BASELINE]
    content = {
        "machine": machine.facts(),
        "settings": dataclasses.asdict(settings),
        "runs": [
            {
                "precision": run.precision,
                "policy": run.policy,
                "seed": run.seed,
                "validation_loss": run.validation_loss,
                "gap_to_bfloat16_percent": gaps([run], baselines)[0],
                "validation": run.validation,
                "steps_per_second": run.steps_per_second,
                "state_bytes": run.state_bytes,
                "matmuls": [dataclasses.asdict(m) for m in run.matmuls],
            }
            for run in runs
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _kinds(matmuls: tuple[Matmul, ...]) -> str:
    counts = Counter(matmul.kind for matmul in matmuls)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"
