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

FILES = 338
"""Of the package. Lower it when there are fewer."""

CORE_FILES = 143
"""Of what is no extension."""

SHARE_OF_ANY = 0.11
"""Of the parameters with a type."""

STEP = {
    "torch": {
        "forward": (139, 27),
        "backward": (74, 18),
        "update": (75, 12),
        "new_slot_forward": (139, 27),
        "default_forward": (124, 23),
        "default_backward": (69, 14),
        "default_update": (0, 0),
    },
    "jax": {
        "gradient": (53, 16),
        "new_slot_gradient": (54, 16),
        "default_gradient": (45, 14),
    },
    "tensorflow": {
        "gradient": (74, 14),
        "new_slot_gradient": (75, 14),
        "default_gradient": (60, 11),
    },
}
"""Under delayed scaling, and under the default recipe."""

FRAMES = 10
"""From the call of a Dense to its cast, on PyTorch; none more."""

PROGRAMS = {
    "torch": {
        "convert": (2201, 54),
        "load_model": (1485, 46),
        "sample": (1395, 39),
    },
    "jax": {
        "convert": (2084, 54),
        "load_model": (1481, 45),
        "sample": (1339, 37),
    },
    "tensorflow": {
        "convert": (2204, 53),
        "load_model": (1381, 44),
        "sample": (1200, 34),
    },
}
"""Calls of functions of the package, and the files that they are in."""


CLIMBS = 80
"""Of `load_model` from a room to a higher one; none more."""


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
def test_the_package_and_its_core_have_no_more_files():
    size = calls_counted.size_of_package()
    limits = {"files": FILES, "core_files": CORE_FILES}
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


def test_loading_does_not_go_up_and_down_between_rooms():
    assert 0 < counts()["climbs"] <= CLIMBS


def test_convert_load_model_and_a_sample_make_no_more_calls():
    check(counts(), PROGRAMS[keras.backend.backend()])
