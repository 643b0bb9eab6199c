"""Reports that compare recipes, and a recipe that rounds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from keras_policy_ext import recipes as recipes_
from keras_policy_ext.recipes import Recipe
from keras_policy_ext.reports import BaseReport

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


class OfRecipe(Protocol):
    """An entry of a report that has one for each recipe."""

    @property
    def recipe(self) -> str:
        """The recipe, as in the names of policies."""


_Entry = TypeVar("_Entry", bound=OfRecipe)


class RecipesReport(BaseReport, Generic[_Entry]):
    """The base of reports with an entry for each recipe, in `recipes`."""

    recipes: tuple[_Entry, ...]

    def __getitem__(self, recipe: str) -> _Entry:
        """Return the entry of the recipe with this name.

        Raises:
            KeyError: If no entry has this name.
        """
        for entry in self.recipes:
            if entry.recipe == recipe:
                return entry
        raise KeyError(f"{recipe!r}; there are {[e.recipe for e in self]}")

    def __iter__(self) -> Iterator[_Entry]:
        """Yield the entries of all recipes."""
        return iter(self.recipes)
