"""Compute the amax of a tensor, and the scale for an amax."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import primitives
from keras_policy_ext.numerics.casting import (
    EXPONENT_BITS,
    round_to_format,
    tensor_of,
    view,
)
from keras_policy_ext.stored_kernels import (
    E4M3,
    LARGEST_IN_E4M3,
    LEAST_IN_E4M3,
)

SMALLEST_SCALE = float(np.finfo("float32").smallest_normal)
"""2^-126: the smallest float32 whose reciprocal is finite on every backend."""

LARGEST_SCALE = 2.0**127
"""The largest power of two in float32."""

LARGEST_MARGIN = 127
"""The largest margin, in powers of two; beyond it every scale is extreme."""

_MANTISSA_BITS = 0x007FFFFF


def amax(
    x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the largest magnitude along axes of a tensor, in float32.

    Args:
        x: Tensor of any shape and real dtype. An empty one has amax 0.
        axis: Axis or axes to reduce; None for all, `()` for none.
        keepdims: Whether to keep reduced axes with size 1.

    Returns:
        Float32 tensor, scalar for `axis=None`. Not finite if a value is not.
    """
    x = x if ops.is_tensor(x) else tensor_of(x, "float32")
    if 0 in tuple(x.shape):
        # Keras's `max` of it forgets the axes on PyTorch (keras 3.15).
        return ops.sum(ops.cast(x, "float32"), axis=axis, keepdims=keepdims)
    if keras.backend.backend() == "torch":
        # Extremes need no memory for magnitudes: a quarter of the time, and
        # half of that where both are found at once (torch 2.13, CPU).
        if axis is None and not keepdims and x.dtype.is_floating_point:
            smallest, largest = x.aminmax()
            return largest.abs().maximum(smallest.abs()).float()
        if axis == ():  # To PyTorch it means all axes.
            return ops.cast(ops.abs(x), "float32")
        # Not `ops.max`, which torch.compile does not follow (keras 3.15).
        axes = () if axis is None else axis
        largest = x.amax(axes, keepdims)
        smallest = x.amin(axes, keepdims)
        magnitude = ops.maximum(ops.abs(largest), ops.abs(smallest))
        return ops.cast(magnitude, "float32")
    magnitude = primitives.current.abs_or_inf(x)
    largest = ops.max(magnitude, axis=axis, keepdims=keepdims)
    return ops.cast(largest, "float32")


def amax_by_columns(x: Tensor) -> Tensor:
    """Return `amax(x)`, on JAX by reducing each column first.

    The gradient of a bias is the sum of each column of an outputs gradient. XLA
    for a GPU, as JAX configures it, fuses two reductions along the same axes
    into one kernel, so that the amax needs no extra read.
    """
    rows = tuple(range(len(x.shape) - 1))
    is_empty = 0 in tuple(x.shape)
    if not rows or is_empty or keras.backend.backend() != "jax":
        return amax(x)
    return ops.max(amax(x, axis=rows))


def scale_from_amax(
    amax: Tensor,
    dtype: str,
    margin: int = 0,
    power_of_two: bool = False,
    previous: Tensor = 1.0,
) -> Tensor:
    """Return the scale that maps `amax` to a format's largest value.

    It is `amax / max(dtype) * 2**margin` in float32, never below 2^-126 (a
    scale of 0 would give NaN) and never infinite. An `amax` below 2^-126
    counts as 2^-126. If `amax` is 0 or not finite, the result is `previous`.

    Args:
        amax: Float32 tensor of any shape, not negative.
        dtype: Name of the format, `"float8_e4m3fn"` or `"float8_e5m2"`.
        margin: Powers of two of headroom above `amax`; at most 127 count.
        power_of_two: Whether the scale is rounded up to a power of two.
        previous: Scale to keep, broadcastable to `amax`.

    Returns:
        Float32 tensor of the shape of `amax`.

    Examples:
        >>> float(kpe.numerics.scale_from_amax(896.0, "float8_e4m3fn"))
        2.0
    """
    amax, previous = tensor_of(amax, "float32"), tensor_of(previous, "float32")
    return scale_for_limit(
        amax, formats.get(dtype).max, margin, power_of_two, previous
    )


def scale_for_limit(
    amax: Tensor,
    limit: float | Tensor,
    margin: int = 0,
    power_of_two: bool = False,
    previous: Tensor = 1.0,
) -> Tensor:
    """Return the scale, a divisor, by which `amax` becomes `limit`.

    It is `amax * 2**margin / limit`, or `previous` where `amax` is 0 or not
    finite; see `scale_from_amax`. A number that the host knows is computed
    without ops.
    """
    number = primitives.current.known_number(amax)
    if number is not None and isinstance(limit, float):
        divisor = with_margin(limit, margin) if margin else limit
        scale = _scale_of_number(number, divisor, power_of_two)
        scale = previous if scale is None else scale
        return ops.convert_to_tensor(scale, "float32")
    amax = ops.cast(amax, "float32")
    is_usable = is_positive_finite(amax)
    # XLA multiplies by the reciprocal of a constant divisor, which differs in
    # the last bit (seen on JAX 0.10); this one is no constant to it.
    divisor = ops.where(is_usable, with_margin(limit, margin), 1.0)
    # JAX and TensorFlow on a CPU take a subnormal for 0, torch does not.
    normal = ops.maximum(amax, SMALLEST_SCALE)
    scale = primitives.current.divided(normal, divisor)
    scale = ops.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    return ops.where(is_usable, scale, previous)


