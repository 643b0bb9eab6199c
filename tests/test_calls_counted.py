"""The package stays small, and a step asks little: see `calls_counted`."""

import keras
import pytest

import calls_counted

FILES, LINES = 304, 48_900
"""Of the package. Lower them when it gets smaller."""

STEP = {
    "torch": {"forward": (199, 43), "backward": (117, 28), "update": (80, 16)},
    "jax": {"gradient": (424, 39)},
    "tensorflow": {"gradient": (93, 17)},
}
PROGRAMS = {
    "torch": {"convert": (5340, 67), "load_model": (3080, 62)},
    "jax": {"convert": (4210, 65), "load_model": (3080, 61)},
    "tensorflow": {"convert": (4770, 66), "load_model": (2650, 59)},
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


def test_a_step_makes_no_more_calls_and_opens_no_more_files():
    check(calls_counted.steady_step(), STEP[keras.backend.backend()])


def test_convert_and_load_model_make_no_more_calls():
    check(calls_counted.programs(), PROGRAMS[keras.backend.backend()])
