"""Compute scales of tensors and tiles, in NumPy.

There are float32 scales, powers of two (E8M0), and two levels (NVFP4).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext import formats
from keras_policy_ext.ext.reference.casting import cast, float32

Array = np.ndarray[Any, Any]

E8M0 = "float8_e8m0fnu"


def e8m0_up(amax: Array, dtype: str) -> Array:
    """Return E8M0 codes of amax / max(dtype), rounded up to powers of two.

    This holds except at the ends of the range: an amax / max of up to 2^-127
    has code 0, and the largest code is 254. Infinity has 254, NaN 255.
    """
    v = amax * (np.float32(1) / np.float32(formats.get(dtype).max))
    bits = v.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32)
    fraction = bits & np.uint32(0x7FFFFF)
    small = (exponent == 0) & (fraction <= 0x400000)
    up = (fraction > 0) & (exponent != 254) & ~small
    return _special(exponent + up, amax)


def e8m0_floor(amax: Array, dtype: str) -> Array:
    """Return E8M0 codes by the OCP MX 1.0 rule, under which large values clip.

    The exponent is that of the amax minus that of the largest value of the
    format. Infinity has code 254, NaN 255.
    """
    exponent = _exponent_above_largest(amax, dtype)
    return _special(np.clip(exponent, -127, 127) + 127, amax)


def floor_scale(amax: Array, dtype: str) -> Array:
    """Return the scale of the `e8m0_floor` rule as float32; 1 if amax is 0.

    The scale is a power of two.
    """
    usable = np.isfinite(amax) & (amax > 0)
    exponent = _exponent_above_largest(np.where(usable, amax, 1), dtype)
    scale = np.ldexp(np.float32(1), np.clip(exponent, -126, 127))
    scale = np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    return np.where(usable, scale, np.float32(1))


def multiplier(exponents: Array) -> Array:
    """Return `2^(127 - E)`, by which values are multiplied, for E8M0 codes E.

    Dividing by 2^-127 fails where denormals are flushed to zero. The multiplier
    is a normal number except for E = 254.
    """
    return np.ldexp(np.float32(1), 127 - exponents.astype(np.int32))


def _exponent_above_largest(amax: Array, dtype: str) -> Array:
    largest = math.frexp(formats.get(dtype).max)[1] - 1
    return np.frexp(amax)[1] - 1 - largest


def _special(exponent: Array, amax: Array) -> Array:
    exponent = np.where(amax == 0, 0, exponent)
    exponent = np.where(np.isinf(amax), 254, exponent)
    exponent = np.where(np.isnan(amax), 255, exponent)
    return exponent.astype(np.uint8)


#: The format of the scales of blocks.
BLOCK_SCALE = "float8_e4m3fn"

#: The largest scale of a block under four over six: 1.5 times it is exact too.
LARGEST_OF_SIX = 256.0

#: The two values that the amax of a block can become under four over six.
FOUR, SIX = 4.0, 6.0

_FLOAT32_MAX = np.finfo(np.float32).max


def two_level_scales(
    block_amax: Array,
    tensor_amax: np.float32,
    dtype: str,
    reach: float | None = None,
) -> tuple[Array, Array]:
    """Return (NVFP4 block scales, multipliers of the values in each block).

    With `S = min(448 * 6 / tensor_amax, FLT_MAX)` (448 and 6 are the largest
    values of e4m3fn and e2m1fn), a scale is `e4m3fn(block_amax * (S / 6))` and
    the multiplier `min(1 / (scale * (1 / S)), FLT_MAX)`, so that a block whose
    scale rounds to 0 has the largest multiplier and the value 0.

    Args:
        block_amax: float32 of any shape.
        tensor_amax: float32 scalar; S is 1 if it is 0.
        dtype: The format of the elements.
        reach: 4 or 6, what the amax of a block becomes under four over six;
            S then has 256 in the place of 448. None for plain NVFP4.

    Returns:
        `float8_e4m3fn` scales and float32 multipliers of block_amax's shape.
    """
    adaptive = reach is not None
    becomes = np.float32(reach if adaptive else formats.get(dtype).max)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        wanted = np.float32(_largest_value(dtype, adaptive)) / tensor_amax
        scale = np.minimum(wanted, _FLOAT32_MAX)
        scale = scale if tensor_amax else np.float32(1)
        scales = cast(block_amax * (scale / becomes), BLOCK_SCALE)
        inverse = np.float32(1) / (float32(scales) * (np.float32(1) / scale))
    return scales, np.minimum(inverse, _FLOAT32_MAX)


def four_over_six_scales(
    x: Array, block_amax: Array, tensor_amax: np.float32, tile: Tile
) -> tuple[Array, Array]:
    """Return `two_level_scales` for reaches of 4 or 6, by the smaller error.

    The error of a block is the sum of the squares of `|x| · f - q`, times the
    square of its scale. f is the multiplier, and q the value in e2m1fn, to
    nearest. A difference is measured in whole parts of 1 / 1024, with the
    product cut to them and to 8 at most: sums of integers are equal on every
    machine. 6 is taken where the errors are equal.

    Source: arXiv 2512.02010.

    Args:
        x: float32 `(..., rows, columns)`.
        block_amax: float32, one per tile, finite.
        tensor_amax: float32 scalar.
        tile: Rows and columns of a block.
    """
    dtype = "float4_e2m1fn"
    six = two_level_scales(block_amax, tensor_amax, dtype, SIX)
    four = two_level_scales(block_amax, tensor_amax, dtype, FOUR)
    errors = [_squared_errors(x, *each, tile) for each in (six, four)]
    less = (errors[1] < errors[0]) & (block_amax > 0)
    return np.where(less, four[0], six[0]), np.where(less, four[1], six[1])


def _squared_errors(
    x: Array, scales: Array, factors: Array, tile: Tile
) -> Array:
    """Return the error of each block, as `four_over_six_scales` defines it."""
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.abs(x) * spread(factors, tile, x.shape)
        scaled = np.minimum(np.nan_to_num(scaled, posinf=8), np.float32(8))
    values = float32(cast(np.minimum(scaled, np.float32(6)), "float4_e2m1fn"))
    parts = (scaled * 1024).astype(np.int64) - (values * 1024).astype(np.int64)
    sums = parts**2
    for axis, size in zip((-2, -1), tile[:2], strict=True):
        starts = np.arange(0, sums.shape[axis], size or sums.shape[axis])
        sums = np.add.reduceat(sums, starts, axis=axis)
    return float32(sums) * (float32(scales) * float32(scales))


def tensor_scale(
    tensor_amax: np.float32, dtype: str, adaptive: bool = False
) -> np.float32:
    """Return the NVFP4 tensor scale `tensor_amax / 2688`, or 1 for amax 0.

    2688 is 448 · 6; with `adaptive`, under four over six, it is 256 · 6. The
    scale is computed in float32.
    """
    if not tensor_amax:
        return np.float32(1)
    return np.float32(tensor_amax) / np.float32(_largest_value(dtype, adaptive))


def _largest_value(dtype: str, adaptive: bool = False) -> float:
    largest = LARGEST_OF_SIX if adaptive else formats.get(BLOCK_SCALE).max
    return largest * formats.get(dtype).max


#: How far one scale reaches along the last two axes; None is all of an axis.
#: The third entry, if any, is whether `(None, None)` is one matrix of several.
Tile = tuple[int | None, int | None] | tuple[int | None, int | None, bool]


def is_whole(tile: Tile) -> bool:
    """Return True if a tile is a whole array with all its axes."""
    return tile[:2] == (None, None) and not any(tile[2:])


def tile_amax(x: ArrayLike, tile: Tile) -> Array:
    """Return the largest magnitude in each tile; NaN if the tile holds NaN.

    The last tile of an axis may be smaller. `(None, None)` is the whole array
    with all its axes; every other tile, also `(None, None, True)`, is within
    one matrix.

    Args:
        x: `(..., rows, columns)`.
        tile: Rows and columns of a tile.

    Returns:
        float32 `(..., rows / tile[0], columns / tile[1])`, rounded up; a
        single number with as many axes for the whole array.
    """
    magnitudes = np.abs(float32(x))
    if is_whole(tile):
        return np.reshape(amax(magnitudes), (1,) * magnitudes.ndim)
    for axis, size in zip((-2, -1), tile[:2], strict=True):
        length = magnitudes.shape[axis]
        starts = np.arange(0, length, size or max(length, 1))
        magnitudes = np.maximum.reduceat(magnitudes, starts, axis=axis)
    return magnitudes


def spread(tiles: Array, tile: Tile, shape: tuple[int, ...]) -> Array:
    """Repeat the value of each tile for all elements of the tile.

    The result has the shape `(..., rows, columns)`.
    """
    for axis, size in zip((-2, -1), tile[:2], strict=True):
        tiles = tiles.repeat(size or shape[axis], axis=axis)
    return np.broadcast_to(tiles[..., : shape[-2], : shape[-1]], shape)


#: The smallest normal float32: no scale is smaller.
SMALLEST_SCALE = np.float32(2.0**-126)


#: The largest power of two in float32: no scale is larger.
LARGEST_SCALE = np.float32(2.0**127)


def amax(x: ArrayLike) -> np.float32:
    """Return the largest magnitude in x; 0 if x is empty, NaN if x has NaN."""
    return np.float32(np.max(np.abs(float32(x)), initial=0.0))


def scale_from_amax(
    amax: ArrayLike,
    dtype: str,
    margin: int = 0,
    power_of_two: bool = False,
    previous: ArrayLike = 1.0,
) -> Array:
    """Return the scale at which amax becomes the format's largest value.

    `scale = amax / max(dtype) * 2**margin` in float32, between 2^-126 (the
    smallest normal float32, whose reciprocal is finite) and 2^127. An amax
    below 2^-126 counts as 2^-126: JAX and TensorFlow on a CPU compute with
    subnormals as if they were 0. Element-wise over arrays of amax.

    Args:
        amax: Array of any shape.
        dtype: The narrow format.
        margin: Headroom in powers of two; more than 127 acts as 127.
        power_of_two: Round the scale up to a power of two, on the bits.
        previous: The scale to keep if amax is 0 or not finite; broadcastable
            to amax.

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
    """Return a scale as 1 / multiplier, as delayed scaling computes it.

    The multiplier is `max(dtype) / 2**margin / amax`.

    Flax and Transformer Engine compute the quantizing multiplier and invert
    it. This differs from `scale_from_amax` by at most one ulp. But delayed
    scaling feeds its own rounding back through the weights: after some steps,
    only the same order of operations gives the same amaxes as theirs.
    Element-wise over arrays of amax.

    Source: `compute_scale` in flax/linen/fp8_ops.py.

    Args:
        amax: Array of any shape.
        dtype: The narrow format.
        margin: Headroom in powers of two; more than 127 acts as 127.
        previous: The scale to keep if amax is 0 or not finite; broadcastable
            to amax.

    Returns:
        float32 array of amax's shape, between 2^-126 and 2^126.
    """
    observed, usable = _usable(amax)
    with np.errstate(over="ignore", under="ignore"):
        multiplier = limit_with_margin(dtype, margin) / observed
    multiplier = np.clip(multiplier, SMALLEST_SCALE, 1 / SMALLEST_SCALE)
    return np.where(usable, np.float32(1) / multiplier, float32(previous))


