"""The backends: one folder for each framework, under one interface.

`interface` declares the methods of a backend. `engine` declares its float8
matmuls and casts. Each folder holds all code that imports its framework; it is
imported at its first use.
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

It is the function `numerics.primitives`, since every backend has the
primitives. It raises NotImplementedError if Keras runs on another backend.
"""


def engine() -> Engine:
    """Return the `Engine` (matmul and cast kernels) of Keras's backend.

    Raises:
        NotImplementedError: If it is not TensorFlow, JAX or PyTorch.
    """
    name = current().name
    # A plain look-up, which torch.compile follows; it breaks on an import.
    if name not in _engines:
        module = importlib.import_module(f"{__name__}.{name}.engine")
        _engines[name] = module.ENGINE
    return _engines[name]
