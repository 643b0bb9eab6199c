"""Scales on two levels: e4m3fn per block, float32 per tensor, in NumPy."""

from typing import Any

import numpy as np

from keras_policy_ext import formats
from keras_policy_ext.reference.casting import cast, float32

Array = np.ndarray[Any, Any]

#: The format of the scales of blocks.
BLOCK_SCALE = "float8_e4m3fn"

_FLOAT32_MAX = np.finfo(np.float32).max


def two_level_scales(
    block_amax: Array, tensor_amax: np.float32, dtype: str
) -> tuple[Array, Array]:
    """The scales of blocks, and what their values are multiplied by.

    With `S = min(448 * 6 / tensor_amax, FLT_MAX)` (448 and 6 being the
    largest e4m3fn and e2m1fn), a scale is `e4m3fn(block_amax * (S / 6))` and
    the multiplier `min(1 / (scale * (1 / S)), FLT_MAX)`, so that a block
    whose scale rounds to 0 has the largest multiplier and the value 0.

    Args:
        block_amax: float32 of any shape.
        tensor_amax: float32 scalar; S is 1 where it is 0.
        dtype: The format of the elements.

    Returns:
        `float8_e4m3fn` scales and float32 multipliers of block_amax's shape.
    """
    largest = np.float32(formats.get(dtype).max)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        wanted = np.float32(_largest_value(dtype)) / tensor_amax
        scale = np.minimum(wanted, _FLOAT32_MAX)
        scale = scale if tensor_amax else np.float32(1)
        scales = cast(block_amax * (scale / largest), BLOCK_SCALE)
        inverse = np.float32(1) / (float32(scales) * (np.float32(1) / scale))
    return scales, np.minimum(inverse, _FLOAT32_MAX)


def tensor_scale(tensor_amax: np.float32, dtype: str) -> np.float32:
    """`tensor_amax / 2688` (448 · 6) in float32, and 1 for an amax of 0."""
    if not tensor_amax:
        return np.float32(1)
    return np.float32(tensor_amax) / np.float32(_largest_value(dtype))


def _largest_value(dtype: str) -> float:
    return formats.get(BLOCK_SCALE).max * formats.get(dtype).max
