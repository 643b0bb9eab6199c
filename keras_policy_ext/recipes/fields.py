"""Checks of the fields of recipes, with error messages of one form."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import numpy as np

from keras_policy_ext.recipes.quantization import Quantization
from keras_policy_ext.recipes.recipe import Recipe

_FORMATS = {
    "hybrid": ("float8_e4m3fn", "float8_e5m2"),
    "e4m3": ("float8_e4m3fn", "float8_e4m3fn"),
    "hybrid_fnuz": ("float8_e4m3fnuz", "float8_e5m2fnuz"),
    "e4m3fnuz": ("float8_e4m3fnuz", "float8_e4m3fnuz"),
}

FP8_FORMATS = tuple(_FORMATS)
"""The allowed values of a field `fp8_format`.

Each stands for two formats: of inputs and kernels, and of output gradients.
"""

_COUNTERPARTS = {
    "hybrid": "hybrid_fnuz",
    "e4m3": "e4m3fnuz",
    "hybrid_fnuz": "hybrid",
    "e4m3fnuz": "e4m3",
}


def tensorwise(
    fp8_format: str, operand: str, scale_rounding: str = "nearest"
) -> Quantization:
    """Return an operand's `Quantization` with one scale per tensor."""
    forward, gradient = _FORMATS[fp8_format]
    return Quantization(
        format=gradient if operand == "outputs_grad" else forward,
        scale_rounding=scale_rounding,
    )


def counterpart(recipe: Recipe) -> Recipe | None:
    """Return the recipe with the formats of OCP and fnuz exchanged, or None."""
    word = getattr(recipe, "fp8_format", None)
    if word not in _COUNTERPARTS:
        return None
    changes: dict[str, Any] = {"fp8_format": _COUNTERPARTS[word]}
    return dataclasses.replace(recipe, **changes)


def put(recipe: Recipe, field: str, value: object) -> None:
    """Set a field of a frozen recipe; for use in its `__post_init__`."""
    object.__setattr__(recipe, field, value)


def integer(
    recipe: Recipe, field: str, minimum: int, maximum: int | None = None
) -> None:
    """Make a recipe's field an int; raise if it is out of range."""
    value = getattr(recipe, field)
    allowed = f"an integer >= {minimum}"
    if maximum is not None:
        allowed = f"an integer from {minimum} to {maximum}"
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(wrong(recipe, field, allowed))
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(wrong(recipe, field, allowed)) from error
    if number < minimum or (maximum is not None and number > maximum):
        raise ValueError(wrong(recipe, field, allowed))
    put(recipe, field, number)


def boolean(recipe: Recipe, field: str, or_none: bool = False) -> None:
    """Make a recipe's field a bool, or None if allowed; raise for others."""
    value = getattr(recipe, field)
    if or_none and value is None:
        return
    if not isinstance(value, (bool, np.bool_)):
        allowed = "True, False or None" if or_none else "True or False"
        raise TypeError(wrong(recipe, field, allowed))
    put(recipe, field, bool(value))


def is_open(recipe: Recipe) -> bool:
    """Return True if a recipe leaves `power_of_two` to the device."""
    return getattr(recipe, "power_of_two", False) is None


@functools.lru_cache(maxsize=256)
def settled(recipe: Recipe, power_of_two: bool) -> Recipe:
    """Return a recipe with `power_of_two` filled in, if that is None.

    Other recipes are returned unchanged.
    """
    if not is_open(recipe):
        return recipe
    changes: dict[str, Any] = {"power_of_two": power_of_two}
    return dataclasses.replace(recipe, **changes)


def choice(recipe: Recipe, field: str, allowed: tuple[str, ...]) -> None:
    """Raise if a recipe's field is not one of the allowed strings."""
    value = getattr(recipe, field)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(wrong(recipe, field, " or ".join(map(repr, allowed))))
    put(recipe, field, str(value))


def wrong(recipe: Recipe, field: str, allowed: str) -> str:
    """Return an error message: a recipe's field has a wrong value."""
    value = getattr(recipe, field)
    defaults = {each.name: each.default for each in dataclasses.fields(recipe)}
    return (
        f"Wrong {field} of {type(recipe).__name__}. Received: {value!r} (of "
        f"type {type(value).__name__}). Allowed: {allowed}. Leave it out for "
        f"the default {defaults[field]!r}."
    )
