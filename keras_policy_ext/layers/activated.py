"""The activation after a contraction."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor

_RECOMPUTED = (
    keras.activations.gelu,
    keras.activations.silu,
    keras.activations.mish,
    keras.activations.hard_silu,
)
"""Activations whose gradient keeps more than their inputs."""


def activated(activation: Any, x: Tensor) -> Tensor:
    """`activation(x)`, keeping no more for its gradient than it needs.

    Args:
        activation: Of a layer; None for none.
        x: Of any shape.
    """
    if activation is None:
        return x
    if activation is keras.activations.relu:
        return backends.current().relu(x)
    if activation in _RECOMPUTED:
        return backends.current().recomputed(activation, x)
    return activation(x)
