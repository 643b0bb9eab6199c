"""The amaxes and scales of tiles, parts of a matrix that share a scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_policy_ext._types import Size, Tensor
from keras_policy_ext.numerics import casting, primitives, scaling
from keras_policy_ext.numerics.casting import view
from keras_policy_ext.recipes import Quantization, Tile


class Scales(NamedTuple):
    """The scales of an operand's tiles, and how they apply.

    Attributes:
        scale: Float32, one per tile: values of the format of scales.
        factor: Float32, one per tile: the factor that quantizes values; None
            if values are divided by the scale.
        tensor_scale: Float32 scalar that multiplies the others, or None.
    """

    scale: Tensor
    factor: Tensor | None = None
    tensor_scale: Tensor | None = None


def scales_of(amax: Tensor, quantization: Quantization) -> Scales:
    """Compute a float32 scale per tile; an infinite amax counts as 0."""
    if quantization.constant_scale is not None:
        return Scales(ops.ones_like(amax) * quantization.constant_scale)
    if quantization.scale_format == "float8_e8m0fnu":
        return _powers(amax, quantization)
    limit = casting.format_of(quantization.format).max
    rounding = quantization.scale_rounding
    if rounding == "floor":
        # At least 1, so that the scale is a normal number.
        exponent = ops.maximum(_floored_exponent(amax, limit), 1)
        scale = view(ops.left_shift(exponent, casting.MANTISSA), "float32")
        return Scales(ops.where(scaling.is_positive_finite(amax), scale, 1.0))
    if rounding == "nearest" and None not in quantization.tile[:2]:
        # As Transformer Engine computes the scales of blocks.
        return Scales(scaling.scale_of_multiplier(amax, limit))
    up = rounding == "up"
    return Scales(scaling.scale_for_limit(amax, limit, power_of_two=up))


def _powers(amax: Tensor, quantization: Quantization) -> Scales:
    """Compute one power-of-two scale (E8M0) per tile, 2^-127 to 2^127."""
    limit = casting.format_of(quantization.format).max
    if quantization.scale_rounding == "floor":
        byte = _floored_exponent(amax, limit)
    else:
        up = scaling.scale_for_limit(amax, limit, power_of_two=True)
        byte = ops.right_shift(view(up, "int32"), casting.MANTISSA)
        # `up` is at least 2^-126, byte 1.
        byte = ops.where(amax <= _largest_of_byte_0(limit), 0, byte)
    byte = ops.where(scaling.is_positive_finite(amax), byte, 0)
    bits = ops.left_shift(byte, casting.MANTISSA)
    scale = view(ops.maximum(bits, casting.SUBNORMAL_SCALE), "float32")
    # Values are multiplied by 2^(127 - byte), which is finite for byte 0. A
    # backend that flushes subnormals could not divide by the scale of byte 0.
    factor = view(ops.left_shift(254 - byte, casting.MANTISSA), "float32")
    return Scales(scale, factor)


def _floored_exponent(amax: Tensor, limit: float) -> Tensor:
    """Return the biased exponent of a float32 amax less `limit`'s exponent."""
    # Source: OCP Microscaling formats 1.0, section 6.3.
    exponent = ops.right_shift(view(amax, "int32"), casting.MANTISSA)
    of_limit = int(np.frexp(limit)[1]) - 1
    return ops.maximum(exponent - of_limit, 0)


def _largest_of_byte_0(limit: float) -> float:
    """Return the largest amax whose scale rounds up to 2^-127, byte 0."""
    # By float32 arithmetic, as in `e8m0_up` of the reference.
    amax, inverse = np.float32(limit * 2.0**-127), np.float32(1 / limit)
    while True:
        larger = np.nextafter(amax, np.float32(1))
        if larger * inverse > np.float32(2.0**-127):
            return float(amax)
        amax = larger


def tile_amax(matrix: Tensor, tile: Tile) -> Tensor:
    """Return the largest magnitude in each tile of a matrix (b, m, k).

    Float32 (b, m', k'); a scalar for a whole tensor.
    """
    if tile.is_whole:
        return scaling.amax(matrix)
    if tile.free in (None, 1) and tile.contracted in (None, 1):
        sizes = ((1, tile.free), (2, tile.contracted))
        axes = tuple(axis for axis, size in sizes if size is None)
        return scaling.amax(matrix, axes, keepdims=True)
    return scaling.amax(blocks(matrix, tile), axis=(2, 4))


def spread(scale: Tensor, tile: Tile, matrix: Tensor) -> Tensor:
    """Expand scales (b, m', k') of tiles, to broadcast to their elements."""
    for axis, size in ((1, tile.free), (2, tile.contracted)):
        # With None the axis has one scale, with 1 each element has its own.
        if size not in (None, 1):
            scale = primitives.current.repeat(scale, size, axis)
            whole = ops.shape(matrix)[axis]
            scale = scale[:, :whole] if axis == 1 else scale[:, :, :whole]
    return scale


def blocks(matrix: Tensor, tile: Tile) -> Tensor:
    """Pad a matrix; reshape it to (b, m', free, k', contracted).

    These are the numbers and the sizes of tiles along its two axes.
    """
    b, m, k = ops.shape(matrix)
    rows, free = _tiles_along(m, tile.free)
    columns, contracted = _tiles_along(k, tile.contracted)
    below, beside = rows * free - m, columns * contracted - k
    # A symbolic size may need padding.
    if not all(isinstance(x, int) and x == 0 for x in (below, beside)):
        matrix = ops.pad(matrix, ((0, 0), (0, below), (0, beside)))
    blocks = (b, rows, free, columns, contracted)
    return primitives.current.reshape(matrix, blocks)


def _tiles_along(size: Size, tile: int | None) -> tuple[Any, Any]:
    """Return the number of tiles along an axis, and the size of a tile."""
    # In this form JAX sees that a padded symbolic size divides evenly.
    return (1, size) if tile is None else ((size + tile - 1) // tile, tile)
