"""Cast and quantize in NumPy, to the nearest value or stochastically."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from keras_policy_ext import formats

Array = np.ndarray[Any, Any]

#: The matmuls by number, as the keys of their operands count them.
MATMULS = ("forward", "inputs_grad", "kernel_grad")


def stochastic_cast(x: ArrayLike, bits: ArrayLike, dtype: str) -> Array:
    """Cast to a narrow format; random bits choose the neighbour.

    `floor(|x| / spacing + bits * 2^-16) * spacing` in float32 with the sign
    of x, where spacing is that of the format at |x|. Values of the format
    are unchanged; values beyond ±max and ±inf become ±max; NaN stays NaN.

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
    """Return 16 random bits per element: a hash of the index and a key.

    `mix(mix(i + key) ^ key * 0x9E3779B9) >> 16` in 32 bits that wrap,
    where i is the index in row-major order.

    Args:
        shape: The shape of the result.
        key: An int32, or the same 32 bits without a sign.

    Returns:
        int32 of that shape, from 0 to 2^16 - 1.
    """
    index = np.arange(np.prod(shape, dtype=np.int64)).astype(np.uint32)
    seed = _unsigned(key)
    mixed = _mix(_mix(index + seed) ^ seed * np.uint32(0x9E3779B9))
    return (mixed >> np.uint32(16)).astype(np.int32).reshape(shape)


def matmul_key(key: int, amax: ArrayLike, matmul: str) -> int:
    """Return the key for stochastic rounding of one operand in one matmul.

    `mix((key ^ mix(bits of amax)) + number of the matmul)`: different
    steps, tensors and matmuls have different bits.

    Args:
        key: The key of the step, an int32.
        amax: The amax of the operand as given, read as float32.
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
    """Return the hash lowbias32 of each unsigned 32-bit integer."""
    # Source: https://github.com/skeeto/hash-prospector
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def cast(x: ArrayLike, dtype: str) -> Array:
    """Cast to a narrow format, to the nearest value; large values saturate.

    Values beyond ±max and ±inf become ±max, NaN stays NaN, subnormals are
    kept, and rounding is to nearest, ties to even. The clip comes first:
    ml_dtypes turns 465 into NaN in `float8_e4m3fn`.

    Args:
        x: Array of any shape, read as float32.
        dtype: A signed narrow format. In formats without a negative zero,
            values that round to it become 0. `float4_e2m1fn` has no NaN, and
            NaN becomes 0.

    Returns:
        Array of that dtype and of x's shape.

    Raises:
        ValueError: If the format is unknown, or unsigned
            (`float8_e8m0fnu` holds exponents: see `quantize_mx`).
    """
    target = signed_format(dtype)
    limit = np.float32(target.max)
    with np.errstate(invalid="ignore"):  # NumPy warns of NaN.
        return np.clip(float32(x), -limit, limit).astype(target.dtype)


def round_scalar(x: float, dtype: str) -> float:
    """Round one number to a format by exact arithmetic, as a test of `cast`.

    The number is split into a significand and an exponent; the spacing of
    the format at that exponent divides it; the quotient, an exact fraction,
    is rounded to an integer. After gfloat's `round_float`.

    Args:
        x: Any Python float.
        dtype: A signed narrow format.

    Returns:
        The nearest value of the format, ties to even, saturating. NaN for
        NaN, although e2m1fn has none.

    Raises:
        ValueError: As for `cast`.
    """
    target = signed_format(dtype)
    if math.isnan(x):
        return x
    if math.isinf(x):
        return math.copysign(target.max, x)
    if x == 0:
        return x if target.has_negative_zero else 0.0
    exponent = math.frexp(abs(x))[1] - 1
    lowest = math.frexp(target.smallest_normal)[1] - 1
    spacing = Fraction(2) ** (max(exponent, lowest) - target.mantissa_bits)
    steps = round(Fraction(abs(x)) / spacing)  # Ties go to the even integer.
    rounded = math.copysign(min(float(steps * spacing), target.max), x)
    return rounded if rounded or target.has_negative_zero else 0.0


def stochastic_round(
    x: ArrayLike, bits: ArrayLike, dtype: str = "bfloat16"
) -> Array:
    """Round to bfloat16 or another format; 16 random bits choose the neighbour.

    Let p be the position of a value between its neighbours, as a fraction that
    is rounded down to a multiple of 2^-16. The value becomes the neighbour
    further from 0 if p + bits * 2^-16 >= 1, which holds for a fraction p of
    all values of `bits`. Finite values stay finite.

    Args:
        x: Array of any shape, read as float32.
        bits: Integers from 0 to 2^16 - 1, broadcastable to x.
        dtype: `"bfloat16"`, `"float16"`, or another signed ml_dtypes format
            with infinities.

    Returns:
        Array of that dtype.
    """
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    with np.errstate(invalid="ignore"):  # NumPy warns of NaN.
        x = float32(x).astype(np.float64)
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    exponent = np.maximum(np.frexp(finite)[1] - 1, info.minexp)
    spacing = np.ldexp(1.0, exponent - info.nmant)
    below = np.floor(finite / spacing)
    fraction = np.floor((finite / spacing - below) * 2**16)
    further = fraction + np.asarray(bits, np.int64) >= 2**16
    rounded = np.minimum((below + further) * spacing, float(info.max))
    return np.where(np.isfinite(x), np.copysign(rounded, x), x).astype(
        info.dtype
    )


def quantize(x: ArrayLike, scale: ArrayLike, dtype: str) -> Array:
    """Return `cast(float32(x) / scale)`: divide first, then saturate.

    Args:
        x: Array of any shape.
        scale: Dequantizing scale, broadcastable to x.
        dtype: A signed narrow format.

    Returns:
        Codes: an array of that dtype and of x's shape.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return cast(float32(x) / float32(scale), dtype)


def dequantize(
    q: ArrayLike, scale: ArrayLike, dtype: DTypeLike = "float32"
) -> Array:
    """Return `float32(q) * scale`, cast to `dtype`.

    Args:
        q: Codes of any shape.
        scale: Dequantizing scale, broadcastable to q.
        dtype: Any NumPy dtype, or the name of an ml_dtypes one.

    Returns:
        Array of that dtype and of q's shape.
    """
    return (float32(q) * float32(scale)).astype(np.dtype(dtype))


def quantize_dequantize(
    x: ArrayLike, scale: ArrayLike, dtype: str, out_dtype: DTypeLike = "float32"
) -> Array:
    """Return `dequantize(quantize(x))`: the values that a matmul reads."""
    return dequantize(quantize(x, scale, dtype), scale, out_dtype)


def signed_format(dtype: str) -> formats.Format:
    """Return the format of this name; raise if the format is unsigned.

    Raises:
        ValueError: If it is unknown, or unsigned.
    """
    target = formats.get(dtype)
    if target.name == "float8_e8m0fnu":
        raise ValueError(
            "Cannot cast to float8_e8m0fnu, which holds exponents and not "
            f"signed numbers. Received: dtype={dtype!r}. Allowed: the other "
            "formats of formats.names(). Use quantize_mx, which makes such "
            "scales."
        )
    return target


def float32(x: ArrayLike) -> Array:
    """Convert an array-like to float32."""
    return np.asarray(x).astype(np.float32)
