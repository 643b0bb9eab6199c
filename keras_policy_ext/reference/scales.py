"""From an amax to a scale, and from a history to a scale, in NumPy."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext import formats
from keras_policy_ext.reference.casting import float32

Array = np.ndarray[Any, Any]


#: The smallest normal float32: no scale is smaller.
SMALLEST_SCALE = np.float32(2.0**-126)


#: The largest power of two in float32: no scale is larger.
LARGEST_SCALE = np.float32(2.0**127)


def amax(x: ArrayLike) -> np.float32:
    """The largest magnitude, 0 for an empty array, NaN if x has one."""
    return np.float32(np.max(np.abs(float32(x)), initial=0.0))


def scale_from_amax(
    amax: ArrayLike,
    dtype: str,
    margin: int = 0,
    power_of_two: bool = False,
    previous: ArrayLike = 1.0,
) -> Array:
    """The dequantizing scale that maps amax onto the largest number.

    `scale = amax / max(dtype) * 2**margin` in float32, between 2^-126 (the
    smallest normal float32, whose reciprocal is finite) and 2^127. An amax
    below 2^-126 counts as 2^-126: JAX and TensorFlow on a CPU compute with
    subnormals as if they were 0. Element-wise over arrays of amax.

    Args:
        amax: Array of any shape.
        dtype: The narrow format.
        margin: Head-room in powers of two; more than 127 act as 127.
        power_of_two: Round the scale up to a power of two, on the bits.
        previous: Kept where amax is 0 or not finite; broadcastable to amax.

    Returns:
        float32 array of amax's shape.
    """
    observed, usable = _usable(amax)
    with np.errstate(over="ignore", under="ignore"):
        scale = observed / limit_with_margin(dtype, margin)
    scale = np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    return np.where(usable, scale, float32(previous))


def scale_of_multiplier(
    amax: ArrayLike, dtype: str, margin: int = 0, previous: ArrayLike = 1.0
) -> Array:
    """`1 / (max(dtype) / 2**margin / amax)`: the scale of delayed scaling.

    Flax and Transformer Engine compute the quantizing multiplier and invert
    it. This differs from `scale_from_amax` by one ulp at most, but delayed
    scaling feeds its own rounding back through the weights: after some steps
    only the same order of operations gives the same amaxes as theirs.
    Element-wise over arrays of amax.

    Source: `compute_scale` in flax/linen/fp8_ops.py.

    Args:
        amax: Array of any shape.
        dtype: The narrow format.
        margin: Head-room in powers of two; more than 127 act as 127.
        previous: Kept where amax is 0 or not finite; broadcastable to amax.

    Returns:
        float32 array of amax's shape, between 2^-126 and 2^126.
    """
    observed, usable = _usable(amax)
    with np.errstate(over="ignore", under="ignore"):
        multiplier = limit_with_margin(dtype, margin) / observed
    multiplier = np.clip(multiplier, SMALLEST_SCALE, 1 / SMALLEST_SCALE)
    return np.where(usable, np.float32(1) / multiplier, float32(previous))


def _usable(amax: ArrayLike) -> tuple[Array, Array]:
    """Normal amaxes, 1 where there is none, and where there is one."""
    observed = float32(amax)
    usable = np.isfinite(observed) & (observed > 0)
    normal = np.maximum(observed, SMALLEST_SCALE)
    return np.where(usable, normal, np.float32(1)), usable


def limit_with_margin(dtype: str, margin: int) -> np.float32:
    """The largest value of a format, less powers of two of head-room."""
    return np.float32(formats.get(dtype).max * 2.0 ** -min(margin, 127))


def round_up_to_power_of_two(scale: Array) -> Array:
    """The smallest power of two that is not below a scale."""
    bits = float32(scale).view(np.uint32)
    exponent = bits & np.uint32(0x7F800000)
    up = np.where(bits == exponent, np.uint32(0), np.uint32(0x00800000))
    return (exponent + up).view(np.float32)


def update_history(history: ArrayLike, amax: ArrayLike) -> Array:
    """Insert an amax: the history rolls by one, the newest is at index 0.

    The order is that of Keras and Flax: the history is rotated to the left
    and index 0 overwritten, so that index 1 holds the oldest entry and the
    last index the one before the newest. A non-finite amax is not inserted.

    Args:
        history: `(length,)`.
        amax: Scalar.

    Returns:
        float32 `(length,)`.
    """
    if not np.isfinite(amax):
        return float32(history).copy()
    rolled = np.roll(float32(history), -1)
    rolled[0] = amax
    return rolled


def delayed_scale(
    history: ArrayLike,
    dtype: str,
    *,
    current_amax: ArrayLike,
    previous: ArrayLike | None = None,
    margin: int = 0,
    amax_compute: str = "max",
    initial_scale: str | float = "current",
) -> np.float32:
    """The scale that delayed scaling uses in this step.

    It is the `scale_of_multiplier` of the reduced history.

    Args:
        history: `(length,)`, as it is **before** this step's amax enters.
        dtype: The narrow format.
        current_amax: This tensor's own amax, used by
            `initial_scale="current"` while there is nothing else.
        previous: The scale of the last step, kept while the history is all
            zero; None while only zeros were ever observed.
        margin: Head-room in powers of two.
        amax_compute: `"max"` or `"most_recent"`.
        initial_scale: `"current"` or 1.0.

    Returns:
        A float32 scalar.
    """
    entries = float32(history)
    reduced = entries[0] if amax_compute == "most_recent" else entries.max()
    if initial_scale == "current" and previous is None and not reduced:
        reduced = current_amax
    previous = 1.0 if previous is None else previous
    return np.float32(scale_of_multiplier(reduced, dtype, margin, previous))
