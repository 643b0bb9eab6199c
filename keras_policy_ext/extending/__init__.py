"""For those who write extensions: the functions and classes of the core.

An extension uses the public modules of the package, the seams, and the names
of these modules, by topic:

- `changes`: convert a model for a while, undo what was done, its optimizers
- `contractions`: plans of contractions, and operands that are quantized
- `devices`: what devices can do, and pretending that one is present
- `files`: read files that may be damaged or malicious
- `filters`: filters of `convert` that know the sizes of all kernels
- `frozen`: the layers and kernels that are frozen, or could be
- `layers`: what a float8 form of a layer derives from
- `models`: the layers of a model, their paths, policies and states
- `tracing`: traced calls of a model, and the programs made of them
- `user_code`: warnings at the line of the user, and scopes for users
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_policy_ext.extending import (
        changes,
        contractions,
        devices,
        files,
        filters,
        frozen,
        layers,
        models,
        tracing,
        user_code,
    )

__all__ = [
    "changes",
    "contractions",
    "devices",
    "files",
    "filters",
    "frozen",
    "layers",
    "models",
    "tracing",
    "user_code",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
