"""Quantize the moments of an optimizer to one byte a number.

The bits are those of `reference.moments`. Of a second moment, the square root
is stored: it has the dynamic range of a first moment. It has no sign, so that
its codes have one more bit of the mantissa.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import primitives
from keras_policy_ext.numerics.casting import (
    MAGNITUDE_BITS,
    MANTISSA,
    decode_scales,
    encode_scales,
    shifted_right,
    view,
)
from keras_policy_ext.numerics.scaling import (
    amax,
    scale_from_amax,
)
from keras_policy_ext.numerics.stochastic import _wrapped
from keras_policy_ext.reference.moments import (
    BLOCKS,
    GOLDEN,
    KINDS,
    LARGEST,
    SMALLEST,
    SMALLEST_ROOT,
)

_FORMAT = "float8_e4m3fn"
_SCALE_FORMAT = "float8_e8m0fnu"
_BIAS = 7
_SMALLEST_NORMAL = 2.0 ** (1 - _BIAS)


def blocks_of(shape: Any, form: str) -> int:
    """Return how many scales a moment of a shape has."""
    return -(-math.prod(shape) // BLOCKS[form])


def quantize_moments(
    x: Tensor, kind: str, form: str, key: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize a moment to codes of one byte, with a scale for each block.

    Args:
        x: Float32 tensor of a known shape.
        kind: `"first"`, or `"second"` for a moment that is never negative.
        form: `"float8"`: a float32 scale for 256 numbers; `"mx"`: a power of
            two, one byte, for 32.
        key: Int32 scalar for stochastic rounding; None rounds to nearest.

    Returns:
        Uint8 codes of the shape of `x`, and scales (blocks,), float32 or
        uint8. See `reference.moments.quantize_moments`.
    """
    shape, count = tuple(x.shape), math.prod(x.shape)
    rows = _in_blocks(ops.cast(x, "float32"), count, BLOCKS[form])

    def quantized(first: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        return _quantized(rows, first, kind, form, key)

    codes, scale = primitives.current.by_rows(quantized, rows)
    codes = ops.reshape(codes, (-1,))[:count]
    return ops.reshape(codes, shape), scale


def _quantized(
    rows: Tensor, first: int, kind: str, form: str, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantize blocks, the rows of a matrix; `first` numbers are before it."""
    mantissa_bits, signed = KINDS[kind]
    largest = amax(rows, axis=1)
    if not signed:
        # Of the largest alone, as XLA would take all square roots twice.
        largest = ops.sqrt(largest)
        rows = ops.sqrt(rows)
        # NaN becomes 0, and a denormal, which some backends take for 0.
        rows = ops.where(rows >= SMALLEST_ROOT, rows, 0.0)
    scale = scale_of_block(largest, kind, form)
    # The `where` hides from compilers that the dividend is a constant.
    one = ops.where(scale > 0.0, 1.0, scale)
    factor = ops.expand_dims(ops.divide(one, scale), 1)
    raw = view(ops.multiply(rows, factor), "int32")
    magnitude = ops.bitwise_and(raw, MAGNITUDE_BITS)
    dropped = MANTISSA - mantissa_bits
    bits = _bits(rows.shape, first, key, dropped)
    normal = ops.right_shift(magnitude + bits, dropped)
    normal = normal - ((127 - _BIAS) << mantissa_bits)
    # Below the smallest normal number codes count multiples of the spacing.
    small = view(magnitude, "float32") * (2.0**mantissa_bits / _SMALLEST_NORMAL)
    share = ops.cast(bits, "float32") * 2.0**-dropped
    small = ops.cast(small + share, "int32")
    is_small = magnitude < int(np.float32(_SMALLEST_NORMAL).view("int32"))
    code = ops.where(is_small, small, normal)
    if signed:
        sign = ops.bitwise_and(ops.right_shift(raw, 24), 0x80)
        code = ops.bitwise_or(ops.minimum(code, 126), sign)
    else:
        code = ops.minimum(code, 254)
        code = ops.maximum(code, ops.cast(rows > 0.0, "int32"))
    if form == "mx":
        scale = encode_scales(scale, _SCALE_FORMAT)
    return ops.cast(code, "uint8"), scale


def scale_of_block(amax: Tensor, kind: str, form: str) -> Tensor:
    """Return the float32 scales of blocks with these largest magnitudes."""
    amax = ops.where(ops.isnan(amax), LARGEST[kind], amax)
    amax = ops.minimum(amax, LARGEST[kind])
    scale = scale_from_amax(amax, _FORMAT, power_of_two=form == "mx")
    return ops.maximum(scale, SMALLEST)


def dequantize_moments(
    codes: Tensor, scale: Tensor, kind: str, form: str
) -> Tensor:
    """Return the float32 numbers of the codes of `quantize_moments`."""
    shape, count = tuple(codes.shape), math.prod(codes.shape)
    rows = _in_blocks(codes, count, BLOCKS[form])

    def numbers(_: int, rows: Tensor, scale: Tensor) -> tuple[Tensor]:
        return (_numbers(rows, scale, kind, form),)

    (found,) = primitives.current.by_rows(numbers, rows, scale)
    return ops.reshape(ops.reshape(found, (-1,))[:count], shape)


def _numbers(rows: Tensor, scale: Tensor, kind: str, form: str) -> Tensor:
    if form == "mx":
        scale = decode_scales(scale, _SCALE_FORMAT)
    scale = ops.expand_dims(scale, 1)
    if KINDS[kind].signed:
        return primitives.current.numbers(rows, _FORMAT) * scale
    # The codes are bits of float16 numbers of another exponent bias.
    halves = ops.left_shift(ops.cast(rows, "int16"), 6)
    wide = ops.cast(view(halves, "float16"), "float32") * 2.0**8
    return ops.square(wide * scale)


def _in_blocks(x: Tensor, count: int, size: int) -> Tensor:
    """Return a tensor as a matrix of blocks, padded with zeros."""
    x = ops.reshape(x, (-1,))
    if count % size:
        x = ops.pad(x, [[0, -count % size]])
    return ops.reshape(x, (-1, size))


def _bits(shape: Any, first: int, key: Tensor | None, count: int) -> Tensor:
    """Return so many bits per number; see `reference.moments.moment_bits`."""
    if key is None:
        return ops.full((1, 1), 1 << (count - 1), "int32")
    # In this form XLA for a CPU takes a quarter of the time (JAX 0.10).
    index = ops.arange(first, first + math.prod(shape), dtype="int32")
    index = ops.reshape(index, shape)
    index = index * _wrapped(GOLDEN) + key
    return shifted_right(index, 32 - count)
