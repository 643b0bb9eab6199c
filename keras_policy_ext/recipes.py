"""Recipes: how the numbers of a float8 layer are scaled.

A recipe is a small immutable value. It says which format each operand of the
three matmuls takes and how its scale is found; it computes nothing. This
module imports neither keras nor a framework.

To add a recipe, write one frozen keyword-only dataclass that derives from
`Recipe` and sets `name`; defining it registers it, and `get`, `parse`, `spec`
and the policy names know it from then on. Field values must be Python
literals without `;` in their `repr`, since they appear in policy names.
"""

import ast
import dataclasses
import math
import operator
import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np

from keras_policy_ext import formats

OPERANDS = ("inputs", "kernel", "outputs_grad")

#: Names that are decided on but not in this version.
PLANNED = ("rowwise", "block", "mxfp8", "nvfp4")

_FP8_FORMATS = ("hybrid", "e4m3")
_REGISTRY: dict[str, "type[Recipe]"] = {}
_SPEC = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\((?P<arguments>.*)\))?", re.S)

_R = TypeVar("_R", bound="Recipe")


class Recipe:
    """Base of all recipes.

    Subclasses are frozen keyword-only dataclasses; equality, hash, config and
    repr come from their fields.

    Attributes:
        name: The name used in strings, e.g. `"delayed"`.
        granularity: What one scale belongs to: `"tensorwise"`, `"rowwise"` or
            `"blockwise"`.
    """

    name: ClassVar[str]
    granularity: ClassVar[str] = "tensorwise"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _register(cls)

    @property
    def history_length(self) -> int:
        """Length of the amax history per operand; 0 for stateless recipes."""
        return 0

    @property
    def scale_options(self) -> dict[str, Any]:
        """Keyword arguments for `scale_from_amax`: margin, power_of_two."""
        return {"margin": 0, "power_of_two": False}

    @property
    def without_state(self) -> "Recipe":
        """The recipe for products of activations, which have no state.

        Each tensor is scaled by its own amax, in the formats of this recipe.
        """
        wide = self.format_of("outputs_grad") != self.format_of("inputs")
        return CurrentScaling(fp8_format="hybrid" if wide else "e4m3")

    def format_of(self, operand: str) -> str:
        """The ml_dtypes name of an operand's format.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.

        Returns:
            The exact name, e.g. `"float8_e4m3fn"`.

        Raises:
            ValueError: If there is no such operand.
        """
        if operand not in OPERANDS:
            raise ValueError(
                f"Unknown operand of a matmul. Received: {operand!r}. "
                f"Allowed: {', '.join(OPERANDS)}. The matmuls (forward, "
                "inputs_grad, kernel_grad) have no format of their own."
            )
        return self._format_of(operand)

    def _format_of(self, operand: str) -> str:
        return formats.ALIASES["e4m3"]

    def get_config(self) -> dict[str, Any]:
        """The fields as a dict of Python literals."""
        return {f.name: getattr(self, f.name) for f in _fields(type(self))}

    @classmethod
    def from_config(cls: type[_R], config: Mapping[str, Any]) -> _R:
        """Build the recipe from `get_config()`.

        Raises:
            TypeError: If the config is no dict.
            ValueError: If it has an unknown field.
        """
        if not isinstance(config, Mapping):
            raise TypeError(_no_recipe(config))
        allowed = [field.name for field in _fields(cls)]
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
            for field in _fields(type(self))
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({','.join(changed)})" if changed else self.name


def _register(cls: type[Recipe]) -> None:
    known = _REGISTRY.get(cls.name)
    same = known is not None and (
        (known.__module__, known.__qualname__)
        == (cls.__module__, cls.__qualname__)
    )
    if known is not None and not same:
        raise ValueError(
            f"Two recipes want the name {cls.name!r}. Received: "
            f"{cls.__module__}.{cls.__qualname__}, already taken by "
            f"{known.__module__}.{known.__qualname__}. Allowed: a name not "
            f"in {', '.join(_REGISTRY)}. Give the new recipe another `name`."
        )
    _REGISTRY[cls.name] = cls


def _fields(cls: type[Recipe]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]


_E4M3 = formats.get(formats.ALIASES["e4m3"])

