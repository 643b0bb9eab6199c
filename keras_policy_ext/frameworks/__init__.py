"""What differs by framework, apart from float8 kernels.

Running a branch, gathering replicas, taking gradients, tracing: one class for
each framework, imported when it is first asked for, over one in `keras.ops`.
"""

from __future__ import annotations

import importlib

import keras

from keras_policy_ext.frameworks.base import Framework
from keras_policy_ext.frameworks.operations import Operation, SavedTensors

__all__ = ["NAMES", "Framework", "Operation", "SavedTensors", "current"]

NAMES = ("tensorflow", "jax", "torch")

_loaded: dict[str, Framework] = {}


def current() -> Framework:
    """The framework that Keras runs on.

    Raises:
        NotImplementedError: If it is not one of the three.
    """
    backend = keras.backend.backend()
    # A plain look-up, which torch.compile follows; it breaks on an import.
    if backend not in _loaded:
        _loaded[backend] = _load(backend)
    return _loaded[backend]


def _load(backend: str) -> Framework:
    if backend not in NAMES:
        raise NotImplementedError(
            f"No float8 kernels for the Keras backend {backend!r}. Allowed: "
            f"{', '.join(NAMES)}. Set KERAS_BACKEND to one of them."
        )
    module = importlib.import_module(f"{__name__}.{backend}")
    framework: Framework = module.FRAMEWORK
    return framework