def _usable(amax: ArrayLike) -> tuple[Array, Array]:
    """Return (amaxes, mask): where the mask is False, the amax is set to 1."""
    observed = float32(amax)
    usable = np.isfinite(observed) & (observed > 0)
    normal = np.maximum(observed, SMALLEST_SCALE)
    return np.where(usable, normal, np.float32(1)), usable


def limit_with_margin(dtype: str, margin: int) -> np.float32:
    """Return the largest value of a format, divided by `2**margin`."""
    return np.float32(formats.get(dtype).max * 2.0 ** -min(margin, 127))


def round_up_to_power_of_two(scale: Array) -> Array:
    """Return the smallest power of two that is not below a scale."""
    bits = float32(scale).view(np.uint32)
    exponent = bits & np.uint32(0x7F800000)
    up = np.where(bits == exponent, np.uint32(0), np.uint32(0x00800000))
    return (exponent + up).view(np.float32)


def update_history(history: ArrayLike, amax: ArrayLike) -> Array:
    """Return the history with an amax added at index 0, and the oldest dropped.

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
    """Return the scale that delayed scaling uses in the present step.

    It is the `scale_of_multiplier` of the reduced history.

    Args:
        history: `(length,)`, **before** the amax of this step is inserted.
        dtype: The narrow format.
        current_amax: The amax of this tensor, used by
            `initial_scale="current"` while the history is all zero.
        previous: The scale of the last step, kept while the history is all
            zero; None while only zeros were observed.
        margin: Headroom in powers of two.
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