LARGEST_MARGIN = int(math.log2(_E4M3.max / _E4M3.smallest_subnormal))
"""Of delayed scaling: with more, all of a tensor in e4m3fn rounds to 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amax of the steps before this one.

    Source: Transformer Engine's `DelayedScaling`, Flax's `fp8_ops`.

    Attributes:
        amax_history_length: How many steps are remembered (int >= 1).
        margin: The scale is multiplied by `2**margin` (int from 0 to 17, in
            powers of two): head-room for a tensor that grows. With more, all
            of a tensor in e4m3fn would round to 0.
        fp8_format: `"hybrid"` (e4m3fn forward, e5m2 output gradients) or
            `"e4m3"` (e4m3fn everywhere).
        amax_compute: `"max"` of the history, or `"most_recent"`.
        initial_scale: While nothing was observed: `"current"` takes the
            tensor's own amax; `1.0` takes 1, as Flax and Transformer
            Engine do.

    Raises:
        TypeError, ValueError: If a value has the wrong type or range.
    """

    name: ClassVar[str] = "delayed"

    amax_history_length: int = 1024
    margin: int = 0
    fp8_format: str = "hybrid"
    amax_compute: str = "max"
    initial_scale: "str | float" = "current"

    def __post_init__(self) -> None:
        _set(
            self,
            "amax_history_length",
            _integer(self, "amax_history_length", 1),
        )
        _set(self, "margin", _integer(self, "margin", 0, LARGEST_MARGIN))
        _choice(self, "fp8_format", _FP8_FORMATS)
        _choice(self, "amax_compute", ("max", "most_recent"))
        _set(self, "initial_scale", _initial_scale(self.initial_scale))

    @property
    def history_length(self) -> int:
        """Length of the amax history per operand."""
        return self.amax_history_length

    @property
    def scale_options(self) -> dict[str, Any]:
        """Keyword arguments for `scale_from_amax`: margin, power_of_two."""
        return {"margin": self.margin, "power_of_two": False}

    @property
    def spec(self) -> str:
        """The compact string used in policy names; see `Recipe.spec`."""
        length = self.amax_history_length
        if self == DelayedScaling():
            return ""
        if self == DelayedScaling(amax_history_length=length):
            return str(length)
        return super().spec

    def _format_of(self, operand: str) -> str:
        return _tensorwise_format(self.fp8_format, operand)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(Recipe):
    """One scale per tensor, from this tensor's own amax. No state.

    Source: Transformer Engine's `Float8CurrentScaling`, torchao's
    `tensorwise`.

    Attributes:
        fp8_format: `"hybrid"` (e4m3fn forward, e5m2 output gradients) or
            `"e4m3"` (e4m3fn everywhere).
        power_of_two: Round scales up to powers of two.

    Raises:
        TypeError, ValueError: If a value has the wrong type or range.
    """

    name: ClassVar[str] = "current"

    fp8_format: str = "hybrid"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _choice(self, "fp8_format", _FP8_FORMATS)
        _set(self, "power_of_two", _boolean(self, "power_of_two"))

    @property
    def without_state(self) -> "Recipe":
        """This recipe, or where a subclass is finer, `CurrentScaling`."""
        return (
            self if self.granularity == "tensorwise" else super().without_state
        )

    @property
    def scale_options(self) -> dict[str, Any]:
        """Keyword arguments for `scale_from_amax`: margin, power_of_two."""
        return {"margin": 0, "power_of_two": self.power_of_two}

    def _format_of(self, operand: str) -> str:
        return _tensorwise_format(self.fp8_format, operand)


def names() -> tuple[str, ...]:
    """The names of the recipes that this version has."""
    return tuple(_REGISTRY)


def get(identifier: "Recipe | str | Mapping[str, Any] | None") -> Recipe:
    """Turn anything that means a recipe into a recipe.

    Args:
        identifier: A recipe (returned as it is), a name or spec string (see
            `parse`), a config dict (`{"class_name": "DelayedScaling",
            "config": {…}}` or `{"name": "delayed", …fields}`), or None for
            `DelayedScaling()`.

    Returns:
        The recipe.

    Raises:
        TypeError: If the identifier is none of these.
        ValueError: If it names no recipe, or a parameter is wrong.
    """
    if identifier is None:
        return DelayedScaling()
    if isinstance(identifier, Recipe):
        return identifier
    if isinstance(identifier, str):
        return parse(identifier)
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    raise TypeError(_no_recipe(identifier))


def _no_recipe(identifier: object) -> str:
    return (
        "Cannot interpret this as a recipe. Received: "
        f"{identifier!r} (of type {type(identifier).__name__}). Allowed: a "
        "recipe object, a name or spec string, a config dict, or None for "
        "the default where one is asked for. Pass for instance "
        "recipes.CurrentScaling() or 'current'."
    )


def serialize(recipe: Recipe) -> dict[str, Any]:
    """`{"class_name": …, "config": …}`; `deserialize` reads it back.

    Raises:
        TypeError: If `recipe` is no recipe.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(_no_recipe(recipe))
    return {
        "class_name": type(recipe).__name__,
        "config": recipe.get_config(),
    }


def deserialize(config: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a config dict; the forms are those of `get`.

    Raises:
        TypeError: If `config` is no dict.
        ValueError: If the dict names no recipe, or a parameter is wrong.
    """
    if not isinstance(config, Mapping):
        raise TypeError(_no_recipe(config))
    if "class_name" in config:
        classes = {cls.__name__: cls.name for cls in _REGISTRY.values()}
        class_name = config["class_name"]
        cls = _class(classes.get(class_name, class_name))
        return cls.from_config(config.get("config") or {})
    if "name" in config:
        fields = {k: v for k, v in config.items() if k != "name"}
        return _class(config["name"]).from_config(fields)
    raise ValueError(
        f"This dict names no recipe. Received: {dict(config)!r}. Allowed: "
        "{'class_name': 'DelayedScaling', 'config': {…}} or {'name': "
        "'delayed', …}. Add the recipe's class or name."
    )


