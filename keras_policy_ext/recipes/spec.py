"""Convert recipes to and from strings and dicts; suggest names for typos."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from keras_policy_ext import _extensions
from keras_policy_ext.recipes.current import CurrentScaling
from keras_policy_ext.recipes.recipe import REGISTRY, Recipe, no_recipe

DEFAULT = CurrentScaling.name
"""The recipe where none is given."""

# The default, and torchao's name for it. Configs and files have its own name.
_ALIASES = {"float8": DEFAULT, "tensorwise": DEFAULT}

_OF_KERAS = "delayed"
"""The recipe of float8 policies of Keras."""

# Words that errors explain, in small letters without separators.
_NAMES_ELSEWHERE = {
    "fp8": ("float8", "current"),
    "f8": ("float8", "current"),
    "mixedfp8": ("mixed_float8", "current"),
    "tensorwise": ("current",),
    "dynamic": ("current",),
    "hybrid": ("current",),
    "e4m3": ("current(fp8_format='e4m3')",),
    "e4m3fn": ("current(fp8_format='e4m3')",),
    "mx": ("mxfp8",),
    "fp4": ("nvfp4",),
    "float4": ("nvfp4",),
}


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a hint such as `"Did you mean 'current'? "`, or ""."""
    if not isinstance(word, str):
        return ""
    import difflib  # Only errors need it.

    listed, plain = list(known), _plain(word)
    by_plain = {_plain(name): name for name in listed}
    meant = [by_plain[plain]] if plain in by_plain else []  # The best first.
    for other in _NAMES_ELSEWHERE.get(plain, ()):
        name, _, _ = other.partition("(")
        meant += [other] if name in listed else []
    near = difflib.get_close_matches(plain, by_plain, n=1)
    meant += [by_plain[each] for each in near]
    return f"Did you mean {meant[0]!r}? " if meant else ""


def _plain(word: str) -> str:
    """Return a word in small letters, without blanks and separators."""
    return re.sub(r"[\s_\-./]", "", word.lower())


_SPEC = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\((?P<arguments>.*)\))?", re.S)


def names(family: str | None = "float8") -> tuple[str, ...]:
    """Return the names of all recipes for training, such as `"current"`.

    Args:
        family: `"float8"`, or `"qat"` for those that train in floats for
            kernels in few bits; None for all.
    """
    later = _extensions.recipes()  # In float8; registered at the first use.
    families = {
        name: cls.family
        for name, cls in REGISTRY.items()
        if cls.trains and name not in later
    }
    families.update(dict.fromkeys(later, "float8"))
    in_order = sorted(families, key=lambda name: families[name] != "float8")
    return tuple(n for n in in_order if family in (None, families[n]))


def is_spec(text: object) -> bool:
    """Return True if a string names a recipe for training.

    Its arguments are not read: `parse` says what is wrong with them.
    """
    if not isinstance(text, str):
        return False
    name = text.partition("(")[0]
    return _ALIASES.get(name, name) in names(None)


def get(identifier: Recipe | str | Mapping[str, Any] | None) -> Recipe:
    """Convert a name, string, dict or None to a `Recipe`.

    Args:
        identifier: A recipe (returned unchanged), a name or spec string (see
            `parse`), a config dict (`{"class_name": "CurrentScaling",
            "config": {…}}` or `{"name": "current", …fields}`), or None for
            `CurrentScaling()`.

    Returns:
        The recipe.

    Raises:
        TypeError: If the identifier is none of these.
        ValueError: If it does not name a recipe, or a parameter is wrong.

    Examples:
        >>> kpe.recipes.get("rowwise") == kpe.recipes.RowwiseScaling()
        True
        >>> kpe.recipes.get("current(power_of_two=True)").power_of_two
        True
    """
    if identifier is None:
        return CurrentScaling()
    if isinstance(identifier, Recipe):
        return identifier
    if isinstance(identifier, str):
        return parse(identifier)
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    raise TypeError(no_recipe(identifier))


