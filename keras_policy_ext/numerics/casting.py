"""Cast to formats of at most eight bits, and convert values to codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import primitives
from keras_policy_ext.numerics.primitives import HALVES

CASTABLE = tuple(n for names in formats.FAMILIES.values() for n in names)
"""The formats that are dtypes in all three frameworks."""

EXPONENT_BITS = 0x7F800000
"""All exponent bits of a float32, which are the bits of infinity."""

format_of = functools.cache(formats.get)
"""Return the `Format` of this name, from a cache."""

Cast = Callable[[Tensor, Tensor, str, bool], Tensor]
"""Takes a tensor, the scale of each element, the name of a format, and whether
to multiply by the scale instead of dividing by it. Returns the values."""

Codec = Callable[[Tensor, str], Tensor]
"""Takes values and the name of a format or dtype; returns them converted."""

MAGNITUDE_BITS = 0x7FFFFFFF
SIGN_BIT = -0x80000000


def tensor_of(x: Any, dtype: str | None = None) -> Tensor:
    """Return a tensor unchanged; convert a number, list, array or variable."""
    if ops.is_tensor(x) or isinstance(x, keras.KerasTensor):
        return x
    name = str(getattr(x, "dtype", ""))
    if not name:
        return ops.convert_to_tensor(x, dtype)
    if "float8" in name and keras.backend.backend() == "torch":
        # PyTorch has the dtypes, but reads no such array (torch 2.13).
        codes = ops.convert_to_tensor(np.asarray(x).view("uint8"))
        x = primitives.current.as_float8(codes, name)
    # Without a dtype: to PyTorch Keras keeps a bfloat16 array (keras 3.15).
    x = ops.convert_to_tensor(x)
    if dtype is None and name == "float64":
        dtype = "float32"  # JAX has no other.
    return x if dtype is None else as_dtype(x, dtype)


def cast(x: Tensor, dtype: str) -> Tensor:
    """Cast values to float8; clip those beyond the format's largest value.

    The result has the same bits on every backend.

    Finite values beyond the largest of the format, and infinities, become that
    largest value. NaN stays NaN. Rounding is to nearest, ties to even;
    subnormals are kept. The value is clipped before the cast. Without that,
    465 becomes NaN on JAX, TensorFlow, torch up to 2.12; 448 on torch 2.13.

    It is not differentiable: a framework's own gradient of a cast would itself
    be cast to unscaled float8. The contractions define their gradients.

    Args:
        x: Tensor of any shape and real dtype; read as float32.
        dtype: `"float8_e4m3fn"`, `"float8_e5m2"`, or one of these with `fnuz`
            in its name, which TensorFlow casts with XLA.

    Returns:
        Tensor of the shape of `x` and of dtype `dtype`.

    Raises:
        ValueError: If `dtype` is not a float8 format that can be stored.

    Examples:
        >>> codes = kpe.numerics.cast(np.array([0.1, 1000.0]), "float8_e4m3fn")
        >>> numbers = keras.ops.cast(codes, "float32")
        >>> keras.ops.convert_to_numpy(numbers).tolist()
        [0.1015625, 448.0]
    """
    limit = _limit(dtype)
    x = ops.cast(tensor_of(x, "float32"), "float32")
    return _cast(ops.clip(x, -limit, limit), dtype)


def quantize(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """Divide a tensor by a scale, clip, and cast the result to float8.

    Args:
        x: Tensor of any shape and real dtype; read as float32.
        scale: Dequantizing scale, float32, broadcastable to `x`.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
        is_factor: Whether to multiply by `scale` instead of dividing by it.

    Returns:
        `cast(float32(x) / scale)`, of the shape of `x`.

    Raises:
        ValueError: If `dtype` is not a float8 format that can be stored.

    Examples:
        >>> codes = kpe.numerics.quantize(
        ...     np.array([0.1, 1000.0]), 4.0, "float8_e4m3fn"
        ... )
        >>> again = kpe.numerics.dequantize(codes, 4.0)
        >>> keras.ops.convert_to_numpy(again).tolist()
        [0.1015625, 1024.0]
    """
    _limit(dtype)  # Raises for other dtypes.
    x, scale = tensor_of(x, "float32"), tensor_of(scale, "float32")
    return _cast(scaled(x, scale, dtype, is_factor), dtype)


def quantize_float32(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """Return in float32 the values to which `quantize` rounds a tensor.

    It uses no float8 dtype. A cast to float8 takes a CPU most of the time, and
    a compiler may drop it. Arguments are those of `quantize`; `dtype` may be
    any signed format of four or eight bits.
    """
    return round_to_format(scaled(x, scale, dtype, is_factor), dtype)


def round_to_format(x: Tensor, dtype: str) -> Tensor:
    """Round float32 values to the nearest values of a format, in float32.

    Adding and subtracting 1.5 * 2^k rounds to a multiple of 2^(k-23), to
    nearest, ties to even. Here k - 23 is the exponent of the value's last
    mantissa bit in the format; it is constant below the smallest normal
    number. NaN is kept, and the sign of a zero if the format has -0.

    Args:
        x: Float32 tensor, no larger than the format's largest value.
        dtype: The name of the format.
    """
    lowest, shift = grid_constants(dtype)
    bits = view(x, "int32")
    exponent = ops.maximum(ops.bitwise_and(bits, EXPONENT_BITS), lowest)
    anchor = view(exponent + shift, "float32")
    # `+`: on TensorFlow ops.add takes an empty 2-D x for a bias (keras 3.15).
    rounded = view(x + anchor - anchor, "int32")
    if not format_of(dtype).has_negative_zero:
        return view(rounded, "float32")
    sign = ops.bitwise_and(bits, SIGN_BIT)
    return view(ops.bitwise_or(rounded, sign), "float32")


def round_to_integers(x: Tensor, scale: Tensor, format_name: str) -> Tensor:
    """Divide by a scale, clip, and round to integers, in float32; no -0."""
    # `+ 0.0` makes 0 of -0, which an integer has not.
    return ops.round(scaled(x, scale, format_name)) + 0.0


@functools.cache
def grid_constants(dtype: str) -> tuple[int, int]:
    """Return two integers with which `round_to_format` finds the spacing.

    Returns:
        The exponent bits of the smallest normal number, and the number to add
        to the bits of 2^e to get those of 1.5 * 2^(e + 23 - mantissa bits).
    """
    fmt = format_of(dtype)
    lowest = int(np.float32(fmt.smallest_normal).view(np.int32))
    one_half = 1 << 22  # As a mantissa.
    return lowest, ((23 - fmt.mantissa_bits) << 23) + one_half


def dequantize(q: Tensor, scale: Tensor, dtype: str = "float32") -> Tensor:
    """Convert float8 values to float32, times a scale; cast to `dtype`.

    Args:
        q: Float8 tensor of any shape.
        scale: Dequantizing scale, float32, broadcastable to `q`.
        dtype: Dtype of the result.

    Returns:
        Tensor of the shape of `q` and of dtype `dtype`.
    """
    scale = ops.cast(tensor_of(scale, "float32"), "float32")
    return ops.cast(ops.multiply(widen(tensor_of(q)), scale), dtype)


def widen(q: Tensor, compute_dtype: str = "float32") -> Tensor:
    """Convert float8 values to float32. As a `Codec` it ignores the dtype."""
    return as_dtype(q, "float32")


def as_dtype(x: Tensor, dtype: str) -> Tensor:
    """Cast a tensor, also to and from formats that Keras does not know."""
    dtype_before = str(x.dtype)
    if "fnuz" in f"{dtype_before} {dtype}":
        return primitives.current.as_dtype(x, dtype)
    if "float8" in dtype_before:
        # A compiler may drop this cast together with the one to float8.
        x = primitives.current.before_widening(x)
    return ops.cast(x, dtype)


def quantize_dequantize(
    x: Tensor, scale: Tensor, dtype: str, out_dtype: str = "float32"
) -> Tensor:
    """Round `x` to float8 values times a scale; return them as `out_dtype`.

    Args:
        x: Tensor of any shape and real dtype; read as float32.
        scale: Dequantizing scale, float32, broadcastable to `x`.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
        out_dtype: Dtype of the result.

    Returns:
        Tensor of the shape of `x` and of dtype `out_dtype`.

    Raises:
        ValueError: If `dtype` is not a float8 format that can be stored.
    """
    return dequantize(quantize(x, scale, dtype), scale, out_dtype)


def _limit(dtype: object) -> float:
    """Return a format's largest value; raise for what is no float8 dtype."""
    if not isinstance(dtype, str) or dtype not in CASTABLE:
        hint = formats.ALIASES.get(str(dtype))
        step = "For other formats use `keras_policy_ext.reference`."
        if hint:
            step = f"Write {hint!r}."
        raise ValueError(
            f"Cannot cast to this dtype. Received: {dtype!r}. Allowed: "
            f"{', '.join(CASTABLE)}. {step}"
        )
    return format_of(dtype).max


