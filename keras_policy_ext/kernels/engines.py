"""Which kernels there are: those of Keras's backend."""

from __future__ import annotations

import importlib

from keras_policy_ext import frameworks
from keras_policy_ext.kernels.contract import Engine

_loaded: dict[str, Engine] = {}


def engine() -> Engine:
    """The kernels of Keras's backend.

    Raises:
        NotImplementedError: If the backend is not one of the three.
    """
    name = frameworks.current().name
    # A plain look-up, which torch.compile follows; it breaks on an import.
    if name not in _loaded:
        module = importlib.import_module(f"keras_policy_ext.kernels.{name}")
        _loaded[name] = module.ENGINE
    return _loaded[name]
