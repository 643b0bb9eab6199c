"""The base of all recipes, and their registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from keras_policy_ext import formats
from keras_policy_ext.recipes import quantization as data
from keras_policy_ext.recipes.quantization import (
    MATMULS,
    OPERANDS,
    Quantization,
    matmuls_of,
)

REGISTRY: dict[str, type[Recipe]] = {}
"""The recipes by name, in the order of their definition."""

_R = TypeVar("_R", bound="Recipe")


class Recipe:
    """Base of all recipes.

    Subclasses are frozen keyword-only dataclasses that set `name` and, where
    one scale for a tensor in e4m3fn is not what they want, `quantization`.
    Equality, hash, config and repr come from their fields. A subclass with a
    `__post_init__` calls that of the base after its own checks.

    Attributes:
        name: The name used in strings, e.g. `"delayed"`.
        granularity: What one scale belongs to: `"tensorwise"`, `"rowwise"` or
            `"blockwise"`.

    Raises:
        ValueError: If the quantizations of a recipe do not go together, or
            this version cannot carry them out.
    """

    name: ClassVar[str]
    granularity: ClassVar[str] = "tensorwise"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _register(cls)

    def __post_init__(self) -> None:
        check(self)

    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """What becomes of an operand in a matmul.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
            matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`, one that
                reads the operand.

        Returns:
            The quantization; None for both operands of a matmul that is to be
            done in the compute dtype. Here: whole tensors in e4m3fn.
        """
        return Quantization(format=formats.ALIASES["e4m3"])

    @property
    def history_length(self) -> int:
        """Length of the amax history per operand; 0 for stateless recipes."""
        return 0

    @property
    def scale_options(self) -> dict[str, Any]:
        """Keyword arguments for `scale_from_amax`: margin, power_of_two."""
        return {"margin": 0, "power_of_two": False}

    @property
    def for_activations(self) -> Recipe:
        """The recipe for products without a kernel, which have no state.

        Each tensor is scaled by its own amax, in the formats of this recipe.
        """
        wide = self.format_of("outputs_grad") != self.format_of("inputs")
        current: Any = REGISTRY["current"]
        recipe: Recipe = current(fp8_format="hybrid" if wide else "e4m3")
        return recipe

    def format_of(self, operand: str) -> str:
        """The ml_dtypes name of an operand's format.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.

        Returns:
            The exact name, e.g. `"float8_e4m3fn"`: that of the first matmul
            which quantizes the operand, and e4m3fn where none does.

        Raises:
            ValueError: If there is no such operand.
        """
        if operand not in OPERANDS:
            raise ValueError(
                f"Unknown operand of a matmul. Received: {operand!r}. "
                f"Allowed: {', '.join(OPERANDS)}. The matmuls (forward, "
                "inputs_grad, kernel_grad) have no format of their own."
            )
        asked = (self.quantization(operand, m) for m in matmuls_of(operand))
        found = [each.format for each in asked if each is not None]
        return found[0] if found else formats.ALIASES["e4m3"]

    def get_config(self) -> dict[str, Any]:
        """The fields as a dict of Python literals."""
        return {f.name: getattr(self, f.name) for f in fields_of(type(self))}

    @classmethod
    def from_config(cls: type[_R], config: Mapping[str, Any]) -> _R:
        """Build the recipe from `get_config()`.

        Raises:
            TypeError: If the config is no dict.
            ValueError: If it has an unknown field.
        """
        if not isinstance(config, Mapping):
            raise TypeError(no_recipe(config))
        allowed = [field.name for field in fields_of(cls)]
        unknown = sorted(set(config) - set(allowed))
        if unknown:
            raise ValueError(
                f"Unknown parameter of recipe {cls.name!r}. "
                f"Received: {', '.join(map(str, unknown))}. "
                f"Allowed: {', '.join(allowed) or 'none'}. Correct the name "
                "or leave the parameter out."
            )
        return cls(**config)

    @property
    def spec(self) -> str:
        """The compact string used in policy names; `parse` reads it back.

        `""` for the default (delayed, 1024), `"16"` for delayed scaling with
        that history length, otherwise `name` or `name(field=value,…)` with
        the fields that differ from their defaults, in field order.
        """
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields_of(type(self))
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({','.join(changed)})" if changed else self.name


def check(recipe: Recipe) -> None:
    """Raise if a recipe asks for what cannot be carried out.

    Raises:
        ValueError: If one operand of a matmul is in float8 and the other is
            not, both are in e5m2, they have two Hadamard sizes, a recipe
            with a history has finer tiles than whole tensors, or a
            quantization is one that this version does not compute.
    """
    for matmul, operands in MATMULS.items():
        first, second = (recipe.quantization(o, matmul) for o in operands)
        fault = _fault(first, second)
        asked = (q for q in (first, second) if q is not None)
        if recipe.history_length and not all(q.tile.is_whole for q in asked):
            fault = "a history has one amax for a tensor: Tile() only"
        if fault:
            raise ValueError(
                f"Recipe {recipe!r} cannot be carried out: {fault}. Received "
                f"for {matmul}: {first!r} and {second!r}. Allowed: None for "
                f"both operands, or {_computed_words()}. Change "
                "`quantization` of the recipe."
            )


def _fault(first: Quantization | None, second: Quantization | None) -> str:
    if first is None or second is None:
        both = first is None and second is None
        return "" if both else "one operand is in float8 and the other is not"
    if first.format == second.format == formats.ALIASES["e5m2"]:
        return "no hardware multiplies e5m2 by e5m2"
    if first.hadamard != second.hadamard:
        return "the Hadamard transforms of two operands cancel only in pairs"
    unknown = (_not_computed(first), _not_computed(second))
    return next(filter(None, unknown), "")


_COMPUTED: dict[str, tuple[Any, ...]] = {
    "format": tuple(formats.ALIASES.values()),
    "scale_format": data.SCALE_FORMATS[:1],
    "scale_rounding": data.SCALE_ROUNDINGS[:2],
    "rounding": data.ROUNDINGS[:1],
    "hadamard": (None,),
}
"""The quantizations that this version computes, by attribute."""


def _not_computed(asked: Quantization) -> str:
    """What of a quantization this version cannot compute."""
    for name, allowed in _COMPUTED.items():
        if getattr(asked, name) not in allowed:
            words = " or ".join(map(str, allowed))
            return f"this version computes {name} {words} and no other"
    return ""


def _computed_words() -> str:
    return ", ".join(
        f"{name} {' or '.join(map(str, allowed))}"
        for name, allowed in _COMPUTED.items()
    )


def _register(cls: type[Recipe]) -> None:
    known = REGISTRY.get(cls.name)
    same = known is not None and (
        (known.__module__, known.__qualname__)
        == (cls.__module__, cls.__qualname__)
    )
    if known is not None and not same:
        raise ValueError(
            f"Two recipes want the name {cls.name!r}. Received: "
            f"{cls.__module__}.{cls.__qualname__}, already taken by "
            f"{known.__module__}.{known.__qualname__}. Allowed: a name not "
            f"in {', '.join(REGISTRY)}. Give the new recipe another `name`."
        )
    REGISTRY[cls.name] = cls


def fields_of(cls: type[Recipe]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a recipe, in order."""
    return dataclasses.fields(cls)  # type: ignore[arg-type]


def no_recipe(identifier: object) -> str:
    """The message for what means no recipe."""
    return (
        "Cannot interpret this as a recipe. Received: "
        f"{identifier!r} (of type {type(identifier).__name__}). Allowed: a "
        "recipe object, a name or spec string, a config dict, or None for "
        "the default where one is asked for. Pass for instance "
        "recipes.CurrentScaling() or 'current'."
    )
