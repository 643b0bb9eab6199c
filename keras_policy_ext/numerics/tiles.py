"""Tiles of a matrix that share a scale, and the scales of tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import casting, scaling
from keras_policy_ext.numerics.casting import round_to_format, view
from keras_policy_ext.numerics.primitives import primitives
from keras_policy_ext.recipes import Quantization, Tile

_LARGEST = float(np.finfo("float32").max)
_E4M3 = "float8_e4m3fn"


class Scales(NamedTuple):
    """The scales of an operand.

    Attributes:
        scale: Float32, one for each tile: numbers of the format of scales.
        factor: What numbers are multiplied by to be quantized, likewise;
            None where they are divided by the scale.
        tensor_scale: Float32 scalar, which the scales of tiles are to be
            multiplied by; None where there is none above them.
    """

    scale: Tensor
    factor: Tensor | None = None
    tensor_scale: Tensor | None = None


def scales_of(amax: Tensor, quantization: Quantization) -> Scales:
    """The scales of tiles; what an amax of 0 gives where one is not finite.

    Args:
        amax: Float32 tensor, one for each tile, not negative.
        quantization: What is asked for.
    """
    if quantization.has_tensor_scale:
        return _two_level(amax, quantization)
    if quantization.scale_format == "float8_e8m0fnu":
        return _powers(amax, quantization)
    limit = formats.get(quantization.format).max
    rounding = quantization.scale_rounding
    if rounding == "floor":
        exponent = ops.maximum(_floored_exponent(amax, limit), 1)
        scale = view(ops.left_shift(exponent, casting.MANTISSA), "float32")
        return Scales(ops.where(scaling.is_positive_finite(amax), scale, 1.0))
    if rounding == "nearest" and None not in quantization.tile:
        # As Transformer Engine computes the scales of blocks.
        return Scales(scaling.scale_of_multiplier(amax, limit))
    up = rounding == "up"
    return Scales(scaling.scale_for_limit(amax, limit, power_of_two=up))


def _powers(amax: Tensor, quantization: Quantization) -> Scales:
    """Numbers of E8M0: 2^-127, of byte 0, to 2^127.

    Numbers are multiplied by 2^(127 - byte): that is finite for byte 0, by
    whose scale a backend that flushes subnormal numbers cannot divide.
    """
    limit = formats.get(quantization.format).max
    if quantization.scale_rounding == "floor":
        byte = _floored_exponent(amax, limit)
    else:
        up = scaling.scale_for_limit(amax, limit, power_of_two=True)
        byte = ops.right_shift(view(up, "int32"), casting.MANTISSA)
        byte = ops.where(amax <= _largest_of_byte_0(limit), 0, byte)
    byte = ops.where(scaling.is_positive_finite(amax), byte, 0)
    bits = ops.left_shift(byte, casting.MANTISSA)
    scale = view(ops.maximum(bits, casting.SUBNORMAL_SCALE), "float32")
    factor = view(ops.left_shift(254 - byte, casting.MANTISSA), "float32")
    return Scales(scale, factor)


def _floored_exponent(amax: Tensor, limit: float) -> Tensor:
    """Exponent of the amax less that of the largest number; biased, >= 0.

    Source: OCP Microscaling formats 1.0, section 6.3.
    """
    exponent = ops.right_shift(view(amax, "int32"), casting.MANTISSA)
    return ops.maximum(exponent - int(np.frexp(limit)[1] - 1), 0)


def _largest_of_byte_0(limit: float) -> float:
    """The largest amax that is rounded up to 2^-127 and not to 2^-126."""
    amax, inverse = np.float32(limit * 2.0**-127), np.float32(1 / limit)
    while True:
        larger = np.nextafter(amax, np.float32(1))
        if larger * inverse > np.float32(2.0**-127):
            return float(amax)
        amax = larger


def _two_level(amax: Tensor, quantization: Quantization) -> Scales:
    """Scales in e4m3fn under one in float32, in Transformer Engine's order.

    A divisor that is a constant would be made a factor by XLA, which differs
    in the last bit (JAX 0.10): here none is, to a compiler.
    """
    limit = formats.get(quantization.format).max
    largest = formats.get(_E4M3).max
    tensor = scaling.amax(amax)
    known = scaling.is_positive_finite(tensor)

    def number(value: float) -> Tensor:
        return ops.cast(ops.where(known, value, 1.0), "float32")

    wanted = ops.divide(number(largest * limit), ops.where(known, tensor, 1.0))
    encode = ops.where(known, ops.minimum(wanted, _LARGEST), 1.0)
    divisor = ops.cast(ops.where(encode > 0.0, limit, 1.0), "float32")
    finite = ops.where(scaling.is_positive_finite(amax), amax, 0.0)
    blocks = finite * ops.divide(encode, divisor)
    scale = round_to_format(ops.minimum(blocks, largest), _E4M3)
    # Of a one that is a constant TensorFlow's graphs make a reciprocal, which
    # they approximate (TF 2.21).
    one = ops.where(known, 1.0, encode)
    inverse = scale * ops.divide(one, encode)
    factor = ops.minimum(ops.divide(one, inverse), _LARGEST)
    tensor_scale = ops.divide(
        ops.where(known, tensor, 1.0), number(largest * limit)
    )
    return Scales(scale, factor, tensor_scale)


def tile_amax(matrix: Tensor, tile: Tile) -> Tensor:
    """The largest magnitude in each tile.

    Args:
        matrix: (b, m, k), of any real dtype.
        tile: How far one scale reaches.

    Returns:
        Float32 (b, m', k'); a scalar for a whole tensor.
    """
    if tile.is_whole:
        return scaling.amax(matrix)
    if tile.free in (None, 1) and tile.contracted in (None, 1):
        axes = _whole_axes(tile)
        return scaling.amax(matrix, axes, keepdims=True)
    return scaling.amax(_blocks(matrix, tile), axis=(2, 4))


def spread(scale: Tensor, tile: Tile, matrix: Tensor) -> Tensor:
    """The scale of each number in a matrix.

    Args:
        scale: (b, m', k'), one for each tile.
        tile: How far one scale reaches.
        matrix: (b, m, k), for its sizes.

    Returns:
        Tensor of three axes, of the size of the matrix or of size 1 each.
    """
    for axis, size in ((1, tile.free), (2, tile.contracted)):
        if size not in (None, 1):
            scale = primitives().repeat(scale, size, axis)
            whole = ops.shape(matrix)[axis]
            scale = scale[:, :whole] if axis == 1 else scale[:, :, :whole]
    return scale


def _whole_axes(tile: Tile) -> tuple[int, ...]:
    pairs = ((1, tile.free), (2, tile.contracted))
    return tuple(axis for axis, size in pairs if size is None)


def _blocks(matrix: Tensor, tile: Tile) -> Tensor:
    """(b, m', free, k', contracted), zeros appended."""
    b, m, k = ops.shape(matrix)
    rows, free = _counted(m, tile.free)
    columns, contracted = _counted(k, tile.contracted)
    over = rows * free - m, columns * contracted - k
    if not all(isinstance(each, int) and each == 0 for each in over):
        matrix = ops.pad(matrix, ((0, 0), (0, over[0]), (0, over[1])))
    blocks = (b, rows, free, columns, contracted)
    return primitives().reshape(matrix, blocks)


def _counted(size: Any, of: int | None) -> tuple[Any, Any]:
    """How many tiles an axis has, and the size of each along it.

    Written so that JAX sees that a symbolic size, padded, divides evenly.
    """
    return (1, size) if of is None else ((size + of - 1) // of, of)
