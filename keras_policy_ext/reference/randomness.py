"""Rounding at random, by bits that are a hash of index and key, in NumPy."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.reference.casting import cast, float32, signed_format

Array = np.ndarray[Any, Any]

#: The matmuls by number, as the keys of their operands count them.
MATMULS = ("forward", "inputs_grad", "kernel_grad")


def stochastic_cast(x: ArrayLike, bits: ArrayLike, dtype: str) -> Array:
    """Saturating change of dtype to one of the two neighbours.

    `floor(|x| / spacing + bits * 2^-16) * spacing` in float32 with the sign
    of x, where spacing is that of the format at |x|. Numbers of the format
    stay as they are; values beyond ±max and ±inf become ±max; NaN stays NaN.

    Args:
        x: Array of any shape, read as float32.
        bits: Integers from 0 to 2^16 - 1, broadcastable to x.
        dtype: A signed narrow format.

    Returns:
        Array of that dtype and of x's shape.

    Raises:
        ValueError: As for `cast`.
    """
    target = signed_format(dtype)
    values = float32(x)
    known = np.where(np.isnan(values), np.float32(0), np.abs(values))
    magnitude = np.minimum(known, np.float32(target.max))
    at_least = np.maximum(magnitude, np.float32(target.smallest_normal))
    exponent = np.frexp(at_least)[1] - 1
    spacing = np.ldexp(np.float32(1), exponent - target.mantissa_bits)
    share = float32(bits) * np.float32(2.0**-16)
    rounded = np.floor(magnitude / spacing + share) * spacing
    signed = np.copysign(rounded, values)
    return cast(np.where(np.isnan(values), values, signed), dtype)


def random_bits(shape: int | tuple[int, ...], key: int) -> Array:
    """16 bits for each element: a hash of its index and of the key.

    `mix(mix(i + key) ^ key * 0x9E3779B9) >> 16` in 32 bits that wrap, i
    being the index in row-major order.

    Args:
        shape: Of the result, all axes counted in one row.
        key: An int32, or the same 32 bits without a sign.

    Returns:
        int32 of that shape, from 0 to 2^16 - 1.
    """
    index = np.arange(np.prod(shape, dtype=np.int64)).astype(np.uint32)
    seed = _unsigned(key)
    mixed = _mix(_mix(index + seed) ^ seed * np.uint32(0x9E3779B9))
    return (mixed >> np.uint32(16)).astype(np.int32).reshape(shape)


def matmul_key(key: int, amax: ArrayLike, matmul: str) -> int:
    """The key by which an operand is rounded in a matmul.

    `mix((key ^ mix(bits of amax)) + number of the matmul)`: steps with other
    keys, other tensors and other matmuls have other bits.

    Args:
        key: Of the step, an int32.
        amax: Of the operand as it was given, read as float32.
        matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.

    Returns:
        An int32.
    """
    bits = np.reshape(float32(amax), 1).view(np.uint32)
    number = np.uint32(MATMULS.index(matmul))
    mixed = _mix((_unsigned(key) ^ _mix(bits)) + number)
    return int(mixed.view(np.int32)[0])


def _unsigned(key: int) -> Array:
    return np.array([int(key) & 0xFFFFFFFF], np.uint32)


def _mix(x: Array) -> Array:
    """The hash lowbias32 of unsigned numbers.

    Source: https://github.com/skeeto/hash-prospector
    """
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