def parse(spec: str) -> Recipe:
    """Read a recipe's compact string; the inverse of `Recipe.spec`.

    Grammar: `""` (delayed, 1024) | `"16"` (delayed, that length) | `name` |
    `name(field=value,…)` with Python literals as values.

    Args:
        spec: The string, e.g. `"current(power_of_two=True)"`.

    Returns:
        The recipe.

    Raises:
        TypeError: If `spec` is no string.
        ValueError: If the string doesn't follow the grammar, names no
            recipe, or a parameter is wrong.
    """
    if not isinstance(spec, str):
        raise TypeError(_no_recipe(spec))
    text = spec.strip()
    if not text:
        return DelayedScaling()
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return DelayedScaling(amax_history_length=int(text))
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(_grammar(spec))
    cls = _class(match["name"])
    return cls.from_config(_literals(match["arguments"] or "", spec))


def _literals(arguments: str, spec: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(_grammar(spec)) from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(_grammar(spec))
    names = [keyword.arg for keyword in call.keywords]
    if call.args or None in names or len(set(names)) < len(names):
        raise ValueError(_grammar(spec))
    try:
        return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError as error:
        raise ValueError(_grammar(spec)) from error


def _grammar(spec: str) -> str:
    return (
        f"Cannot read this as a recipe. Received: {spec!r}. Allowed: '' "
        "(delayed, 1024), a history length such as '16', a name "
        f"({', '.join(_REGISTRY)}), or a name with keyword literals such as "
        "'delayed(amax_history_length=16,margin=1)'. Write it in one of "
        "these forms."
    )


def _class(name: object) -> type[Recipe]:
    if isinstance(name, str) and name in _REGISTRY:
        return _REGISTRY[name]
    known = f"Allowed: {', '.join(_REGISTRY)}."
    if name in PLANNED:
        raise ValueError(
            f"Recipe {name!r} is planned, but this version of "
            f"keras_policy_ext doesn't have it. {known} Use one of these."
        )
    raise ValueError(
        f"Unknown recipe. Received: {name!r}. {known} Use one of these, or "
        "derive a dataclass from recipes.Recipe to add your own."
    )


def _tensorwise_format(fp8_format: str, operand: str) -> str:
    wide = fp8_format == "hybrid" and operand == "outputs_grad"
    return formats.ALIASES["e5m2" if wide else "e4m3"]


def _set(recipe: Recipe, field: str, value: object) -> None:
    object.__setattr__(recipe, field, value)  # Normalises in __post_init__.


def _integer(
    recipe: Recipe, field: str, minimum: int, maximum: int | None = None
) -> int:
    value = getattr(recipe, field)
    allowed = f"an integer >= {minimum}"
    if maximum is not None:
        allowed = f"an integer from {minimum} to {maximum}"
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(_wrong(recipe, field, allowed))
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(_wrong(recipe, field, allowed)) from error
    if number < minimum or (maximum is not None and number > maximum):
        raise ValueError(_wrong(recipe, field, allowed))
    return number


def _boolean(recipe: Recipe, field: str) -> bool:
    value = getattr(recipe, field)
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(_wrong(recipe, field, "True or False"))
    return bool(value)


def _choice(recipe: Recipe, field: str, allowed: tuple[str, ...]) -> None:
    value = getattr(recipe, field)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(_wrong(recipe, field, " or ".join(map(repr, allowed))))
    _set(recipe, field, str(value))


def _initial_scale(value: object) -> "str | float":
    if isinstance(value, str) and value == "current":
        return "current"
    is_number = isinstance(value, (int, float, np.number))
    if is_number and not isinstance(value, bool) and value == 1:
        return 1.0
    raise ValueError(
        f"Wrong initial_scale of DelayedScaling. Received: {value!r}. "
        "Allowed: 'current' or 1.0. Leave it out for 'current'."
    )


def _wrong(recipe: Recipe, field: str, allowed: str) -> str:
    value = getattr(recipe, field)
    default = next(f.default for f in _fields(type(recipe)) if f.name == field)
    return (
        f"Wrong {field} of {type(recipe).__name__}. Received: {value!r} (of "
        f"type {type(value).__name__}). Allowed: {allowed}. Leave it out for "
        f"the default {default!r}."
    )
