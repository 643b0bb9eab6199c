"""What makes a class a drop-in for a stock layer."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import keras

_STOCK: dict[type, type] = {}

LayerClass = TypeVar("LayerClass", bound=type)


def drop_in(cls: LayerClass) -> LayerClass:
    """Register a class as the float8 form of the stock layer of its name.

    It gets the stock signature, and is registered for saving.

    Args:
        cls: A class that derives from `Float8Mixin` and, last, from the
            stock layer of the same name.

    Returns:
        The class.
    """
    stock = getattr(keras.layers, cls.__name__)
    documented: Any = cls
    documented.__signature__ = inspect.signature(stock)
    _STOCK[stock] = cls
    register = keras.saving.register_keras_serializable("keras_policy_ext")
    return register(cls)


def drop_ins() -> dict[type, Any]:
    """Stock layer classes and the drop-in of each."""
    return dict(_STOCK)
