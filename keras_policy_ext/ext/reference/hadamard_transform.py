"""The Hadamard transform of 16 values, in NumPy."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.ext.reference.casting import float32

Array = np.ndarray[Any, Any]

#: Numbers that are mixed with each other.
SIZE = 16

#: The signs that come first: fixed, not drawn.
SIGNS = np.array(
    [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32
)


def hadamard(x: ArrayLike) -> Array:
    """Apply a Hadamard transform to each block of 16 along the last axis.

    The transform is `x · diag(s) · H / 4`.

    H is Sylvester's matrix, `H[i][j] = (-1)^popcount(i & j)`, so that x is
    multiplied by an orthogonal matrix: a matmul is unchanged if both operands
    are transformed along the summed axis. It is computed in four stages of
    float32 additions and subtractions over the distances 1, 2, 4 and 8, and
    then times 1/4. So the result is the same to the bit on every backend.

    Args:
        x: `(..., n)`.

    Returns:
        float32 `(..., m)`, where m is n rounded up to a multiple of 16. Zeros
        are appended before the transform and take part in it.
    """
    values = float32(x)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % SIZE)]
    padded = np.pad(values, padding)
    count = padded.size // SIZE
    runs = padded.reshape(count, SIZE) * SIGNS
    with np.errstate(over="ignore", invalid="ignore"):
        for distance in (1, 2, 4, 8):
            pairs = runs.reshape(count, SIZE // distance // 2, 2, distance)
            low, high = pairs[:, :, 0], pairs[:, :, 1]
            both = np.stack([low + high, low - high], axis=2)
            runs = both.reshape(count, SIZE)
    return (runs * np.float32(0.25)).reshape(padded.shape)
