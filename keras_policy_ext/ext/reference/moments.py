"""Quantize the moments of an optimizer to one byte a number, in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.ext.reference.casting import _mix, _unsigned, float32

Array = np.ndarray[Any, Any]

# These numbers and the class are once more in `ext.moments.codes`: what judges
# the codes of files reads nothing of what it judges, and a test compares both.

#: Numbers with one scale, by the name of the form.
BLOCKS = {"float8": 256, "mx": 32}

#: 2^32 divided by the golden ratio, an odd number.
GOLDEN = 0x9E3779B1

#: Magnitudes that count as infinite, and NaN, are taken for these in scales, so
#: that the numbers of the largest codes are finite, also when they are squared.
LARGEST = {"first": 2.0**120, "second": 2.0**60}

#: The smallest scale: denormals, which some backends take for 0, become 0.
SMALLEST = 2.0**-100

#: The smallest normal float32. A second moment below it counts as 0.
SMALLEST_NORMAL = 2.0**-126

#: What is added to a magnitude. Its exponent field is 128, of which the lower
#: four bits are 0.
OFFSET = 2.0


class Kind(NamedTuple):
    """The code of one kind of moments.

    A code has the lower four bits of the exponent and the upper bits of the
    mantissa of `OFFSET + magnitude / scale` in float32, and maybe a sign. So
    numbers below `OFFSET` are evenly spaced, and larger ones are less and less
    dense, as in a float.

    Attributes:
        mantissa_bits: How many bits of the mantissa it has.
        signed: Whether the eighth bit is a sign.
    """

    mantissa_bits: int
    signed: bool

    @property
    def dropped(self) -> int:
        """The number of bits of a float32 that a code leaves out."""
        return 23 - self.mantissa_bits

    @property
    def largest(self) -> float:
        """The float32 of the largest code, without sign."""
        return 2.0**17 - 2.0 ** (16 - self.mantissa_bits)


#: Of a second moment the square root is stored, without a sign and with one
#: more bit of the mantissa.
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

    A block is 256 (`"mx"`: 32) numbers in row-major order. Its scale maps the
    largest magnitude, or its square root, to the largest code. NaN and
    infinities count as 2^120, and denormals as 0. A block of zeros has scale
    1. A second moment above 0 never becomes 0, and has no sign.

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
    code = KINDS[kind]
    x = float32(x)
    magnitude = np.abs(x)
    if not code.signed:
        magnitude = np.where(magnitude < SMALLEST_NORMAL, 0, magnitude)
        magnitude = np.sqrt(magnitude)
    count = x.size
    size = BLOCKS[form]
    blocks = -(-count // size)
    rest = (0, blocks * size - count)
    negative = np.pad(np.signbit(x).ravel(), rest).reshape(blocks, size)
    magnitude = np.pad(magnitude.ravel(), rest).reshape(blocks, size)
    scale = _scales(np.max(magnitude, axis=1), kind, form)
    q = magnitude * (np.float32(1) / scale)[:, None]
    if not code.signed:
        # The smallest code above 0, as an optimizer divides by it.
        least = np.float32(OFFSET * 2.0**-code.mantissa_bits)
        q = np.where(magnitude == 0, np.float32(0), np.maximum(q, least))
    y = q + np.float32(OFFSET)
    y = np.where(y <= code.largest, y, np.float32(code.largest))
    bits = moment_bits(blocks * size, key, code.dropped).reshape(q.shape)
    whole = (float32(y).view(np.int32) + bits) >> code.dropped
    if code.signed:
        whole = (whole & 127) | np.where(negative, 128, 0)
    codes = whole.astype(np.uint8).ravel()[:count].reshape(x.shape)
    if form == "mx":
        return codes, (scale.view(np.uint32) >> 23).astype(np.uint8)
    return codes, scale


def _scales(amax: Array, kind: str, form: str) -> Array:
    """Return the float32 scales of blocks with these largest magnitudes."""
    limit = np.float32(LARGEST[kind])
    amax = np.where(amax <= limit, amax, limit)
    stored = KINDS[kind]
    scale = amax * np.float32(1 / (stored.largest - OFFSET))
    if form == "mx":
        fraction, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
    scale = np.maximum(scale, np.float32(SMALLEST))
    smallest = np.float32(SMALLEST_NORMAL)
    smallest = smallest if stored.signed else np.sqrt(smallest)
    return np.where(amax >= smallest, scale, np.float32(1))


def dequantize_moments(
    codes: Array, scale: Array, kind: str, form: str = "float8"
) -> Array:
    """Return the float32 numbers of the codes of `quantize_moments`."""
    stored = KINDS[kind]
    if form == "mx":
        scale = (scale.astype(np.uint32) << 23).view(np.float32)
    code = codes.astype(np.int32).ravel()
    magnitude = code & 127 if stored.signed else code
    offset = np.float32(OFFSET)
    bits = (magnitude << stored.dropped) | offset.view(np.int32)
    value = bits.view(np.float32) - offset
    size = BLOCKS[form]
    number = value * np.repeat(scale, size)[: code.size]
    if stored.signed:
        number = np.where(code & 128, -number, number)
    else:
        number = number * number
    return float32(number).reshape(codes.shape)
