"""Convolutions of float32 tensors, by `keras.ops` and its transposes."""

from __future__ import annotations

from typing import Any

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor


class KerasConvolutions:
    """The convolutions of Keras, and their transposes by the framework.

    Args:
        reason: Why they are not of float8 tensors.
    """

    def __init__(self, reason: str):
        self.reason = reason

    def outputs(self, conv: Any, x: Tensor, w: Tensor) -> Tensor:
        """See `Convolutions.outputs`."""
        return conv.of(x, w)

    def inputs_grad(
        self, conv: Any, g: Tensor, w: Tensor, shape: Any
    ) -> Tensor:
        """See `Convolutions.inputs_grad`."""
        return backends.current().transpose(
            lambda x: self.outputs(conv, x, w), shape, g
        )

    def kernel_grad(
        self, conv: Any, x: Tensor, g: Tensor, shape: Any
    ) -> Tensor:
        """See `Convolutions.kernel_grad`."""
        return backends.current().transpose(
            lambda w: self.outputs(conv, x, w), shape, g
        )
