"""Codes of numbers, and numbers of codes, by integer arithmetic.

The same on every backend and for every format, whether a framework has a
dtype for it or not. Float8 dtypes are used where they are faster. Nothing is
cast to or from `float8_e8m0fnu` or a float4 dtype: JAX and PyTorch disagree
on E8M0 of 0, TensorFlow lacks it, and only JAX casts to float4.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.casting import (
    EXPONENT_BITS,
    MAGNITUDE_BITS,
    view,
)
from keras_policy_ext.numerics.primitives import HALVES, primitives

MANTISSA = 23
NAN = 0x7FC00000
SUBNORMAL_SCALE = 1 << 22
"""The bits of 2^-127, which byte 0 of E8M0 stands for."""

_BITS = 8
_MAX_E4M3FN, _NAN_E4M3FN = 0x7E, 0x7F
_INF_OF_HALF = 0x7C00


def shifted_right(x: Tensor, count: int) -> Tensor:
    """Int32 shifted right by some bits, with zeros from the left."""
    mask = (1 << (32 - count)) - 1
    return ops.bitwise_and(ops.right_shift(x, count), mask)


def encode(values: Tensor, format_name: str) -> Tensor:
    """The codes of numbers of a format.

    Args:
        values: Float32 numbers of the format, of any shape.
        format_name: Its ml_dtypes name; a signed one.

    Returns:
        Uint8 tensor of that shape. NaN has one code, the one that casts give
        it; in `float4_e2m1fn`, which has none, that of the largest number.
        Infinities have theirs, or in a format without that of the largest.
    """
    if _cuts_float16(format_name):
        return _encode_by_half(values, format_name)
    fmt = formats.get(format_name)
    raw = view(values, "int32")
    magnitude = ops.bitwise_and(raw, MAGNITUDE_BITS)
    # Below the smallest normal number codes count multiples of the spacing,
    # which is the weight of the last bit of the number that is added here.
    spaced = view(magnitude, "float32") + fmt.smallest_subnormal * 2**MANTISSA
    small = ops.bitwise_and(view(spaced, "int32"), (1 << fmt.bits) - 1)
    lowest = _bits(fmt.smallest_normal)
    normal = ops.right_shift(magnitude, MANTISSA - fmt.mantissa_bits)
    normal = normal - _offset(fmt)
    code = ops.where(magnitude < lowest, small, normal)
    code = ops.minimum(code, _largest_code(fmt) + fmt.has_inf)
    sign = ops.left_shift(shifted_right(raw, 31), fmt.bits - 1)
    if not fmt.has_negative_zero:
        sign = ops.where(ops.equal(code, 0), 0, sign)
        sign = ops.where(magnitude > EXPONENT_BITS, 0, sign)
    code = ops.where(magnitude > EXPONENT_BITS, _nan_code(fmt), code)
    return ops.cast(ops.bitwise_or(code, sign), "uint8")


def decode(codes: Tensor, format_name: str) -> Tensor:
    """The numbers of codes, as `encode` makes them.

    Args:
        codes: Uint8 tensor of any shape.
        format_name: The ml_dtypes name of the format.

    Returns:
        Float32 tensor of that shape.
    """
    if _cuts_float16(format_name):
        return _decode_by_half(codes, format_name)
    fmt = formats.get(format_name)
    codes = ops.cast(codes, "int32")
    magnitude = ops.bitwise_and(codes, (1 << (fmt.bits - 1)) - 1)
    small = ops.cast(magnitude, "float32") * fmt.smallest_subnormal
    normal = ops.left_shift(
        magnitude + _offset(fmt), MANTISSA - fmt.mantissa_bits
    )
    is_small = magnitude < (1 << fmt.mantissa_bits)
    bits = ops.where(is_small, view(small, "int32"), normal)
    beyond = magnitude - _largest_code(fmt)
    bits = ops.where(beyond > 0, NAN, bits)
    if fmt.has_inf:
        bits = ops.where(ops.equal(beyond, 1), EXPONENT_BITS, bits)
    if not fmt.has_negative_zero:
        bits = ops.where(ops.equal(codes, fmt.nan_code), NAN, bits)
    sign = ops.left_shift(shifted_right(codes, fmt.bits - 1), 31)
    return view(ops.bitwise_or(bits, sign), "float32")


def _cuts_float16(format_name: str) -> bool:
    """Return True if codes are found by cutting bits off those of float16.

    That takes less than half the operations, of which XLA makes a program for
    every layer (JAX 0.10, CPU). Not on PyTorch, which shifts no unsigned
    integers.
    """
    shifts = keras.backend.backend() in ("jax", "tensorflow")
    return shifts and format_name in HALVES


def _encode_by_half(values: Tensor, format_name: str) -> Tensor:
    """See `encode`."""
    shift, factor = HALVES[format_name]
    halves = ops.cast(values * (1.0 / factor), "float16")
    bits = ops.cast(view(halves, "uint16"), "int32")
    if shift == _BITS:
        return ops.cast(ops.right_shift(bits, shift), "uint8")
    magnitude = ops.right_shift(ops.bitwise_and(bits, 0x7FFF), shift)
    code = ops.minimum(magnitude, _MAX_E4M3FN)
    code = ops.where(magnitude > _INF_OF_HALF >> shift, _NAN_E4M3FN, code)
    sign = ops.bitwise_and(ops.right_shift(bits, _BITS), 0x80)
    return ops.cast(ops.bitwise_or(code, sign), "uint8")


def _decode_by_half(codes: Tensor, format_name: str) -> Tensor:
    """See `decode`; the framework's numbers, and NaN of e4m3fn."""
    found = primitives().numbers(codes, format_name)
    if HALVES[format_name][0] == _BITS:
        return found
    magnitude = ops.bitwise_and(ops.cast(codes, "int32"), 0x7F)
    return ops.where(ops.equal(magnitude, _NAN_E4M3FN), np.nan, found)


def encode_scales(scale: Tensor, scale_format: str) -> Tensor:
    """Scales in their own format, a byte each.

    Args:
        scale: Float32 numbers of the format, of any shape.
        scale_format: `"float8_e8m0fnu"` or `"float8_e4m3fn"`.
    """
    if scale_format != "float8_e8m0fnu":
        return encode(scale, scale_format)
    bits = view(scale, "int32")
    byte = ops.bitwise_and(shifted_right(bits, MANTISSA), 0xFF)
    return ops.cast(byte, "uint8")


def decode_scales(codes: Tensor, scale_format: str) -> Tensor:
    """Scales in float32, from `encode_scales`.

    Byte 0 of E8M0 is 2^-127, which a backend that flushes subnormal numbers
    reads as 0; byte 255 is NaN.
    """
    if scale_format != "float8_e8m0fnu":
        return decode(codes, scale_format)
    byte = ops.cast(codes, "int32")
    bits = ops.maximum(ops.left_shift(byte, MANTISSA), SUBNORMAL_SCALE)
    return view(ops.where(byte > 254, NAN, bits), "float32")


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def _offset(fmt: formats.Format) -> int:
    """What the bias of float32 adds to a code that is shifted into place."""
    exponent = _bits(fmt.smallest_normal) >> MANTISSA
    return (exponent - 1) << fmt.mantissa_bits


def _largest_code(fmt: formats.Format) -> int:
    """The code of the largest number."""
    return int(np.array(fmt.max).astype(fmt.dtype).view(np.uint8))


def _nan_code(fmt: formats.Format) -> int:
    """Return the code of NaN; the largest code if the format has no NaN."""
    return _largest_code(fmt) if fmt.nan_code is None else fmt.nan_code
