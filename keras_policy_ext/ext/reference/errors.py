"""Measure errors of an approximation; pack 4-bit codes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext import formats
from keras_policy_ext.ext.reference.casting import float32, quantize

Array = np.ndarray[Any, Any]


def pack(codes: ArrayLike) -> Array:
    """Pack codes into bytes: two 4-bit codes per byte, or one 8-bit code.

    Packing is along the last axis. The first of two codes is in the low four
    bits. If the axis is odd, the high bits of the last byte are 0.

    Args:
        codes: `(..., n)`, with the dtype of a format of `formats.names()`.

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
    """Unpack bytes into codes; this is the inverse of `pack`.

    Args:
        packed: uint8 `(..., m)`.
        dtype: The name of the format.
        size: The length of the last axis, needed if it was odd.

    Returns:
        Codes of that format, `(..., size)`.
    """
    target, raw = formats.get(dtype), np.asarray(packed, np.uint8)
    if target.numbers_per_byte == 2:
        both = np.stack([raw & 15, raw >> 4], axis=-1)
        raw = both.reshape(*raw.shape[:-1], 2 * raw.shape[-1])
    return np.ascontiguousarray(raw[..., :size]).view(target.dtype)


def sqnr_db(reference: ArrayLike, approximation: ArrayLike) -> float:
    """Return the signal-to-noise ratio in dB: 10·log10(Σ r² / Σ (r − a)²).

    SQNR is the signal to quantization noise ratio, computed in float64. `inf`
    if the two are equal, `-inf` if the reference is all zero and the
    approximation is not.
    """
    exact = np.asarray(reference).astype(np.float64)
    noise = exact - np.asarray(approximation).astype(np.float64)
    noise_power = float(np.sum(noise**2))
    signal_power = float(np.sum(exact**2))
    if noise_power == 0:
        return math.inf
    if signal_power == 0:
        return -math.inf
    return 10 * math.log10(signal_power / noise_power)


def underflow_fraction(x: ArrayLike, scale: ArrayLike, dtype: str) -> float:
    """Return the fraction of nonzero values that quantization turns into 0.

    0.0 if there are no nonzero values.
    """
    nonzero = float32(x) != 0
    lost = nonzero & (float32(quantize(x, scale, dtype)) == 0)
    return float(lost.sum() / max(int(nonzero.sum()), 1))
