"""Trains with each planted fault, and keeps what names it and what it costs.

    KERAS_BACKEND=torch python integration/recipes/train_with_faults.py \\
        [--seeds 0 1 2] [--results FOLDER] [FAULT ...]

For each fault and seed: the loss on other examples after training in 16 bits,
in float8, and in float8 with the autopilot, which looks at every batch; when
the loss of the float8 run is 3 % above the one of 16 bits without the fault,
both over ten steps on the same batches; and the first warning that names the
layer and the operand. A loss that is not finite is kept as null.

Under `--watch-alone` only the last of these is found, in a run that is watched
from ten steps before the fault on, and ends when it is named.

Every result is appended to `results/planted_faults.json` when it is there, and
one that is there already is not repeated. Then the tables of the file are
printed.

    python integration/recipes/train_with_faults.py --sound [--seeds 0 1 2]

trains sound models instead, under optimizers and learning rates of several
kinds, and prints the warnings, of which there should be none.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sys

import keras
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))

from planted_faults import FAULTS, SOUND, named, run, sound_warnings

RESULTS = pathlib.Path(__file__).parent / "results"
BACKENDS = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}


def mean_of_ten(losses):
    return np.convolve(losses, np.ones(10) / 10, "valid")


def shown(fault, losses, clean):
    """The step at which a loss is 3 % above another; None if it never is."""
    worse = ~(mean_of_ten(losses) <= 1.03 * mean_of_ten(clean))
    steps = np.flatnonzero(worse) + 10
    return next((int(step) for step in steps if step >= fault.start), None)


def result(fault, seed, watch_alone):
    """What is kept of a fault and a seed."""
    if watch_alone:
        found = run(fault, "watched", seed=seed, until_named=True)
        return _named(fault, found.warnings)
    exact = run(fault, "16 bits", seed=seed)
    clean = run(fault, "16 bits", planted=False, seed=seed)
    plain = run(fault, "plain", seed=seed)
    steered = run(fault, "autopilot", seed=seed)
    return {
        **_named(fault, steered.warnings),
        "shown": shown(fault, plain.losses, clean.losses),
        "16 bits": _finite(exact.final),
        "float8": _finite(plain.final),
        "autopilot": _finite(steered.final),
        "decisions": len(steered.decisions),
    }


def _named(fault, warnings):
    warning = named(fault, warnings)
    early = [each for each in warnings if each.step < fault.start]
    return {
        "named": None if warning is None else _kept(warning),
        "first": _kept(warnings[0]) if warnings else None,
        "before": [_kept(each) for each in early],
    }


def _kept(warning):
    names = ("step", "since", "layer", "operand", "sign")
    return {name: getattr(warning, name) for name in names}


def _finite(loss):
    return loss if math.isfinite(loss) else None


def gap(found, way):
    """By how many percent a loss is above that of 16 bits; None without one."""
    exact, loss = found.get("16 bits"), found.get(way)
    return None if None in (exact, loss) else 100 * (loss / exact - 1)


def spread(numbers):
    """The mean of numbers, and the lowest and the highest, in words."""
    if not numbers:
        return "–"
    if None in numbers:
        return "not finite"
    words = f"{statistics.mean(numbers):+.2f}"
    if len(numbers) > 1:
        words += f" ({min(numbers):+.2f} to {max(numbers):+.2f})"
    return words.replace("-", "−").replace("+0.00", "0.00")


def steps(numbers):
    """The lowest and the highest of some steps, in words."""
    words = [str(n) for n in numbers if n is not None]
    if not words:
        return "–"
    ends = sorted({min(words, key=int), max(words, key=int)}, key=int)
    missing = "" if len(words) == len(numbers) else f", {len(words)} runs"
    return "–".join(ends) + missing


def tables(results):
    """Two tables: when each fault was named, and what it costs."""
    names = [
        name for name in FAULTS if any(x["fault"] == name for x in results)
    ]
    heads = ["fault", "begins", *BACKENDS.values(), "the loss shows it"]
    yield _row(heads) + _row(["---"] * len(heads))
    for name in names:
        own = [x for x in results if x["fault"] == name]
        cells = [f"`{name}`", str(FAULTS[name].start)]
        for backend in BACKENDS:
            found = [x["named"] for x in own if x["backend"] == backend]
            known = [x for x in found if x]
            words = "–" if not found else "not named"
            if known:
                words = steps([x and x["step"] for x in found])
                words += f", since {steps([x['since'] for x in known])}"
            cells.append(words)
        yield _row([*cells, steps([x["shown"] for x in own if "16 bits" in x])])
    yield "\n"
    heads = ["fault", "backend", "seeds", "float8, %", "with the autopilot, %"]
    yield _row(heads) + _row(["---"] * len(heads))
    for name in names:
        for backend, title in BACKENDS.items():
            own = [
                x
                for x in results
                if (x["fault"], x["backend"]) == (name, backend)
                and "16 bits" in x
            ]
            if own:
                gaps = [
                    spread([gap(x, way) for x in own])
                    for way in ("float8", "autopilot")
                ]
                yield _row([f"`{name}`", title, str(len(own)), *gaps])


def _row(cells):
    return f"| {' | '.join(cells)} |\n"


def read(folder=RESULTS):
    path = folder / "planted_faults.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else []


def _append(folder, found):
    path = folder / "planted_faults.json"
    lines = ",\n".join(json.dumps(each) for each in [*read(folder), found])
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    unfinished.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    os.replace(unfinished, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--watch-alone", action="store_true")
    parser.add_argument("--sound", action="store_true")
    options = parser.parse_args()
    if options.sound:
        for seed in options.seeds:
            for case in SOUND:
                found = sound_warnings(case, seed)
                print(case, seed, len(found), *found, sep="\n  ", flush=True)
        return
    backend = keras.backend.backend()
    for seed in options.seeds:
        for name in options.faults:
            key = {"fault": name, "backend": backend, "seed": seed}
            known = read(options.results)
            if not any(key.items() <= each.items() for each in known):
                found = {
                    **key,
                    **result(FAULTS[name], seed, options.watch_alone),
                }
                _append(options.results, found)
                print(json.dumps(found), flush=True)
    print(*tables(read(options.results)), sep="")


if __name__ == "__main__":
    main()
