"""Damage in files of weights: entries that are gone, or other than written."""

import contextlib
import itertools

import h5py
import numpy as np

from steps import numpy


def replaced(key, value):
    """Return a change of an HDF5 group: another value, or one of the old."""

    def damage(group):
        old = group[key][()]
        del group[key]
        group[key] = value(old) if callable(value) else value

    return damage


def added(key, value):
    def damage(group):
        group[key] = value

    return damage


def removed(*keys):
    def damage(group):
        for key in keys:
            del group[key]

    return damage


def of_amaxes(scales, histories, length):
    """Return damages of scales and histories, which take turns."""
    scale, history = itertools.cycle(scales), itertools.cycle(histories)
    amaxes = np.ones(length, "float32")
    of_scales = {
        "NaN scale": np.float32(np.nan),
        "inf scale": np.float32(np.inf),
        "negative scale": np.float32(-1),
        "vector scale": np.ones(3, "float32"),
        "text": "one",
    }
    of_histories = {
        "NaN in history": amaxes * np.nan,
        "inf in history": amaxes * np.inf,
        "negative history": -amaxes,
        "too large for float32": np.full(length, 1e300),
        "scalar history": np.float32(1),
        "history of two axes": np.ones((2, 2), "float32"),
        "history without entries": np.ones(0, "float32"),
        "integers": np.ones(length, "int32"),
    }
    return {
        **{name: replaced(next(scale), x) for name, x in of_scales.items()},
        **{
            name: replaced(next(history), x) for name, x in of_histories.items()
        },
    }


def change(path, group, damage):
    """Damage a group of a file of weights, by its name."""
    with h5py.File(path, "a") as file:
        damage(file[group])


@contextlib.contextmanager
def unchanged(variables):
    """After the block, the variables have the values that they had before."""
    before = [numpy(variable) for variable in variables]
    yield
    for value, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))
