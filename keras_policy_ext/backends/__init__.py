"""What each framework computes: one folder for each, under one interface.

`interface` says what a backend is asked for, `engine` what float8 matmuls and
casts it has. A folder holds all that imports its framework, and is imported
when it is first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from keras_policy_ext.backends.interface import Backend
from keras_policy_ext.backends.matmuls import Engine
from keras_policy_ext.numerics.primitives import primitives

__all__ = ["Backend", "Engine", "current", "engine"]

_engines: dict[str, Engine] = {}


current = cast("Callable[[], Backend]", primitives)
"""Return the backend that Keras runs on.

The same function as `numerics.primitives`, whose primitives are backends. It
raises NotImplementedError if Keras runs on another backend.
"""


def engine() -> Engine:
    """Return the float8 matmuls and casts of the backend that Keras runs on.

    Raises:
        NotImplementedError: If it is not one of the three.
    """
    name = current().name
    # A plain look-up, which torch.compile follows; it breaks on an import.
    if name not in _engines:
        module = importlib.import_module(f"{__name__}.{name}.engine")
        _engines[name] = module.ENGINE
    return _engines[name]
