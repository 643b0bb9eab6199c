"""Trains with each planted fault, and prints what names it and what it costs.

    KERAS_BACKEND=torch python integration/recipes/planted_faults.py [FAULT ...]

For each fault: the loss on other examples after training in 16 bits, in float8,
and in float8 with the autopilot, which looks at every batch; when the loss of
the float8 run is 3 % above the one of 16 bits without the fault, both over ten
steps on the same batches; and the first warning that names the layer and the
operand.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests"))

from planted_faults import FAULTS, named, run


def mean_of_ten(losses):
    return np.convolve(losses, np.ones(10) / 10, "valid")


def shown(fault, losses, clean):
    """The step at which a loss is 3 % above another, or "–"."""
    worse = mean_of_ten(losses) > 1.03 * mean_of_ten(clean)
    steps = np.flatnonzero(worse) + 10
    return next((str(step) for step in steps if step >= fault.start), "–")


def row(fault):
    exact = run(fault, "16 bits")
    clean = run(fault, "16 bits", planted=False)
    plain, steered = run(fault, "plain"), run(fault, "autopilot")
    losses = [
        f"{each.final:.4f} ({each.final / exact.final - 1:+.2%})"
        for each in (plain, steered)
    ]
    warning = named(fault, steered.warnings)
    words = "not named"
    if warning is not None:
        words = f"{warning.step}, since {warning.since}: {warning.sign}"
    return [
        fault.name,
        str(fault.start),
        words,
        shown(fault, plain.losses, clean.losses),
        f"{exact.final:.4f}",
        *losses,
        str(len(steered.decisions)),
    ]


HEADS = (
    "fault",
    "from step",
    "named at step",
    "loss shows it",
    "16 bits",
    "float8",
    "autopilot",
    "decisions",
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=list(FAULTS))
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    for name in parser.parse_args().faults:
        print(f"| {' | '.join(row(FAULTS[name]))} |", flush=True)
