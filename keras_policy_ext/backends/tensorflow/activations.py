"""TensorFlow: activations that keep little for their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.tensorflow.gradients import is_recorded

# Not public; where it is gone, XLA may keep what it could make again.
try:
    from tensorflow.compiler.tf2xla.python.xla import optimization_barrier
except ImportError:
    optimization_barrier = None

_BITS = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)


def relu(x: Tensor, for_xla: bool) -> Tensor:
    """`tf.nn.relu`, whose own gradient keeps the outputs.

    Args:
        x: Of any shape and floating dtype.
        for_xla: Whether XLA compiles it.
    """

    @tf.custom_gradient
    def differentiable(x: Tensor) -> Any:
        outputs = tf.nn.relu(x)
        kept = _packed(outputs > 0, for_xla)

        def gradient(outputs_grad: Tensor) -> Tensor:
            passes = tf.cast(_unpacked(kept), outputs_grad.dtype)
            passes = tf.reshape(passes, tf.shape(outputs_grad))
            return tf.raw_ops.ReluGrad(gradients=outputs_grad, features=passes)

        return outputs, gradient

    return differentiable(tf.identity(x))


def recomputed(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`activation(x)`, which XLA computes again for its gradient.

    Args:
        activation: An elementwise function.
        x: Of any shape and floating dtype.
    """

    @tf.custom_gradient
    def differentiable(x: Tensor) -> Any:
        def gradient(outputs_grad: Tensor) -> Tensor:
            again, then = x, outputs_grad
            if not is_recorded(x, outputs_grad):  # a barrier has no gradient
                again, then = _behind_barrier(x, outputs_grad)
            with tf.GradientTape() as tape:
                tape.watch(again)
                outputs = activation(again)
            return tape.gradient(outputs, again, then)

        return activation(x), gradient

    return differentiable(tf.identity(x))


def _packed(mask: Tensor, for_xla: bool) -> Tensor:
    """Eight numbers in a byte under XLA, where that is one pass over them.

    A byte each elsewhere, and where numbers do not fill bytes.
    """
    last = mask.shape[-1] if mask.shape.rank else None
    if not for_xla or not last or last % 8:
        return mask
    shape = tf.concat([tf.shape(mask)[:-1], [last // 8, 8]], 0)
    bytes_of_bits = tf.cast(tf.reshape(mask, shape), tf.uint8) * _BITS
    packed = tf.reduce_sum(bytes_of_bits, -1)
    (behind,) = _behind_barrier(packed)
    return behind


def _behind_barrier(*tensors: Tensor) -> list[Tensor]:
    """The same tensors: XLA knows of none before it has them all."""
    if optimization_barrier is None:
        return list(tensors)
    return list(optimization_barrier(*tensors))


def _unpacked(kept: Tensor) -> Tensor:
    """Numbers that are not zero where the mask was True."""
    if kept.dtype == tf.bool:
        return kept
    return tf.bitwise.bitwise_and(kept[..., tf.newaxis], _BITS)
