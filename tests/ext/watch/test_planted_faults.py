"""Planted faults are named: layer, operand and first step.

`integration/recipes/train_with_faults.py` has them all, at full length.
"""

import dataclasses

import pytest

from cases import SLOW
from planted_faults import FAULTS, named, run

START = 4
QUICK = ("shared_layer", "nan_batch")


@pytest.mark.full_except("shared_layer")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else SLOW)
        for name, fault in FAULTS.items()
        if not fault.slow
    ],
)
def test_a_fault_is_named(name):
    fault = FAULTS[name]
    start = min(fault.start, START)
    steps = start + (8 if fault.operand == "kernel" else 3)
    fault = dataclasses.replace(fault, start=start, steps=steps)
    found = run(fault, "watched")
    assert not [each for each in found.warnings if each.step < start]
    warning = named(fault, found.warnings)
    # A shared scale is of earlier steps, so that there is none in the first.
    assert warning.since <= start + 1


@pytest.mark.full
def test_no_warning_without_a_fault():
    fault = dataclasses.replace(FAULTS["assigned_kernel"], steps=8)
    assert run(fault, "watched", planted=False).warnings == []
