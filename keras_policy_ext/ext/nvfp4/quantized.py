"""Quantizations with scales on two levels, transforms, or random rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Size, Tensor
from keras_policy_ext.ext.stochastic.rounding import (
    random_bits,
    round_to_neighbour,
)
from keras_policy_ext.numerics import (
    casting,
    primitives,
    quantized,
    scaling,
    tiles,
)
from keras_policy_ext.numerics.casting import Cast, round_to_format
from keras_policy_ext.numerics.quantized import Quantized, scaled_and_cast
from keras_policy_ext.numerics.tiles import Scales
from keras_policy_ext.recipes import Quantization, Tile

_LARGEST = float(np.finfo("float32").max)
_E4M3 = "float8_e4m3fn"
_E2M1 = "float4_e2m1fn"

LARGEST_OF_SIX = 256.0
"""The largest scale of a tile under four over six: 1.5 times it is exact too.

Source: arXiv 2512.02010.
"""

FOUR, SIX = 4.0, 6.0
"""The two values that the amax of a tile can become under four over six."""

SIZE = 16

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs that each block of sixteen elements is multiplied by.

Source: Transformer Engine's NVFP4 recipe.
"""


def hadamard(matrix: Tensor, axis: int = 2) -> Tensor:
    """Transform each block of 16 along an axis: `x · diag(signs) · H / 4`.

    H is Sylvester's matrix, `H[i][j] = (-1)^popcount(i & j)`. With the factor
    it is orthogonal, so a matmul of two operands that are both transformed
    along the contracted axis is unchanged. It is computed in four stages of
    additions, over distances of 1, 2, 4 and 8. They give the same bits on every
    backend, unlike a matmul. The matrix is float32 (b, m, k); the axis is 1 or
    2, its size a multiple of 16.
    """
    framework, shape = primitives.current, ops.shape(matrix)
    if 0 in tuple(matrix.shape):  # No -1 can be inferred from zero numbers.
        return matrix
    size_after = 1 if axis == 2 else shape[2]
    signs = ops.convert_to_tensor(np.array(SIGNS, "float32")[:, np.newaxis])
    x = ops.reshape(matrix, (-1, SIZE, size_after)) * signs
    # Each pass over memory does two stages: of `distance` and its double.
    for distance in (1, 4):
        quarters = (-1, 4 // distance, 4, distance, size_after)
        fours = framework.reshape(x, quarters)
        a, b, c, d = (fours[:, :, i] for i in range(4))
        a, b, c, d = a + b, a - b, c + d, c - d
        x = framework.stack([a + c, b + d, a - c, b - d], axis=2)
    return framework.reshape(x, shape) * 0.25


def inverse(matrix: Tensor, size: Size, axis: int = 2) -> Tensor:
    """Undo `hadamard`; crop the axis to its size before it was padded."""
    sixteens = ops.shape(matrix)[axis] // SIZE
    signs = ops.tile(np.array(SIGNS, "float32"), sixteens)
    signs = ops.reshape(signs, (1, -1, 1) if axis == 1 else (1, 1, -1))
    # `H / 4` is its own inverse; the inner signs undo those of `hadamard`.
    x = hadamard(matrix * signs, axis) * signs
    return x[:, :size] if axis == 1 else x[:, :, :size]


def padded(matrix: Tensor, axis: int = 2) -> Tensor:
    """Pad an axis of (b, m, k) with zeros to a multiple of 16."""
    size = ops.shape(matrix)[axis]
    # In this form JAX sees of a symbolic size that it divides evenly.
    over = (size + SIZE - 1) // SIZE * SIZE - size
    if isinstance(over, int) and over == 0:
        return matrix
    around = [(0, 0), (0, 0), (0, 0)]
    around[axis] = (0, over)
    return ops.pad(matrix, around)


class Extended:
    """Computes extended quantizations; see `numerics.quantized.Extended`."""

    def quantize(
        self,
        x: Tensor,
        quantization: Quantization,
        scale: Tensor | None,
        cast: Cast,
        whole_amax: Callable[[Tensor], Tensor],
        key: Tensor | None,
        across: bool,
    ) -> tuple[Quantized, Tensor | None]:
        """Quantize a matrix; see `numerics.quantized.quantize`."""
        if quantization.hadamard is not None:
            axis = 1 if across else 2
            x = hadamard(padded(ops.cast(x, "float32"), axis), axis)
        if quantization.four_over_six:
            x = ops.cast(x, "float32")

        def scales_of(amax: Tensor, quantization: Quantization) -> Scales:
            if quantization.four_over_six:
                return _four_over_six(x, amax, quantization)
            if quantization.has_tensor_scale:
                return two_level(amax, quantization)
            return tiles.scales_of(amax, quantization)

        def cast_at_random(
            x: Tensor, scale: Tensor, format_name: str, is_factor: bool
        ) -> Tensor:
            wide = casting.scaled(x, scale, format_name, is_factor)
            return _at_random(wide, format_name, key, across)

        if quantization.rounding == "stochastic":
            cast = cast_at_random
        return scaled_and_cast(
            x, quantization, scale, cast, whole_amax, scales_of
        )

    def untransformed(self, values: Tensor, size: Size, axis: int) -> Tensor:
        """Undo `hadamard`; crop the axis to its size before it was padded."""
        return inverse(values, size, axis)


def _four_over_six(
    x: Tensor, amax: Tensor, quantization: Quantization
) -> Scales:
    """Compute the scales of tiles of `x` whose amax becomes 4 or 6.

    Each tile has the scale whose squared error is smaller, 6 if they are equal.
    `four_over_six_scales` of the reference defines the error.
    """
    tile = quantization.tile
    six = two_level(amax, quantization, SIX)
    four = two_level(amax, quantization, FOUR)
    is_four = _squared_errors(x, four, tile) < _squared_errors(x, six, tile)
    is_four = ops.logical_and(is_four, scaling.is_positive_finite(amax))
    return Scales(
        ops.where(is_four, four.scale, six.scale),
        ops.where(is_four, four.factor, six.factor),
        six.tensor_scale,
    )


def _squared_errors(x: Tensor, scales: Scales, tile: Tile) -> Tensor:
    """Return each tile's squared error of rounding to nearest in e2m1fn."""
    product = ops.abs(x) * tiles.spread(scales.factor, tile, x)
    scaled = ops.minimum(product, 8.0)  # So the sums below fit an int32.
    values = round_to_format(ops.minimum(scaled, SIX), _E2M1)
    # Compilers contract and reorder sums of floats, so the errors are integers,
    # in units of 1 / 1024 of a scale. The largest sum, of 256 errors, is 2^30.
    errors = _in_units(scaled) - _in_units(values)
    sums = ops.sum(tiles.blocks(errors * errors, tile), axis=(2, 4))
    return ops.cast(sums, "float32") * (scales.scale * scales.scale)


def _in_units(values: Tensor) -> Tensor:
    """Return values in units of 1 / 1024, cut to integers."""
    return ops.cast(values * 1024.0, "int32")


def two_level(
    amax: Tensor,
    quantization: Quantization,
    reach: float | None = None,  # What the amax of a tile becomes: 4 or 6.
) -> Scales:
    """Compute e4m3fn scales of tiles, and a float32 scale of the tensor."""
    limit = formats.get(quantization.format).max
    highest = formats.get(_E4M3).max
    # The scale of the tile that has the amax of the tensor.
    largest = highest if reach is None else LARGEST_OF_SIX
    tensor_amax = scaling.amax(amax)
    is_usable = scaling.is_positive_finite(tensor_amax)
    tensor_amax = ops.where(is_usable, tensor_amax, 1.0)

    # The order of operations is Transformer Engine's. XLA would turn a division
    # by a constant into a multiplication, which differs in the last bit (JAX
    # 0.10). So no divisor is a constant for the compiler.
    def number(value: float) -> Tensor:
        return ops.cast(ops.where(is_usable, value, 1.0), "float32")

    # The inverse of the scale of the tensor.
    multiplier = ops.divide(number(largest * limit), tensor_amax)
    multiplier = ops.where(is_usable, ops.minimum(multiplier, _LARGEST), 1.0)
    is_positive = multiplier > 0.0
    divisor = ops.cast(ops.where(is_positive, reach or limit, 1.0), "float32")
    finite = ops.where(scaling.is_positive_finite(amax), amax, 0.0)
    unrounded = finite * ops.divide(multiplier, divisor)
    scale = round_to_format(ops.minimum(unrounded, highest), _E4M3)
    # Of a constant 1 TensorFlow's graphs approximate a reciprocal (TF 2.21).
    one = ops.where(is_usable, 1.0, multiplier)
    both_scales = scale * ops.divide(one, multiplier)
    factor = ops.minimum(ops.divide(one, both_scales), _LARGEST)
    tensor_scale = ops.divide(tensor_amax, number(largest * limit))
    return Scales(scale, factor, tensor_scale)


def _at_random(
    x: Tensor, format_name: str, key: Tensor | None, across: bool
) -> Tensor:
    """Round each value up or down at random to a value of a format."""
    if key is None:
        raise ValueError(
            "Stochastic rounding needs `key`. Received: key=None. Allowed: "
            "an int32 scalar; one key gives the same bits on every backend. "
            "Pass `key=`."
        )
    bits = random_bits(ops.shape(x), key, across)
    return round_to_neighbour(x, bits, format_name)


quantized.register(Extended())
