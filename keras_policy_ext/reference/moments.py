"""Quantize the moments of an optimizer to one byte a number, in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.reference.casting import _mix, _unsigned, float32
from keras_policy_ext.reference.scales import scale_from_amax

Array = np.ndarray[Any, Any]

#: Numbers with one scale, by the name of the form.
BLOCKS = {"float8": 256, "mx": 32}

#: 2^32 divided by the golden ratio, an odd number.
GOLDEN = 0x9E3779B1

#: Magnitudes that count as infinite, and NaN, are taken for these in scales, so
#: that the numbers of the largest codes are finite, also when they are squared.
LARGEST = {"first": 2.0**120, "second": 2.0**60}

#: The smallest scale: denormals, which some backends take for 0, become 0.
SMALLEST = 2.0**-100

#: The square root of the smallest normal float32.
SMALLEST_ROOT = 2.0**-63


class Kind(NamedTuple):
    """The code of one kind of moments: mantissa bits, and if it has a sign."""

    mantissa_bits: int
    signed: bool


#: First moments are in e4m3; of a second moment, the square root is stored,
#: without a sign and with one more bit of the mantissa.
KINDS = {"first": Kind(3, True), "second": Kind(4, False)}


def moment_key(step: int, number: int) -> int:
    """Return the key of a slot in a step, `mix(mix(step) + number)`.

    Args:
        step: How many steps the optimizer has made.
        number: The place of the slot among the variables of the optimizer.

    Returns:
        An int32.
    """
    mixed = _mix(_mix(_unsigned(step)) + _unsigned(number))
    return int(mixed.view(np.int32)[0])


def moment_bits(numbers: int, key: int | None, count: int) -> Array:
    """Return random bits: the upper ones of `(i * GOLDEN + key) mod 2^32`.

    A number has other bits in each step, as the key is a hash of the step.

    Args:
        numbers: How many numbers there are.
        key: From `moment_key`; None for the bits that round to nearest, and
            a tie away from zero.
        count: How many bits.
    """
    if key is None:
        return np.full(numbers, 1 << (count - 1), np.int64)
    index = np.arange(numbers, dtype=np.int64)
    return ((index * GOLDEN + key) & 0xFFFFFFFF) >> (32 - count)


def quantize_moments(
    x: ArrayLike, kind: str, form: str = "float8", key: int | None = None
) -> tuple[Array, Array]:
    """Quantize a moment to codes of one byte, with a scale for each block.

    A block is 256 (`"mx"`: 32) numbers in row-major order. NaN
    counts as 0 in a second moment, as do negative numbers, and as an infinity
    in a first one; infinities count as 2^120. A block of zeros
    has scale 1. A second moment above 0 never becomes 0.

    Args:
        x: Array of any shape, read as float32.
        kind: `"first"` or `"second"`.
        form: `"float8"`, with float32 scales, or `"mx"`, with powers of two
            that are stored as E8M0.
        key: For stochastic rounding; None rounds to nearest.

    Returns:
        uint8 codes of the shape of `x`, and scales (blocks,), float32 or the
        uint8 codes of E8M0.
    """
    mantissa_bits, signed = KINDS[kind]
    x = float32(x)
    magnitude = np.abs(x)
    if not signed:
        magnitude = np.sqrt(magnitude)
        x = np.sqrt(x)
        x = np.where(x >= SMALLEST_ROOT, x, np.float32(0))
    count = x.size
    size = BLOCKS[form]
    blocks = -(-count // size)
    rest = (0, blocks * size - count)
    padded = np.pad(x.ravel(), rest).reshape(blocks, size)
    magnitude = np.pad(magnitude.ravel(), rest).reshape(blocks, size)
    amax = np.max(magnitude, axis=1)
    limit = LARGEST[kind]
    amax = np.where(np.isnan(amax), limit, np.minimum(amax, limit))
    scale = scale_from_amax(amax, "float8_e4m3fn", power_of_two=form == "mx")
    scale = np.maximum(scale, np.float32(SMALLEST))
    q = np.abs(padded) * (np.float32(1) / scale)[:, None]
    q = np.where(q <= 480, q, np.float32(480))
    exponent = np.frexp(np.maximum(q, np.float32(2.0**-6)))[1] - 1
    dropped = 23 - mantissa_bits
    bits = moment_bits(blocks * size, key, dropped).reshape(q.shape)
    # In float32 below the smallest normal number, as the kernels compute it.
    steps = np.ldexp(q.astype(np.float64), mantissa_bits - exponent)
    share = bits * 2.0**-dropped
    small = q < np.float32(2.0**-6)
    summed = float32(steps) + float32(share)
    total = np.where(small, summed, steps + share)
    whole = np.floor(total).astype(np.int64)
    base = (exponent + 6) << mantissa_bits
    code = np.minimum(base + whole, 126 if signed else 254)
    if signed:
        code = code | np.where(np.signbit(padded), 128, 0)
    else:
        code = np.maximum(code, padded > 0)
    codes = code.astype(np.uint8).ravel()[:count].reshape(x.shape)
    if form == "mx":
        return codes, (scale.view(np.uint32) >> 23).astype(np.uint8)
    return codes, scale


def dequantize_moments(
    codes: Array, scale: Array, kind: str, form: str = "float8"
) -> Array:
    """Return the float32 numbers of the codes of `quantize_moments`."""
    mantissa_bits, signed = KINDS[kind]
    if form == "mx":
        scale = (scale.astype(np.uint32) << 23).view(np.float32)
    code = codes.astype(np.int64).ravel()
    magnitude = code & 127 if signed else code
    field = magnitude >> mantissa_bits
    fraction = magnitude & ((1 << mantissa_bits) - 1)
    whole = np.where(field > 0, fraction + (1 << mantissa_bits), fraction)
    value = np.ldexp(
        whole.astype(np.float32), np.maximum(field, 1) - 7 - mantissa_bits
    )
    size = BLOCKS[form]
    number = float32(value) * np.repeat(scale, size)[: code.size]
    if signed:
        number = np.where(code & 128, -number, number)
    else:
        number = number * number
    return float32(number).reshape(codes.shape)
