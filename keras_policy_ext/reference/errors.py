"""What quantization loses, in NumPy."""

import math

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.reference.casting import float32, quantize


def sqnr_db(reference: ArrayLike, approximation: ArrayLike) -> float:
    """Signal to quantization noise in dB: 10·log10(Σ r² / Σ (r − a)²).

    Computed in float64. `inf` if the two are equal, `-inf` if the reference
    is all zero and the approximation is not.
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
    """Fraction (0 to 1) of the nonzero values that become 0.

    0.0 if there are no nonzero values.
    """
    nonzero = float32(x) != 0
    lost = nonzero & (float32(quantize(x, scale, dtype)) == 0)
    return float(lost.sum() / max(int(nonzero.sum()), 1))
