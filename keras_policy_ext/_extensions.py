"""The names that extensions add to the core, each imported at its first use.

The core imports no extension. `keras_policy_ext.ext` has the table of their
public names, and the core looks a name up here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

_homes: dict[str, str] = {}
_modules: set[str] = set()
_on_demand: dict[str, str] = {}
_recipes: dict[str, str] = {}


def add(
    homes: Mapping[str, str],
    modules: Iterable[str],
    on_demand: Mapping[str, str] | None = None,
    recipes: Mapping[str, str] | None = None,
) -> None:
    """Tell the core what extensions have; it imports each at its first use.

    Args:
        homes: By public name, without that of the package, the module that has
            it, such as `{"layers.LSTM": "keras_policy_ext.ext.recurrent.rnn"}`.
        modules: Modules of the package that only extensions have, such as
            `"loops"`.
        on_demand: By a word that the core passes to `import_for`, such as
            `"memory"`, the module to import.
        recipes: By the name of a recipe, the public name of its class, such as
            `{"nvfp4": "recipes.NVFP4Scaling"}`.
    """
    _homes.update(homes)
    _modules.update(modules)
    _on_demand.update(on_demand or {})
    _recipes.update(recipes or {})


def import_for(demand: str) -> None:
    """Import the module that registers what the core asks for, once.

    Nothing is imported if no extension that is installed has it.
    """
    name = _on_demand.get(demand)
    if name is not None:
        importlib.import_module(name)
        _on_demand.pop(demand, None)  # Another thread may have done so.


def recipes() -> Mapping[str, str]:
    """Return the public names of the classes of recipes, by recipe."""
    return _recipes


def home(name: str) -> str:
    """Return the name of the module that has a public name."""
    return _homes[name]


def has(name: str) -> bool:
    """Return True if an extension adds this public name."""
    return name in _homes


def get(name: str) -> Any:
    """Import and return what has a public name, such as `"layers.LSTM"`.

    Raises:
        AttributeError: If no extension that is installed has it.
    """
    if name in _modules:
        return importlib.import_module(f"{__package__}.{name}")
    if name not in _homes:
        raise AttributeError(
            f"`keras_policy_ext.{name}` belongs to an extension that is not "
            "installed here. Received: the core alone, without "
            "`keras_policy_ext.ext`. Allowed: the names of the core. Install "
            "the whole package."
        )
    return getattr(importlib.import_module(_homes[name]), name.split(".")[-1])