def serialize(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as `{"class_name": …, "config": …}`, for `deserialize`.

    Raises:
        TypeError: If `recipe` is not a recipe.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(no_recipe(recipe))
    return {"class_name": type(recipe).__name__, "config": recipe.get_config()}


def deserialize(config: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a config dict; `get` lists the accepted forms.

    Raises:
        TypeError: If `config` is not a dict.
        ValueError: If it does not name a recipe, or a parameter is wrong.
    """
    if not isinstance(config, Mapping):
        raise TypeError(no_recipe(config))
    if "class_name" in config:
        classes = {cls.__name__: cls.name for cls in REGISTRY.values()}
        for name, public in _extensions.recipes().items():
            classes[public.rpartition(".")[2]] = name
        class_name = config["class_name"]
        cls = _class(classes.get(class_name, class_name))
        return cls.from_config(config.get("config") or {})
    if "name" in config:
        fields = {k: v for k, v in config.items() if k != "name"}
        return _class(config["name"]).from_config(fields)
    raise ValueError(
        f"This dict names no recipe. Received: {dict(config)!r}. Allowed: "
        "{'class_name': 'CurrentScaling', 'config': {…}} or {'name': "
        "'current', …}. Add the recipe's class or name."
    )


def parse(spec: str) -> Recipe:
    """Convert a short string such as `"current"` to a recipe.

    It is the inverse of `Recipe.spec`.

    Grammar: `""` and `"16"`, as Keras's names have them (see `of_keras`) |
    `name` | `name(field=value,…)` with Python literals as values. `"float8"`,
    and `"tensorwise"`, torchao's name, mean `"current"`.

    Args:
        spec: The string, e.g. `"current(power_of_two=True)"`.

    Returns:
        The recipe.

    Raises:
        TypeError: If `spec` is not a string.
        ValueError: If the string doesn't follow the grammar, does not name a
            recipe, or a parameter is wrong.
    """
    if not isinstance(spec, str):
        raise TypeError(no_recipe(spec))
    match = _SPEC.fullmatch(spec.strip())
    # Any: mypy takes a class of frozen dataclasses for one without a hash.
    cls: Any = _keras_class() if match is None else _class(match["name"])
    return _recipe_of(spec, cls)


@functools.lru_cache(maxsize=256)
def _recipe_of(spec: str, cls: type[Recipe]) -> Recipe:
    """Return the recipe that a string such as `"current(margin=1)"` means.

    `cls` is the class of recipes that it names. An empty string, or an integer
    (a history length), means the delayed scaling of Keras's names.
    """
    # The class is an argument, since a notebook may define it again.
    text = spec.strip()
    if not text:
        return of_keras()
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return of_keras(amax_history_length=int(text))
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(_grammar(spec))
    return cls.from_config(_literals(match["arguments"] or "", spec))


def of_keras(**arguments: Any) -> Recipe:
    """Return the recipe that a float8 policy of Keras means: delayed scaling.

    Args:
        **arguments: Arguments of Keras's policies: `amax_history_length`, an
            integer >= 1.

    Raises:
        TypeError, ValueError: If the length is no such integer.
    """
    recipe: Recipe = _keras_class()(**arguments)
    return recipe


def _keras_class() -> Any:
    """Return the class of recipes that Keras's float8 policies mean."""
    if _OF_KERAS in _extensions.recipes():
        return _class(_OF_KERAS)
    raise ValueError(
        "Float8 policies of Keras mean a recipe that is not installed here. "
        f"Received: the core alone, without `{__package__.partition('.')[0]}"
        f".ext`. Allowed: {', '.join(names())}. Install the whole package, or "
        "choose a recipe."
    )


def _literals(arguments: str, spec: str) -> dict[str, Any]:
    """Read keyword arguments that are literals; raise ValueError for others."""
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(_grammar(spec)) from error
    # Arguments with brackets may make it something else, as `f(1)(2)`.
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
    """Return the message for a string that is no recipe."""
    return (
        f"Cannot read this as a recipe. Received: {spec!r}. Allowed: a name "
        f"({', '.join(names(None))}), a name with keyword literals such as "
        "'current(power_of_two=True)', or '' or an amax_history_length such "
        "as '16', which mean delayed scaling as in Keras. Write it in one of "
        "these forms."
    )


def _class(name: object) -> type[Recipe]:
    """Return the class of recipes with a name, perhaps one of `_ALIASES`."""
    for candidate in (name, _ALIASES.get(str(name))):
        if not isinstance(candidate, str):
            continue
        if candidate in _extensions.recipes():
            cls: type[Recipe] = _extensions.get(
                _extensions.recipes()[candidate]
            )
            return cls
        if candidate in REGISTRY:
            return REGISTRY[candidate]
    known = names(None)
    raise ValueError(
        f"{name!r} is not a recipe. {did_you_mean(name, known)}Allowed: "
        f"{', '.join(known)}. Use one of these, or derive a dataclass from "
        "recipes.Recipe to add your own."
    )