def _scale_of_number(
    amax: float, divisor: float, power_of_two: bool
) -> float | None:
    """Return `scale_for_limit` of a float; None for 0, infinity and NaN."""
    if not 0.0 < amax < math.inf:
        return None
    # In float64: a quotient of float32 values rounds to the same float32.
    scale = max(amax, SMALLEST_SCALE) / divisor
    scale = float(np.float32(min(max(scale, SMALLEST_SCALE), LARGEST_SCALE)))
    if not power_of_two:
        return scale
    mantissa, exponent = math.frexp(scale)  # A power of two has 0.5.
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def scale_of_multiplier(
    amax: Tensor, limit: float | Tensor, margin: int = 0, previous: Tensor = 1.0
) -> Tensor:
    """Return `1 / (limit / 2**margin / amax)`, delayed scaling's scale.

    Flax and Transformer Engine compute the quantizing multiplier and invert it.
    The result differs from `amax / limit` by one ulp at most. Delayed scaling
    feeds its own rounding back. After a few steps only the same order of
    operations gives the same amax histories as theirs. The arguments are those
    of `scale_for_limit`, the result is between 2^-126 and 2^126.

    Source: `compute_scale` in flax/linen/fp8_ops.py.
    """
    number = primitives.current.known_number(amax)
    if isinstance(limit, float) and number and 0.0 < number < math.inf:
        scale = inverted_of_number(number, with_margin(limit, margin))
        return ops.convert_to_tensor(scale, "float32")
    is_usable = is_positive_finite(amax)
    # Without the clips XLA would turn 1 / (a / b) into b / a. Written `1 / x`,
    # torch (`a / x` for a number a) and TensorFlow's graphs (for 1) multiply
    # by a reciprocal, which TensorFlow even approximates.
    normal = ops.maximum(amax, SMALLEST_SCALE)
    divided = primitives.current.divided
    multiplier = divided(with_margin(limit, margin), normal)
    multiplier = ops.clip(multiplier, SMALLEST_SCALE, 1.0 / SMALLEST_SCALE)
    one = ops.where(is_usable, 1.0, previous)
    return divided(one, ops.where(is_usable, multiplier, 1.0))


def inverted_of_number(amax: float, divisor: float) -> float:
    """Return `scale_of_multiplier` of a positive finite float."""
    # In float64, in which each quotient of two float32 values rounds the same.
    multiplier = divisor / max(amax, SMALLEST_SCALE)
    multiplier = min(max(multiplier, SMALLEST_SCALE), 1.0 / SMALLEST_SCALE)
    return float(np.float32(1.0 / float(np.float32(multiplier))))


def with_margin(limit: float | Tensor, margin: int) -> Any:
    """Divide a format's largest value by `2**margin`, the headroom."""
    # An exact division. Applied to the quotient instead it might go through
    # a subnormal, which JAX and TensorFlow on a CPU flush to 0, and XLA
    # would turn a / b / c into a / (b * c), which can overflow.
    return limit / 2.0 ** min(margin, LARGEST_MARGIN)


def is_positive_finite(amax: Tensor) -> Tensor:
    """Return, per element, whether a value is positive and finite."""
    # JAX and TensorFlow on a CPU compare a subnormal as 0, and torch does not.
    bits = view(amax, "int32")
    # Operators, here and below: an eager call of `ops` takes ten times as long.
    return (bits > 0) & (bits < EXPONENT_BITS)


def round_scale(scale: Tensor, scale_format: str) -> Tensor:
    """Return scales rounded as by `stored_kernels.rounded_scales`.

    Args:
        scale: Float32 tensor of any shape, positive, normal, at most 2^127.
        scale_format: One of `stored_kernels.SCALE_FORMATS`.

    Returns:
        Float32 tensor of the same shape.
    """
    if scale_format == "float32":
        return scale
    if scale_format == "float8_e8m0fnu":
        return round_up_to_power_of_two(scale)
    if scale_format == E4M3:  # As `outer_scale` says.
        largest = ops.maximum(amax(scale), LEAST_IN_E4M3)
        outer = round_up_to_power_of_two(largest) / LARGEST_IN_E4M3
        least = formats.get(E4M3).smallest_subnormal
        numbers = ops.maximum(scale / outer, least)
        return round_to_format(numbers, E4M3) * outer
    # On the bits: XLA drops a cast to bfloat16 and back (JAX 0.10).
    bits = view(scale, "int32")
    is_odd = ops.bitwise_and(ops.right_shift(bits, 16), 1)
    bits = ops.bitwise_and(bits + 0x7FFF + is_odd, ~0xFFFF)
    return view(bits, "float32")


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Round normal float32 values up to a power of two.

    It computes on the bits: `exp2(ceil(log2(x)))` errs near powers of two.

    Args:
        scale: Float32 tensor of any shape, positive, normal, at most 2^127.

    Returns:
        Float32 tensor of the same shape.
    """
    bits = view(tensor_of(scale, "float32"), "int32")
    exponent = ops.bitwise_and(bits + _MANTISSA_BITS, ~_MANTISSA_BITS)
    return view(exponent, "float32")
