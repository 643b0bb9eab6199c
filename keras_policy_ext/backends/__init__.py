"""The backends: one folder for each framework, under one interface.

`interface` declares the methods of a backend. `matmuls` declares its `Engine`:
its float8 matmuls and casts. Each folder holds all code that imports its
framework; it is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from keras_policy_ext.numerics import primitives

__all__ = ["current", "engine"]

if TYPE_CHECKING:
    from keras_policy_ext.backends.interface import Backend
    from keras_policy_ext.backends.matmuls import Engine

    current: Backend
    """The backend that Keras runs on, found once, at the first use.

    It is `numerics.primitives.current`: every backend has the primitives.
    """

    engine: Engine
    """The `Engine` (matmul and cast kernels) of this backend."""
else:

    def __getattr__(name):
        """Find the backend and its engine at their first use."""
        if name not in ("current", "engine"):
            raise AttributeError(f"module {__name__!r} has no {name!r}")
        found = primitives.current
        module = importlib.import_module(f"{__name__}.{found.name}.engine")
        globals().update(current=found, engine=module.ENGINE)
        return globals()[name]
