"""The package stays small, and a step asks little: see `calls_counted`."""

import functools
import json
import pathlib

import keras
import pytest

import calls_counted
from processes import run

COUNT = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import calls_counted, json
print(json.dumps(calls_counted.all_counts()))
"""

FILES, LINES = 315, 61_995
"""Of the package. Lower them when it gets smaller."""

CORE_FILES, CORE_LINES = 149, 37_130
"""Of what is no extension."""

SHARE_OF_ANY = 0.11
"""Of the parameters with a type."""

STEP = {
    "torch": {
        "forward": (140, 26),
        "backward": (82, 16),
        "update": (75, 12),
        "new_slot_forward": (140, 26),
    },
    "jax": {"gradient": (57, 16), "new_slot_gradient": (59, 16)},
    "tensorflow": {"gradient": (75, 13), "new_slot_gradient": (77, 13)},
}
FRAMES = 10
"""From the call of a Dense to its cast, on PyTorch; none more."""

PROGRAMS = {
    "torch": {
        "convert": (2291, 56),
        "load_model": (2831, 50),
        "sample": (1657, 39),
    },
    "jax": {
        "convert": (2217, 54),
        "load_model": (2825, 50),
        "sample": (1500, 35),
    },
    "tensorflow": {
        "convert": (2246, 54),
        "load_model": (2699, 49),
        "sample": (1304, 32),
    },
}
"""Calls of functions of the package, and the files that they are in."""


def check(found, allowed):
    """Fail where a figure has grown by more than a tenth."""
    grown = {
        name: (tuple(count), allowed[name])
        for name, count in ((name, found[name]) for name in allowed)
        if any(
            now > 1.1 * before
            for now, before in zip(count, allowed[name], strict=True)
        )
    }
    assert not grown


@pytest.mark.any_backend
def test_the_package_and_its_core_have_not_grown():
    size = calls_counted.size_of_package()
    limits = {
        "files": FILES,
        "lines": int(1.1 * LINES),
        "core_files": CORE_FILES,
        "core_lines": CORE_LINES,
    }
    grown = [
        f"{name}: {size[name]:,}, {size[name] - limit:,} over {limit:,}"
        for name, limit in limits.items()
        if size[name] > limit
    ]
    assert not grown, (
        f"The package has grown ({'; '.join(grown)}). Take out what is not "
        "needed, or move what a step, `convert`, `freeze` and a file do not "
        "need from the core into an extension. If the growth is meant, raise "
        "the limit in this file, and say why in the message of the commit."
    )


@pytest.mark.any_backend
def test_parameters_have_types():
    assert calls_counted.share_of_any() <= 1.1 * SHARE_OF_ANY


@functools.cache
def counts():
    """In a process of its own: what other tests convert is not counted."""
    return json.loads(run(keras.backend.backend(), COUNT))


def test_a_step_makes_no_more_calls_and_opens_no_more_files():
    check(counts(), STEP[keras.backend.backend()])


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="the others compile a pass, so that its frames are of one trace",
)
def test_a_call_reaches_its_cast_through_no_more_frames():
    assert 0 < counts()["frames"] <= FRAMES


def test_convert_load_model_and_a_sample_make_no_more_calls():
    check(counts(), PROGRAMS[keras.backend.backend()])
