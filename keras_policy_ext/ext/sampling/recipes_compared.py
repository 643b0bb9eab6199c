"""The recipes of a comparison, and a recipe that rounds nothing."""

from __future__ import annotations

from typing import Any

from keras_policy_ext import recipes as recipes_
from keras_policy_ext.recipes import Recipe

NOTHING_ROUNDED = recipes_.CurrentScaling(
    forward="high_precision",
    inputs_grad="high_precision",
    kernel_grad="high_precision",
)


def short(recipe: str) -> str:
    """Return a recipe's name without its fields, if that is long."""
    return recipe if len(recipe) < 12 else recipe.partition("(")[0] + "(…)"


def read_recipes(asked: Any) -> list[Recipe]:
    """Return the recipes in the argument `recipes`, each once.

    Raises:
        ValueError: If there is none, or one does not train.
    """
    if asked is None:
        asked = recipes_.names()
    if isinstance(asked, (str, Recipe)):
        asked = [asked]
    found = list(dict.fromkeys(map(recipes_.get, asked)))
    if not found or not all(recipe.trains for recipe in found):
        raise ValueError(
            "`recipes` are not recipes for training. Received: "
            f"{asked!r}. Allowed: one or more of "
            f"{', '.join(recipes_.names())}, or None for all of them. Pass "
            "their names."
        )
    return found
