"""The package stays small, and a step asks little: see `calls_counted`."""

import keras
import pytest

import calls_counted

FILES, LINES = 199, 47_900
"""Of the package. Lower them when it gets smaller."""

SHARE_OF_ANY = 0.15
"""Of the parameters with a type."""

STEP = {
    "torch": {"forward": (179, 25), "backward": (101, 16), "update": (75, 12)},
    "jax": {"gradient": (339, 25)},
    "tensorflow": {"gradient": (88, 12)},
}
PROGRAMS = {
    "torch": {"convert": (5390, 53), "load_model": (3080, 51)},
    "jax": {"convert": (4270, 51), "load_model": (3080, 51)},
    "tensorflow": {"convert": (4830, 51), "load_model": (2650, 49)},
}
"""Calls of functions of the package, and the files that they are in."""


def check(found, allowed):
    """Fail where a figure has grown by more than a tenth."""
    grown = {
        name: (tuple(count), allowed[name])
        for name, count in found.items()
        if any(
            now > 1.1 * before
            for now, before in zip(count, allowed[name], strict=True)
        )
    }
    assert not grown


@pytest.mark.any_backend
def test_the_package_has_not_grown_by_a_tenth():
    size = calls_counted.size_of_package()
    assert size["files"] <= 1.1 * FILES
    assert size["lines"] <= 1.1 * LINES


@pytest.mark.any_backend
def test_parameters_have_types():
    assert calls_counted.share_of_any() <= 1.1 * SHARE_OF_ANY


def test_a_step_makes_no_more_calls_and_opens_no_more_files():
    check(calls_counted.steady_step(), STEP[keras.backend.backend()])


def test_convert_and_load_model_make_no_more_calls():
    check(calls_counted.programs(), PROGRAMS[keras.backend.backend()])
