"""Codes as they are stored: bytes, with two numbers of four bits in each."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext import formats

Array = np.ndarray[Any, Any]


def pack(codes: ArrayLike) -> Array:
    """The bytes of codes; of four bits each, two in a byte along the last axis.

    The first of two numbers is in the low four bits. The last byte of an odd
    axis has 0 in the high ones.

    Args:
        codes: `(..., n)`, of the dtype of a format of `formats.names()`.

    Returns:
        uint8 `(..., n)`, or `(..., n / 2)`, rounded up, for four bits.
    """
    array = np.asarray(codes)
    count = formats.get(array.dtype).numbers_per_byte
    raw = array.view(np.uint8)
    if count == 1:
        return raw
    even = np.pad(raw, [(0, 0)] * (raw.ndim - 1) + [(0, raw.shape[-1] % 2)])
    return (even[..., ::2] & 15) | (even[..., 1::2] << 4)


def unpack(packed: ArrayLike, dtype: str, size: int | None = None) -> Array:
    """The codes of bytes: the inverse of `pack`.

    Args:
        packed: uint8 `(..., m)`.
        dtype: The name of the format.
        size: The length of the last axis, where it was odd; all by default.

    Returns:
        Codes of that format, `(..., size)`.
    """
    target, raw = formats.get(dtype), np.asarray(packed, np.uint8)
    if target.numbers_per_byte == 2:
        both = np.stack([raw & 15, raw >> 4], axis=-1)
        raw = both.reshape(*raw.shape[:-1], 2 * raw.shape[-1])
    return np.ascontiguousarray(raw[..., :size]).view(target.dtype)
