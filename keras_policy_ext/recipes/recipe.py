"""The base of all recipes, and their registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from keras_policy_ext import formats
from keras_policy_ext.recipes.quantization import (
    MATMULS,
    OPERANDS,
    Quantization,
    matmuls_of,
)

REGISTRY: dict[str, type[Recipe]] = {}
"""The recipes by name, in the order of their definition."""

HIGH_PRECISION = "high_precision"
"""Says of a matmul that it is done in the compute dtype."""

_R = TypeVar("_R", bound="Recipe")


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        trains: Whether kernels are trained under it; else they are stored in
            float8 (`FrozenKernels`).
        forward: `"float8"`, or `"high_precision"` to do this matmul in the
            compute dtype.
        inputs_grad: Likewise.
        kernel_grad: Likewise.

    Raises:
        ValueError: If the quantizations of a recipe do not go together, or
            cannot be carried out.
    """

    name: ClassVar[str]
    granularity: ClassVar[str] = "tensorwise"
    trains: ClassVar[bool] = True

    forward: str = "float8"
    inputs_grad: str = "float8"
    kernel_grad: str = "float8"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _register(cls)

    def __post_init__(self) -> None:
        defaults = {each.name: each.default for each in fields_of(type(self))}
        for matmul in MATMULS:
            allowed = (str(defaults[matmul]), HIGH_PRECISION)
            if getattr(self, matmul) not in allowed:
                raise ValueError(
                    f"Wrong {matmul} of {type(self).__name__}. Received: "
                    f"{getattr(self, matmul)!r}. Allowed: "
                    f"{' or '.join(map(repr, allowed))}. Leave it out for the "
                    f"default {allowed[0]!r}."
                )
        check(self)

    def in_high_precision(self, matmul: str) -> bool:
        """Return True if a field of the recipe takes a matmul out of float8.

        Args:
            matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.
        """
        return bool(getattr(self, matmul) == HIGH_PRECISION)

    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return the quantization of an operand in a matmul.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
            matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`, one that
                reads the operand.

        Returns:
            The quantization; None for both operands of a matmul that is to be
            done in the compute dtype. Here: whole tensors in e4m3fn.
        """
        if self.in_high_precision(matmul):
            return None
        return Quantization(format=formats.ALIASES["e4m3"])

    @property
    def is_stochastic(self) -> bool:
        """Return True if an operand is rounded at random.

        The bits come from a field `seed`, 0 without one, and from a counter
        of the steps that is the state of a kernel.
        """
        return any(
            asked is not None and asked.rounding == "stochastic"
            for asked in _all_asked(self)
        )

    @property
    def history_length(self) -> int:
        """Length of the amax history per operand; 0 for stateless recipes."""
        return 0

    @property
    def scale_options(self) -> dict[str, Any]:
        """Keyword arguments for `scale_from_amax`: margin, power_of_two."""
        asked = (each for each in _all_asked(self) if each is not None)
        rounded_up = any(each.scale_rounding == "up" for each in asked)
        return {"margin": 0, "power_of_two": rounded_up}

    @property
    def for_activations(self) -> Recipe:
        """The recipe for products without a kernel, which have no state.

        Each tensor is scaled by its own amax, in float8, with output
        gradients in e5m2 where this recipe has them so. A matmul that is not
        quantized under this recipe is not there either.
        """
        gradient = self.format_of("outputs_grad")
        words = {"float8_e5m2": "hybrid", "float8_e5m2fnuz": "hybrid_fnuz"}
        fnuz = formats.get(gradient).family == "fnuz"
        left_out = {
            matmul: HIGH_PRECISION
            for matmul, (first, _) in MATMULS.items()
            if self.quantization(first, matmul) is None
        }
        current: Any = REGISTRY["current"]
        recipe: Recipe = current(
            fp8_format=words.get(gradient, "e4m3fnuz" if fnuz else "e4m3"),
            **left_out,
        )
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
            f"{name}={getattr(self, name)!r}" for name in self._changed_fields
        ]
        return f"{self.name}({','.join(changed)})" if changed else self.name

    @property
    def _changed_fields(self) -> list[str]:
        """Fields that differ from their defaults."""
        return [
            field.name
            for field in fields_of(type(self))
            if getattr(self, field.name) != field.default
        ]


def check(recipe: Recipe) -> None:
    """Raise if a recipe asks for what cannot be carried out.

    Raises:
        ValueError: If one operand of a matmul is quantized and the other is
            not, a field takes a matmul out of float8 and `quantization` does
            not, both operands are in e5m2, they have two Hadamard sizes, a
            recipe with a history has finer tiles than whole tensors or rounds
            at random, or a quantization is one that is not computed.
    """
    for matmul, operands in MATMULS.items():
        first, second = (recipe.quantization(o, matmul) for o in operands)
        fault = _fault(first, second) or _unfit(recipe, matmul, first, second)
        if fault:
            raise ValueError(
                f"Recipe {recipe!r} cannot be carried out: {fault}. Received "
                f"for {matmul}: {first!r} and {second!r}. Allowed: None for "
                f"both operands, or {_computed_words()}. Change "
                "`quantization` of the recipe."
            )


def _fault(first: Quantization | None, second: Quantization | None) -> str:
    """Why two operands do not go together."""
    if first is None or second is None:
        both = first is None and second is None
        return "" if both else "one operand is in float8 and the other is not"
    if first.format == second.format and "e5m2" in first.format:
        return "no hardware multiplies e5m2 by e5m2"
    families = {formats.get(each.format).family for each in (first, second)}
    if families == set(formats.FAMILIES):
        return "no hardware multiplies formats of OCP by those named fnuz"
    if first.hadamard != second.hadamard:
        return "the Hadamard transforms of two operands cancel only in pairs"
    unknown = (_not_computed(first), _not_computed(second))
    return next(filter(None, unknown), "")


def _unfit(recipe: Recipe, matmul: str, *asked: Quantization | None) -> str:
    """Why quantizations are not those of this recipe."""
    quantized = [each for each in asked if each is not None]
    if recipe.in_high_precision(matmul) and quantized:
        return f"its `quantization` does not follow {matmul}='high_precision'"
    if recipe.history_length and not all(q.keeps_axes for q in quantized):
        return "a history has one amax for a tensor: Tile(), to nearest"
    return ""


_COMPUTED: dict[str, tuple[Any, ...]] = {
    "format": (
        *(name for names in formats.FAMILIES.values() for name in names),
        "float4_e2m1fn",
    ),
    "hadamard": (None, 16),
}
"""The quantizations that are computed, by attribute."""


def _not_computed(asked: Quantization) -> str:
    """What of a quantization is not computed."""
    for name, allowed in _COMPUTED.items():
        if getattr(asked, name) not in allowed:
            words = " or ".join(map(str, allowed))
            return f"{name} can be {words} and nothing else"
    return ""


def _computed_words() -> str:
    return ", ".join(
        f"{name} {' or '.join(map(str, allowed))}"
        for name, allowed in _COMPUTED.items()
    )


def _all_asked(recipe: Recipe) -> list[Quantization | None]:
    return [
        recipe.quantization(operand, matmul)
        for matmul, operands in MATMULS.items()
        for operand in operands
    ]


def _register(cls: type[Recipe]) -> None:
    known = REGISTRY.get(cls.name)
    same = known is not None and (
        (known.__module__, known.__qualname__)
        == (cls.__module__, cls.__qualname__)
    )
    if known is not None and not same:
        raise ValueError(
            f"Two recipes have the name {cls.name!r}. Received: "
            f"{cls.__module__}.{cls.__qualname__}, already taken by "
            f"{known.__module__}.{known.__qualname__}. Allowed: a name not in "
            f"{', '.join(REGISTRY)}. Give the new recipe another `name`."
        )
    REGISTRY[cls.name] = cls


def fields_of(cls: type[Recipe]) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a recipe, in order."""
    return dataclasses.fields(cls)


def no_recipe(identifier: object) -> str:
    """The message for what means no recipe."""
    return (
        "Cannot interpret this as a recipe. Received: "
        f"{identifier!r} (of type {type(identifier).__name__}). Allowed: a "
        "recipe object, a name or spec string, a config dict, or None for "
        "the default where one is asked for. Pass for instance "
        "recipes.CurrentScaling() or 'current'."
    )
