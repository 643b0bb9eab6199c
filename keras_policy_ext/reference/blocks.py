"""Blocks with a scale each: plain, MX and NVFP4, in NumPy."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext import formats
from keras_policy_ext.reference.casting import cast, float32, quantize
from keras_policy_ext.reference.scales import amax, scale_from_amax

Array = np.ndarray[Any, Any]


class BlockQuantized(NamedTuple):
    """Codes with one scale per block.

    Attributes:
        codes: Of x's shape.
        scales: `(rows / tile[0], columns / tile[1])`, rounded up.
    """

    codes: Array
    scales: Array


class NVFP4Quantized(NamedTuple):
    """NVFP4 codes: the value is `code * scale * amax / 2688`.

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
    """One scale per tile of a matrix, as in DeepSeek-V3 (arXiv 2412.19437).

    The last tile of a row or column may be smaller; padding never changes a
    scale. A tile of zeros has scale 1.

    Args:
        x: `(rows, columns)`.
        dtype: The narrow format.
        tile: Rows and columns of a tile: `(1, 128)` or `(128, 128)`.
        power_of_two: Round scales up to powers of two.

    Returns:
        Codes `(rows, columns)` and dequantizing float32 scales.
    """
    scales = scale_from_amax(
        _block_amax(x, tile), dtype, power_of_two=power_of_two
    )
    spread = _spread(scales, tile, np.shape(x))
    return BlockQuantized(quantize(x, spread, dtype), scales)


def quantize_mx(
    x: ArrayLike,
    dtype: str = "float8_e4m3fn",
    block: int = 32,
    rounding: str = "round_up",
) -> BlockQuantized:
    """OCP MX: one E8M0 scale per block along the last axis.

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
        ValueError: If there is no such rounding.
    """
    rules = {"round_up": _e8m0_round_up, "floor": _e8m0_floor}
    if rounding not in rules:
        raise ValueError(
            f"Unknown rounding of MX scales. Received: {rounding!r}. "
            "Allowed: 'round_up' or 'floor'. Leave it out for 'round_up'."
        )
    tile = (1, block)
    exponents = rules[rounding](_block_amax(x, tile), dtype)
    # Multiply by 2^(127 − E): dividing by 2^-127 fails where denormals are
    # flushed. The power itself is always a normal number but for E = 254.
    factors = np.ldexp(np.float32(1), 127 - exponents.astype(np.int32))
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = float32(x) * _spread(factors, tile, np.shape(x))
    codes = cast(scaled, dtype)
    return BlockQuantized(
        codes, exponents.view(formats.get("float8_e8m0fnu").dtype)
    )


def quantize_nvfp4(
    x: ArrayLike, tile: tuple[int, int] = (1, 16)
) -> NVFP4Quantized:
    """NVFP4: e2m1 elements, e4m3 block scales, one float32 tensor scale.

    Bit for bit Transformer Engine's reference quantizer, rounding to nearest.

    Args:
        x: `(rows, columns)`.
        tile: Rows and columns of a block: `(1, 16)` or `(16, 16)`.

    Returns:
        An `NVFP4Quantized`.
    """
    element = formats.get("float4_e2m1fn")
    block_max = np.float32(formats.get("float8_e4m3fn").max)
    tensor = amax(x)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        wanted = block_max * np.float32(element.max) / tensor
        scale = np.minimum(wanted, _FLOAT32_MAX) if tensor else np.float32(1)
        blocks = _block_amax(x, tile) * (scale / np.float32(element.max))
        scales = cast(blocks, "float8_e4m3fn")
        inverse = np.float32(1) / (float32(scales) * (np.float32(1) / scale))
        encode = np.minimum(inverse, _FLOAT32_MAX)
        scaled = float32(x) * _spread(encode, tile, np.shape(x))
    return NVFP4Quantized(cast(scaled, element.name), scales, tensor)


def _e8m0_round_up(block_amax: Array, dtype: str) -> Array:
    v = block_amax * (np.float32(1) / np.float32(formats.get(dtype).max))
    bits = v.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32)
    fraction = bits & np.uint32(0x7FFFFF)
    small = (exponent == 0) & (fraction <= 0x400000)
    up = (fraction > 0) & (exponent != 254) & ~small
    return _e8m0_special(exponent + up, block_amax)


def _e8m0_floor(block_amax: Array, dtype: str) -> Array:
    largest = math.frexp(formats.get(dtype).max)[1] - 1
    exponent = np.frexp(block_amax)[1] - 1 - largest
    return _e8m0_special(np.clip(exponent, -127, 127) + 127, block_amax)


def _e8m0_special(exponent: Array, block_amax: Array) -> Array:
    exponent = np.where(block_amax == 0, 0, exponent)
    exponent = np.where(np.isinf(block_amax), 254, exponent)
    exponent = np.where(np.isnan(block_amax), 255, exponent)
    return exponent.astype(np.uint8)


def _block_amax(x: ArrayLike, tile: tuple[int, int]) -> Array:
    """The amax of each tile: `(rows / tile[0], columns / tile[1])`."""
    magnitudes = np.abs(_matrix(x))
    for axis, size in enumerate(tile):
        starts = np.arange(0, magnitudes.shape[axis], size)
        magnitudes = np.maximum.reduceat(magnitudes, starts, axis=axis)
    return magnitudes


def _spread(
    blocks: Array, tile: tuple[int, int], shape: tuple[int, ...]
) -> Array:
    """Repeat one value per tile over the elements of a matrix."""
    whole = blocks.repeat(tile[0], axis=0).repeat(tile[1], axis=1)
    return whole[: shape[0], : shape[1]]


def _matrix(x: ArrayLike) -> Array:
    matrix = float32(x)
    if matrix.ndim != 2:
        raise ValueError(
            "Blocks are defined on matrices. Received: an array of shape "
            f"{matrix.shape}. Allowed: (rows, columns). Reshape it so that "
            "the contracted axis is the last."
        )
    return matrix


_FLOAT32_MAX = np.finfo(np.float32).max
