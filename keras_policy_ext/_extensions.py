"""The names that extensions add to the core, each imported at its first use.

The core imports no extension. `keras_policy_ext.ext` says what there is, and
the core asks for it here, by the public name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

_HOMES: dict[str, str] = {}


def add(homes: Mapping[str, str]) -> None:
    """Make names known.

    Args:
        homes: By public name, without that of the package, the module that has
            it, such as `{"layers.LSTM": "keras_policy_ext.ext.recurrent.rnn"}`.
    """
    _HOMES.update(homes)


def names_of(module: str) -> list[str]:
    """Return the names that extensions add to a module.

    Args:
        module: Its name without that of the package, `""` for the package.
    """
    parts = (name.rpartition(".") for name in _HOMES)
    return sorted(name for home, _, name in parts if home == module)


def has(name: str) -> bool:
    """Return True if an extension adds this public name."""
    return name in _HOMES


def get(name: str) -> Any:
    """Import and return what has a public name, such as `"layers.LSTM"`.

    Raises:
        AttributeError: If no extension that is installed has it.
    """
    if name not in _HOMES:
        raise AttributeError(
            f"`keras_policy_ext.{name}` is not here: no extension that is "
            f"installed adds it. Allowed: {', '.join(sorted(_HOMES)) or None}. "
            "Install the whole package."
        )
    found = importlib.import_module(_HOMES[name])
    return getattr(found, name.rpartition(".")[2])
