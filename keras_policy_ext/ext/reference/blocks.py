"""Quantize blocks with a scale each: plain, MX and NVFP4, in NumPy."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext import formats
from keras_policy_ext.ext.reference.casting import cast, float32, quantize
from keras_policy_ext.ext.reference.scales import (
    E8M0,
    amax,
    e8m0_floor,
    e8m0_up,
    four_over_six_scales,
    multiplier,
    scale_from_amax,
    scale_of_multiplier,
    spread,
    tile_amax,
    two_level_scales,
)

Array = np.ndarray[Any, Any]


class BlockQuantized(NamedTuple):
    """The codes of a tensor, with one scale for each block.

    Attributes:
        codes: The codes, of x's shape.
        scales: `(rows / tile[0], columns / tile[1])`, rounded up.
    """

    codes: Array
    scales: Array


class NVFP4Quantized(NamedTuple):
    """The codes and scales of NVFP4: the value is `code * scale * amax / 2688`.

    Under four over six it is `code * scale * amax / 1536`.

    Attributes:
        codes: `float4_e2m1fn`, of x's shape.
        scales: `float8_e4m3fn` per block.
        amax: The tensor's amax, float32.
    """

    codes: Array
    scales: Array
    amax: np.float32


def quantize_block(
    x: ArrayLike,
    dtype: str = "float8_e4m3fn",
    tile: tuple[int, int] = (1, 128),
    power_of_two: bool = True,
) -> BlockQuantized:
    """Quantize a tensor with one float32 scale per tile, as DeepSeek-V3 does.

    Source: arXiv 2412.19437.

    The last tile of a row or column may be smaller; padding never changes a
    scale. A tile of zeros has scale 1. Scales that are not rounded are
    computed by `scale_of_multiplier`, as in Transformer Engine.

    Args:
        x: `(rows, columns)`.
        dtype: The narrow format.
        tile: Rows and columns of a tile: `(1, 128)` or `(128, 128)`.
        power_of_two: Round scales up to powers of two.

    Returns:
        Codes `(rows, columns)` and dequantizing float32 scales.
    """
    matrix = _matrix(x)
    found = tile_amax(matrix, tile)
    if power_of_two:
        scales = scale_from_amax(found, dtype, power_of_two=True)
    else:
        scales = scale_of_multiplier(found, dtype)
    codes = quantize(matrix, spread(scales, tile, matrix.shape), dtype)
    return BlockQuantized(codes, scales)


def quantize_mx(
    x: ArrayLike,
    dtype: str = "float8_e4m3fn",
    block: int = 32,
    rounding: str = "round_up",
) -> BlockQuantized:
    """Quantize to OCP MX: one E8M0 scale per block of the last axis.

    Args:
        x: `(rows, columns)`.
        dtype: The narrow format of the elements.
        block: Columns of a block.
        rounding: `"round_up"` (arXiv 2506.08027) or `"floor"` (OCP MX 1.0),
            to the bit.

    Returns:
        Codes `(rows, columns)` and scales as `float8_e8m0fnu`, whose byte E
        means 2^(E − 127).

    Raises:
        ValueError: If the rounding is unknown.
    """
    rules = {"round_up": e8m0_up, "floor": e8m0_floor}
    if rounding not in rules:
        raise ValueError(
            f"Unknown rounding of MX scales. Received: {rounding!r}. "
            "Allowed: 'round_up' or 'floor'. Leave it out for 'round_up'."
        )
    tile, matrix = (1, block), _matrix(x)
    exponents = rules[rounding](tile_amax(matrix, tile), dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        factors = spread(multiplier(exponents), tile, matrix.shape)
        codes = cast(matrix * factors, dtype)
    return BlockQuantized(codes, exponents.view(formats.get(E8M0).dtype))


def quantize_nvfp4(
    x: ArrayLike, tile: tuple[int, int] = (1, 16), four_over_six: bool = False
) -> NVFP4Quantized:
    """Quantize to NVFP4: e2m1 codes, e4m3 scales per block, one tensor scale.

    The result equals that of Transformer Engine's reference quantizer bit for
    bit, with rounding to nearest. The tensor scale is float32.

    Args:
        x: `(rows, columns)`.
        tile: Rows and columns of a block: `(1, 16)` or `(16, 16)`.
        four_over_six: Whether the amax of a block becomes 4 or 6, by the
            smaller error (`scales.four_over_six_scales`), not always 6.

    Returns:
        An `NVFP4Quantized`.
    """
    matrix, dtype = _matrix(x), "float4_e2m1fn"
    tensor = amax(matrix)
    found = tile_amax(matrix, tile)
    if four_over_six:
        scales, factors = four_over_six_scales(matrix, found, tensor, tile)
    else:
        scales, factors = two_level_scales(found, tensor, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = cast(matrix * spread(factors, tile, matrix.shape), dtype)
    return NVFP4Quantized(codes, scales, tensor)


def _matrix(x: ArrayLike) -> Array:
    matrix = float32(x)
    if matrix.ndim != 2:
        raise ValueError(
            "The array is not a matrix, and blocks are those of a matrix. "
            f"Received: an array of shape {matrix.shape}. Allowed: (rows, "
            "columns). Reshape it so that the contracted axis is the last."
        )
    return matrix
