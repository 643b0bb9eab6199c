"""The base class of all recipes, and their registry."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from keras_policy_ext import _extensions, formats
from keras_policy_ext.recipes.quantization import (
    MATMULS,
    OPERANDS,
    Quantization,
    matmuls_of,
)
from keras_policy_ext.stored_kernels import Grid

REGISTRY: dict[str, type[Recipe]] = {}
"""The recipes by name, in the order of their definition.

Those of an extension are in it after their first use.
"""

HIGH_PRECISION = "high_precision"
"""The value of a field for a matmul in the compute dtype."""

_R = TypeVar("_R", bound="Recipe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The base class of all recipes.

    Subclasses are frozen keyword-only dataclasses that set `name`. They
    override `quantization` unless they want one scale per tensor in e4m3fn.
    Equality, hash, config and repr come from their fields. A subclass with a
    `__post_init__` calls the base's after its own checks.

    Attributes:
        name: The name used in strings, e.g. `"current"`.
        granularity: Of the scales: `"tensorwise"`, `"rowwise"`, `"blockwise"`.
        family: The first word of the names of policies with this recipe,
            unless `mode` is another.
        trains: Whether kernels are trained; otherwise they are stored in
            float8 (`FrozenKernels`).
        forward: `"float8"`, or `"high_precision"` for the compute dtype.
        inputs_grad: See `forward`.
        kernel_grad: See `forward`.

    Raises:
        ValueError: If its quantizations are inconsistent or not supported.
    """

    name: ClassVar[str]
    granularity: ClassVar[str] = "tensorwise"
    family: ClassVar[str] = "float8"
    trains: ClassVar[bool] = True

    forward: str = "float8"
    inputs_grad: str = "float8"
    kernel_grad: str = "float8"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register a subclass that has a name."""
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _register(cls)

    def __post_init__(self) -> None:
        """Raise if a field is not allowed, or the recipe contradicts itself."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
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
        """Return True if a matmul is excluded from float8 by a field.

        Args:
            matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.
        """
        return bool(getattr(self, matmul) == HIGH_PRECISION)

    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return how an operand of a matmul is quantized; None for not at all.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
            matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`, one that
                reads the operand.

        Returns:
            The quantization; None for both operands of a matmul in the compute
            dtype. The base class returns one scale per tensor, in e4m3fn.
        """
        if self.in_high_precision(matmul):
            return None
        return Quantization(format=formats.ALIASES["e4m3"])

    def unfit(self, matmul: str, *quantizations: Quantization | None) -> str:
        """Return why quantizations contradict this recipe; "" if they do not.

        Args:
            matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.
            *quantizations: Those of its two operands, either both or none None.
        """
        if self.in_high_precision(matmul) and any(
            each is not None for each in quantizations
        ):
            return (
                f"its `quantization` does not follow {matmul}='high_precision'"
            )
        return ""

    @property
    def remembers(self) -> bool:
        """True if a kernel has a state, which training steps change.

        To round at random, steps are counted. Recipes that remember something
        else override this.
        """
        return any(
            each is not None and each.rounding == "stochastic"
            for each in quantizations_of(self)
        )

    @property
    def mode(self) -> str:
        """The first word of the names of policies with this recipe."""
        return self.family

    @property
    def grid(self) -> Grid | None:
        """The grid on which kernels are multiplied; None if on none.

        A recipe that has one trains for `freeze`, and multiplies in the compute
        dtype. An extension rounds the operands; see `layers.on_grid`.
        """
        return None

    @property
    def scale_options(self) -> dict[str, Any]:
        """The keyword arguments for `scale_from_amax`: margin, power_of_two."""
        rounded_up = any(
            each is not None and each.scale_rounding == "up"
            for each in quantizations_of(self)
        )
        return {"margin": 0, "power_of_two": rounded_up}

    @property
    def for_activations(self) -> Recipe:
        """The recipe for a matmul of two activations: current scaling.

        Each tensor is scaled by its own amax, in float8. Output gradients are
        in e5m2 if they are in this recipe. A matmul that this recipe does not
        quantize is not quantized here either. Recipes with scales per row or
        block override this, and return scales of rows for both operands.
        """
        gradient = self.format_of("outputs_grad")
        words = {"float8_e5m2": "hybrid", "float8_e5m2fnuz": "hybrid_fnuz"}
        is_fnuz = formats.get(gradient).family == "fnuz"
        # Both operands of a matmul are quantized, or none: ask the first.
        left_out = {
            matmul: HIGH_PRECISION
            for matmul, (first, _) in MATMULS.items()
            if self.quantization(first, matmul) is None
        }
        current: Any = REGISTRY["current"]
        return current(
            fp8_format=words.get(gradient, "e4m3fnuz" if is_fnuz else "e4m3"),
            **left_out,
        )

    def format_of(self, operand: str) -> str:
        """Return the ml_dtypes name of an operand's format.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.

        Returns:
            The exact name, e.g. `"float8_e4m3fn"`: of the first matmul that
            quantizes the operand; e4m3fn if none does.

        Raises:
            ValueError: If there is no such operand.
        """
        if operand not in OPERANDS:
            raise ValueError(
                f"Unknown operand of a matmul. Received: {operand!r}. "
                f"Allowed: {', '.join(OPERANDS)}. The matmuls (forward, "
                "inputs_grad, kernel_grad) have no format of their own."
            )
        quantizations = (
            self.quantization(operand, m) for m in matmuls_of(operand)
        )
        names = [each.format for each in quantizations if each is not None]
        return names[0] if names else formats.ALIASES["e4m3"]

    def get_config(self) -> dict[str, Any]:
        """Return the recipe's fields as a dict, which `from_config` reads."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_config(cls: type[_R], config: Mapping[str, Any]) -> _R:
        """Build a recipe from the dict of its `get_config()`.

        Raises:
            TypeError: If the config is not a dict.
            ValueError: If it has an unknown field.
        """
        if not isinstance(config, Mapping):
            raise TypeError(no_recipe(config))
        allowed = [field.name for field in dataclasses.fields(cls)]
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
        """The short string for this recipe in policy names; `parse` reads it.

        It is `name` or `name(field=value,…)` with the fields that differ from
        their defaults, in field order. `DelayedScaling` has shorter ones.
        """
        changed = [
            f"{name}={getattr(self, name)!r}" for name in self._changed_fields
        ]
        return f"{self.name}({','.join(changed)})" if changed else self.name

    @property
    def _changed_fields(self) -> list[str]:
        """The names of the fields whose values are not the defaults."""
        return [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]


@functools.lru_cache(maxsize=256)
def check(recipe: Recipe) -> None:
    """Raise if a recipe's quantizations are inconsistent or not supported.

    An equal recipe that was checked before is not checked again.

    Raises:
        ValueError: If one operand of a matmul is quantized and the other is
            not; a field excludes a matmul from float8 but `quantization` does
            not; both operands are in e5m2; the Hadamard sizes differ; `unfit`
            of the recipe names a fault; or a quantization is not implemented.
    """
    found = iter(quantizations_of(recipe))
    for matmul, first, second in zip(MATMULS, found, found, strict=True):
        fault = _fault(first, second) or recipe.unfit(matmul, first, second)
        if fault:
            allowed = ", ".join(
                f"{name} {' or '.join(map(str, values))}"
                for name, values in _SUPPORTED.items()
            )
            raise ValueError(
                f"Recipe {recipe!r} cannot be carried out: {fault}. Received "
                f"for {matmul}: {first!r} and {second!r}. Allowed: None for "
                f"both operands, or {allowed}. Change "
                "`quantization` of the recipe."
            )


def _fault(first: Quantization | None, second: Quantization | None) -> str:
    """Return why two operands cannot be multiplied, or ""."""
    if first is None and second is None:
        return ""
    if first is None or second is None:
        return "one operand is in float8 and the other is not"
    if first.format == second.format and "e5m2" in first.format:
        return "no hardware multiplies e5m2 by e5m2"
    families = {formats.get(each.format).family for each in (first, second)}
    if families == set(formats.FAMILIES):
        return "no hardware multiplies formats of OCP by those named fnuz"
    if first.hadamard != second.hadamard:
        return "the Hadamard transforms of two operands cancel only in pairs"
    return _what_is_unsupported(first) or _what_is_unsupported(second)


@functools.lru_cache(maxsize=256)
def scales_whole_tensors(recipe: Recipe) -> bool:
    """Return True if a recipe that trains has one scale for each tensor."""
    return recipe.trains and all(
        each is None or each.has_one_scale for each in quantizations_of(recipe)
    )


@functools.lru_cache(maxsize=256)
def tiles_along_columns(recipe: Recipe) -> tuple[int, ...]:
    """Return the sizes of tiles along the columns of a kernel, if any.

    In `forward` they are its free axis; `inputs_grad` sums over them.
    """
    sizes = []
    for operand, matmul in (
        ("kernel", "forward"),
        ("kernel", "inputs_grad"),
        ("outputs_grad", "inputs_grad"),
    ):
        quantization = recipe.quantization(operand, matmul)
        if quantization is not None:
            tile = quantization.tile
            sizes.append(tile.free if matmul == "forward" else tile.contracted)
    return tuple(size for size in sizes if size is not None)


def scales_rows_apart(recipe: Recipe) -> bool:
    """Return True if no scale of the forward matmul covers several rows.

    A row is what the matmul sums: a query, a key, or the probabilities of a
    query. Then no output depends on other queries, examples or heads through
    scales. There is no state either, so that activations can be scaled so.
    """
    quantizations = [
        recipe.quantization(o, "forward") for o in MATMULS["forward"]
    ]
    return not recipe.remembers and all(
        each is None or (each.tile.free == 1 and not each.has_tensor_scale)
        for each in quantizations
    )


_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "format": (
        *(name for names in formats.FAMILIES.values() for name in names),
        "float4_e2m1fn",
    ),
    "hadamard": (None, 16),
}
"""The supported quantizations, by attribute."""


def _what_is_unsupported(quantization: Quantization) -> str:
    """Return what is not supported of a quantization, or ""."""
    for name, allowed in _SUPPORTED.items():
        if getattr(quantization, name) not in allowed:
            words = " or ".join(map(str, allowed))
            return f"{name} can be {words} and nothing else"
    return ""


@functools.lru_cache(maxsize=1024)
def quantizations_of(recipe: Recipe) -> tuple[Quantization | None, ...]:
    """Return the quantizations of both operands of each matmul, in order."""
    return tuple(
        recipe.quantization(operand, matmul)
        for matmul, operands in MATMULS.items()
        for operand in operands
    )


def _register(cls: type[Recipe]) -> None:
    """Enter a recipe class by its name; raise if another has the name."""
    registered = REGISTRY.get(cls.name)
    of_extension = _extensions.recipes().get(cls.name)
    if of_extension and cls.__module__ != _extensions.home(of_extension):
        registered = _extensions.get(of_extension)
    # As when a module is reloaded, or the cell of a notebook runs again.
    is_same_class = registered is not None and (
        (registered.__module__, registered.__qualname__)
        == (cls.__module__, cls.__qualname__)
    )
    if registered is not None and not is_same_class:
        raise ValueError(
            f"Two recipes have the name {cls.name!r}. Received: "
            f"{cls.__module__}.{cls.__qualname__}; the name already "
            f"belongs to {registered.__module__}.{registered.__qualname__}. "
            f"Allowed: a name not in {', '.join(REGISTRY)}. Give the new "
            "recipe another `name`."
        )
    REGISTRY[cls.name] = cls


def no_recipe(identifier: object) -> str:
    """Return an error message: an object is not a recipe."""
    return (
        "Cannot interpret this as a recipe. Received: "
        f"{identifier!r} (of type {type(identifier).__name__}). Allowed: a "
        "recipe object, a name or spec string, a config dict, or None for "
        "the default where one is asked for. Pass for instance "
        "recipes.CurrentScaling() or 'current'."
    )
