"""From a tensor to its amax, and from an amax to a scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from keras_policy_ext import formats

Tensor = Any

SMALLEST_SCALE = float(np.finfo("float32").smallest_normal)
"""2^-126: the smallest float32 whose reciprocal is finite on every backend."""

LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""

_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


def amax(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Largest magnitude, as float32.

    Args:
        x: Tensor of any shape and real dtype. An empty one has amax 0.
        axis: Axis or axes to reduce; None for all.
        keepdims: Whether reduced axes stay, with size 1.

    Returns:
        Float32 tensor, scalar for `axis=None`. Not finite where a reduced
        value is NaN or infinite.
    """
    if 0 in tuple(x.shape):
        return ops.max(
            ops.abs(ops.cast(x, "float32")),
            axis=axis,
            keepdims=keepdims,
            initial=0.0,
        )
    magnitude = ops.max(ops.abs(x), axis=axis, keepdims=keepdims)
    return ops.cast(magnitude, "float32")


def scale_from_amax(
    amax: Tensor,
    dtype: str,
    margin: int = 0,
    power_of_two: bool = False,
    previous: Tensor = 1.0,
) -> Tensor:
    """The dequantizing scale which maps `amax` to the top of the format.

    `amax / max(dtype) * 2**margin` in float32, never below 2^-126 (a scale of
    0 would give NaN) and never infinite. Where `amax` is 0 or not finite,
    `previous`.

    Args:
        amax: Float32 tensor of any shape, not negative.
        dtype: Name of the format, `"float8_e4m3fn"` or `"float8_e5m2"`.
        margin: Powers of two of headroom left above `amax`.
        power_of_two: Whether the scale is rounded up to a power of two.
        previous: Scale to keep, broadcastable to `amax`.

    Returns:
        Float32 tensor of the shape of `amax`.
    """
    return scale_for_limit(
        amax, formats.get(dtype).max, margin, power_of_two, previous
    )


def scale_for_limit(
    amax: Tensor,
    limit: Any,
    margin: int = 0,
    power_of_two: bool = False,
    previous: Tensor = 1.0,
) -> Tensor:
    """`scale_from_amax` for the largest value itself, or a tensor of them."""
    amax = ops.cast(amax, "float32")
    known = is_positive_finite(amax)
    # XLA multiplies by the reciprocal of a constant divisor, which differs in
    # the last bit (seen on JAX 0.10); this one is no constant to it.
    divisor = ops.where(known, limit, 1.0)
    scale = amax / divisor * 2.0**margin
    scale = ops.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    return ops.where(known, scale, previous)


def scale_of_multiplier(
    amax: Tensor, limit: Any, margin: int = 0, previous: Tensor = 1.0
) -> Tensor:
    """`1 / (limit / amax / 2**margin)`: what delayed scaling takes.

    Flax and Transformer Engine compute the quantizing multiplier and invert
    it; this differs from `amax / limit` by one ulp at most. Delayed scaling
    feeds its own rounding back, and after a few steps only the same order of
    operations gives the same amax histories as theirs.

    Source: `compute_scale` in flax/linen/fp8_ops.py.

    Args:
        amax: Float32 tensor of any shape, not negative.
        limit: Largest value of the format, or a tensor of them.
        margin: Powers of two of headroom left above `amax`.
        previous: Scale to keep where `amax` is 0 or not finite.

    Returns:
        Float32 tensor of the shape of `amax`.
    """
    known = is_positive_finite(amax)
    multiplier = limit / ops.where(known, amax, 1.0) / 2.0**margin
    # The selection keeps XLA from turning 1 / (a / b) into b / a.
    scale = 1.0 / ops.where(known, multiplier, 1.0)
    scale = ops.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    return ops.where(known, scale, previous)


def is_positive_finite(amax: Tensor) -> Tensor:
    """Whether a float32 value is neither 0, negative, infinite nor NaN.

    Read from the bits, since JAX and TensorFlow on a CPU take a subnormal for
    0 in a float comparison and torch does not.
    """
    bits = ops.view(amax, "int32")
    return ops.logical_and(
        ops.greater(bits, 0), ops.less(bits, _INFINITY_BITS)
    )


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below a normal float32.

    By integer arithmetic on the bits: `exp2(ceil(log2(x)))` is off by one
    near powers of two.

    Args:
        scale: Float32 tensor of any shape, positive, normal, at most 2^127.

    Returns:
        Float32 tensor of the same shape.
    """
    bits = ops.view(scale, "int32")
    exponent = ops.bitwise_and(bits + _MANTISSA_BITS, ~_MANTISSA_BITS)
    return ops.view(exponent, "float32")