def _cast(x: Tensor, dtype: str) -> Tensor:
    """Cast clipped values to float8; give NaN one code on every backend."""
    # `float8_e5m2` has several NaN: torch gives 0x7f (2.13), all others 0x7e.
    q = as_dtype(primitives.current.before_cast(x, dtype), dtype)
    if dtype != "float8_e5m2" or keras.backend.backend() != "torch":
        return q
    bits = ops.view(q, "uint8")
    quiet = ops.bitwise_and(bits, np.uint8(0xFE))  # 0x7e for 0x7f.
    return ops.view(ops.where(ops.isnan(x), quiet, bits), dtype)


def scaled(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """Divide by a scale and clip to any format, in float32; see `quantize`."""
    limit = format_of(dtype).max
    x = ops.cast(x, "float32")
    if is_factor:
        return ops.clip(ops.multiply(x, scale), -limit, limit)
    divisor = primitives.current.broadcast_guard(x, scale)
    return ops.clip(ops.divide(x, divisor), -limit, limit)


def view(x: Tensor, dtype: str) -> Tensor:
    """Reinterpret a tensor's bits, or an array's; see `primitives.view`."""
    return primitives.view(tensor_of(x), dtype)


MANTISSA = 23
NAN = 0x7FC00000
SUBNORMAL_SCALE = 1 << 22
"""The bits of 2^-127, the value of byte 0 in E8M0."""

_BYTE = 8
_MAX_E4M3FN, _NAN_E4M3FN = 0x7E, 0x7F
_INF_FLOAT16 = 0x7C00


def shifted_right(x: Tensor, count: int) -> Tensor:
    """Shift int32 values right by `count` bits, filling with zeros."""
    mask = (1 << (32 - count)) - 1
    return ops.bitwise_and(ops.right_shift(x, count), mask)


def encode(values: Tensor, format_name: str) -> Tensor:
    """Convert float32 values of a narrow format to codes (its bits), uint8.

    Args:
        values: Float32 numbers of the format, of any shape.
        format_name: The format.

    Returns:
        Uint8 tensor of that shape. NaN has one code, the one that casts give;
        `float4_e2m1fn` has no NaN, and uses the code of the largest value. In
        a format without infinity, infinities have that code too.
    """
    if _cuts_float16(format_name):
        return _encode_by_half(values, format_name)
    fmt = format_of(format_name)
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
    largest = _largest_code(fmt)
    nan_code = largest if fmt.nan_code is None else fmt.nan_code
    code = ops.minimum(code, largest + fmt.has_inf)
    sign = ops.left_shift(shifted_right(raw, 31), fmt.bits - 1)
    is_nan = magnitude > EXPONENT_BITS
    if not fmt.has_negative_zero:  # The code of -0 is that of NaN.
        sign = ops.where(ops.equal(code, 0), 0, sign)
        sign = ops.where(is_nan, 0, sign)
    code = ops.where(is_nan, nan_code, code)
    return ops.cast(ops.bitwise_or(code, sign), "uint8")


def decode(codes: Tensor, format_name: str) -> Tensor:
    """Convert codes (the bits of a narrow format, uint8) to float32 values."""
    fmt = format_of(format_name)
    if format_name in primitives.DECODED and fmt.nan_codes:
        return _decode_by_half(codes, format_name)
    codes = ops.cast(codes, "int32")
    magnitude = ops.bitwise_and(codes, (1 << (fmt.bits - 1)) - 1)
    small = ops.cast(magnitude, "float32") * fmt.smallest_subnormal
    normal = ops.left_shift(
        magnitude + _offset(fmt), MANTISSA - fmt.mantissa_bits
    )
    is_small = magnitude < (1 << fmt.mantissa_bits)
    bits = ops.where(is_small, view(small, "int32"), normal)
    # Codes beyond the largest value are NaN, but the first may be infinity.
    beyond = magnitude - _largest_code(fmt)
    bits = ops.where(beyond > 0, NAN, bits)
    if fmt.has_inf:
        bits = ops.where(ops.equal(beyond, 1), EXPONENT_BITS, bits)
    if not fmt.has_negative_zero:  # The code of -0 is that of NaN.
        bits = ops.where(ops.equal(codes, fmt.nan_code), NAN, bits)
    sign = ops.left_shift(shifted_right(codes, fmt.bits - 1), 31)
    return view(ops.bitwise_or(bits, sign), "float32")


@functools.cache
def _cuts_float16(format_name: str) -> bool:
    """Return True if codes are encoded as the upper bits of float16 values."""
    # That takes less than half the operations, which XLA compiles for every
    # layer (JAX 0.10, CPU). PyTorch shifts no unsigned integers.
    shifts = keras.backend.backend() in ("jax", "tensorflow")
    return shifts and format_name in HALVES


def _encode_by_half(values: Tensor, format_name: str) -> Tensor:
    """Convert values to codes, the upper bits of float16; see `encode`."""
    # Divided by the factor, e4m3fn has the exponent bias of float16.
    shift, factor = HALVES[format_name]
    halves = ops.cast(values * (1.0 / factor), "float16")
    bits = ops.cast(view(halves, "uint16"), "int32")
    if shift == _BYTE:  # e5m2 is the upper byte, with infinity and NaN.
        return ops.cast(ops.right_shift(bits, shift), "uint8")
    magnitude = ops.right_shift(ops.bitwise_and(bits, 0x7FFF), shift)
    code = ops.minimum(magnitude, _MAX_E4M3FN)
    code = ops.where(magnitude > _INF_FLOAT16 >> shift, _NAN_E4M3FN, code)
    sign = ops.bitwise_and(ops.right_shift(bits, _BYTE), 0x80)
    return ops.cast(ops.bitwise_or(code, sign), "uint8")


def _decode_by_half(codes: Tensor, format_name: str) -> Tensor:
    """Convert codes to values by way of float16; see `decode`."""
    codes = ops.cast(codes, "uint8")  # Others are read as numbers.
    values = primitives.current.numbers(codes, format_name)
    if format_name == "float8_e5m2":  # It has the NaN of float16.
        return values
    if format_name == "float8_e4m3fn":
        magnitude = ops.bitwise_and(ops.cast(codes, "int32"), 0x7F)
        is_nan = ops.equal(magnitude, _NAN_E4M3FN)
    else:
        is_nan = ops.equal(codes, format_of(format_name).nan_code)
    return ops.where(is_nan, np.nan, values)


def encode_scales(scale: Tensor, scale_format: str) -> Tensor:
    """Convert scales, float32 values of the format, to codes of one byte."""
    scale = tensor_of(scale, "float32")
    if scale_format != "float8_e8m0fnu":
        return encode(scale, scale_format)
    bits = view(scale, "int32")
    byte = ops.bitwise_and(shifted_right(bits, MANTISSA), 0xFF)
    return ops.cast(byte, "uint8")


def decode_scales(codes: Tensor, scale_format: str) -> Tensor:
    """Convert the codes of `encode_scales` to float32 scales.

    Byte 0 of E8M0 is 2^-127, or 0 where subnormals are flushed; 255 is NaN.
    """
    codes = tensor_of(codes, "uint8")
    if scale_format != "float8_e8m0fnu":
        return decode(codes, scale_format)
    byte = ops.cast(codes, "int32")
    bits = ops.maximum(ops.left_shift(byte, MANTISSA), SUBNORMAL_SCALE)
    return view(ops.where(byte > 254, NAN, bits), "float32")


def _bits(number: float) -> int:
    """Return the bits of a number in float32."""
    return int(np.float32(number).view(np.int32))


def _offset(fmt: formats.Format) -> int:
    """Return what to add to a code so that its exponent has float32's bias."""
    exponent = _bits(fmt.smallest_normal) >> MANTISSA
    return (exponent - 1) << fmt.mantissa_bits


def _largest_code(fmt: formats.Format) -> int:
    """Return the code of the largest finite value of a format."""
    return int(np.array(fmt.max).astype(fmt.dtype).view(np.uint8))
