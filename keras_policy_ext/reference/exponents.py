"""Scales that are powers of two, and their bytes in E8M0, in NumPy."""

import math
from typing import Any

import numpy as np

from keras_policy_ext import formats
from keras_policy_ext.reference.scales import LARGEST_SCALE, SMALLEST_SCALE

Array = np.ndarray[Any, Any]

E8M0 = "float8_e8m0fnu"


def e8m0_up(amax: Array, dtype: str) -> Array:
    """Bytes of the smallest powers of two not below amax / max(dtype).

    Not below but at both ends of the range: an amax / max of up to 2^-127
    has byte 0, and the largest byte is 254. Infinity has 254, NaN 255.
    """
    v = amax * (np.float32(1) / np.float32(formats.get(dtype).max))
    bits = v.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32)
    fraction = bits & np.uint32(0x7FFFFF)
    small = (exponent == 0) & (fraction <= 0x400000)
    up = (fraction > 0) & (exponent != 254) & ~small
    return _special(exponent + up, amax)


def e8m0_floor(amax: Array, dtype: str) -> Array:
    """Bytes by the rule of OCP MX 1.0, which lets the largest saturate.

    The exponent of the amax less that of the largest number of the format.
    Infinity has 254, NaN 255.
    """
    exponent = _exponent_above_largest(amax, dtype)
    return _special(np.clip(exponent, -127, 127) + 127, amax)


def floor_scale(amax: Array, dtype: str) -> Array:
    """The power of two of `e8m0_floor` as a float32, 1 where amax is 0."""
    usable = np.isfinite(amax) & (amax > 0)
    exponent = _exponent_above_largest(np.where(usable, amax, 1), dtype)
    scale = np.ldexp(np.float32(1), np.clip(exponent, -126, 127))
    scale = np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    return np.where(usable, scale, np.float32(1))


def multiplier(exponents: Array) -> Array:
    """`2^(127 - E)`, what a number is multiplied by under the byte E.

    Dividing by 2^-127 fails where denormals are flushed. The power itself is
    a normal number but for E = 254.
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
