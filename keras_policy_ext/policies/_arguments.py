"""The constructor arguments that exclude one another."""

from collections.abc import Mapping
from typing import Any

from keras_policy_ext import recipes

RecipeLike = recipes.Recipe | str | Mapping[str, Any] | None
"""What `recipes.get` takes."""


class DefaultLength(int):
    """The default history length, told from an explicit one by its type."""


DEFAULT_LENGTH = DefaultLength(recipes.DelayedScaling().amax_history_length)


def mode_first(
    source: object, args: tuple[Any, ...], mode: object, length: int
) -> tuple[object, int]:
    """Sort out the two ways to write the constructor's arguments."""
    explicit_length = not isinstance(length, DefaultLength)
    if len(args) > 2 or (args and mode) or (args[1:] and explicit_length):
        raise TypeError(
            "Float8DTypePolicy got too many arguments. Received: "
            f"{(source, *args)!r}. Allowed: (source_name), or Keras's older "
            "form ('float8', source_name, amax_history_length). Pass the "
            "rest as keywords, each once."
        )
    if args:
        mode, source, length = source, args[0], (*args[1:], length)[0]
    elif isinstance(source, str) and source == "float8" and mode is None:
        mode, source = source, None
    if mode not in (None, "float8"):
        raise ValueError(
            f"Wrong mode of a Float8DTypePolicy. Received: {mode!r}. "
            "Allowed: 'float8', as the first of two positional arguments or "
            "as `mode`. Pass recipe and history length as keywords, and use "
            "keras.dtype_policies for other quantization modes."
        )
    return source, length


def merge_recipes(
    named: recipes.Recipe | None, recipe: RecipeLike, length: int
) -> recipes.Recipe:
    """One recipe out of the name's, the recipe's and the length's."""
    said = [named] if named is not None else []
    explicit_length = not isinstance(length, DefaultLength)
    if explicit_length:
        delayed = recipes.DelayedScaling(amax_history_length=length)
        length = delayed.amax_history_length
        if recipe == delayed.name or (recipe is None and named is None):
            recipe = delayed
    if recipe is not None:
        said.append(recipes.get(recipe))
    if not said:
        return recipes.DelayedScaling()
    if explicit_length and said[-1].history_length != length:
        raise ValueError(_conflict(said, length))
    if said[0] != said[-1]:
        raise ValueError(_conflict(said, None))
    return said[0]


def _conflict(said: list[recipes.Recipe], length: int | None) -> str:
    parts = [repr(recipe) for recipe in said]
    if length is not None:
        parts.append(f"amax_history_length={length}")
    return (
        "Name, recipe and history length of a Float8DTypePolicy disagree. "
        f"Received: {' and '.join(parts)}. Allowed: one of them, or values "
        "that agree. Say it once."
    )
