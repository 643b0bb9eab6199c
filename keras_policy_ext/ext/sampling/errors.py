"""Measure the rounding error of a quantization."""

from __future__ import annotations

import math

from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.casting import quantize, tensor_of
from keras_policy_ext.numerics.scaling import amax


def sqnr_db(reference: Tensor, approximation: Tensor) -> Tensor:
    """Return the signal-to-quantization-noise ratio, in decibels.

    It is `20 log10(|reference| / |reference - approximation|)`, with Frobenius
    norms in float32; infinite if both tensors are equal.

    Args:
        reference: Tensor of any shape.
        approximation: Tensor of the shape of `reference`.

    Returns:
        Scalar float32 tensor, dB.

    Raises:
        ValueError: If the shapes differ.
    """
    reference, approximation = (
        ops.cast(tensor_of(x, "float32"), "float32")
        for x in (reference, approximation)
    )
    if tuple(reference.shape) != tuple(approximation.shape):
        raise ValueError(
            "The tensor and its approximation have different shapes. "
            f"Received: shapes {tuple(reference.shape)} and "
            f"{tuple(approximation.shape)}. Allowed: equal shapes. Broadcast "
            "first, if that is what you mean."
        )
    noise = _log_norm(reference - approximation)
    level = (20.0 / math.log(10.0)) * (_log_norm(reference) - noise)
    # Of zeros that stay zeros the difference would be NaN.
    return ops.where(ops.equal(noise, -math.inf), math.inf, level)


def _log_norm(x: Tensor) -> Tensor:
    """Return the natural logarithm of a tensor's Frobenius norm."""
    largest = amax(x)
    # The squares of unscaled values might overflow.
    unit = ops.where(ops.greater(largest, 0.0), largest, 1.0)
    sum_of_squares = ops.sum(ops.square(ops.divide(x, unit)))
    return ops.log(unit) + 0.5 * ops.log(sum_of_squares)


def underflow_fraction(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Return the fraction of nonzero values that quantize to zero.

    Args:
        x: Tensor of any shape.
        scale: Dequantizing scale, float32, broadcastable to `x`.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.

    Returns:
        Scalar float32 tensor between 0 and 1; 0 if `x` is all zero.
    """
    x = tensor_of(x, "float32")
    non_zero = ops.not_equal(x, 0)
    quantized = ops.cast(quantize(x, scale, dtype), "float32")
    lost = ops.logical_and(non_zero, ops.equal(quantized, 0))
    total = ops.sum(ops.cast(non_zero, "float32"))
    return ops.sum(ops.cast(lost, "float32")) / ops.maximum(total, 1.0)
