"""What comes after a contraction."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext import frameworks

Tensor = Any


def activated(activation: Any, x: Tensor) -> Tensor:
    """`activation(x)`, keeping no more for its gradient than it needs.

    Args:
        activation: Of a layer; None for none.
        x: Of any shape.
    """
    if activation is None:
        return x
    if activation is keras.activations.relu:
        return frameworks.current().relu(x)
    return activation(x)
