"""The Hadamard transform that spreads an outlier over sixteen numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

Tensor = Any

SIZE = 16

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""What each of sixteen numbers is multiplied by first, fixed and not drawn.

Source: Transformer Engine's NVFP4 recipe.
"""


def hadamard(x: Tensor) -> Tensor:
    """`x · diag(signs) · H / 4` of each run of sixteen on the last axis.

    H is Sylvester's matrix, `H[i][j] = (-1)^popcount(i & j)`; so divided it
    is orthogonal, and a product of two operands that are both transformed
    along the summed axis is what it was. In four stages of additions, which
    give the same bits on every backend, as a matmul would not.

    Args:
        x: Float32 (..., n), n a multiple of 16.

    Returns:
        Float32 tensor of the same shape.
    """
    shape = ops.shape(x)
    x = ops.reshape(x, (-1, SIZE)) * ops.convert_to_tensor(
        np.array(SIGNS, "float32")
    )
    distance = 1
    while distance < SIZE:
        pairs = ops.reshape(x, (-1, SIZE // (2 * distance), 2, distance))
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = ops.stack([first + second, first - second], axis=2)
        distance *= 2
    return ops.reshape(x, shape) * 0.25


def padded(matrix: Tensor) -> Tensor:
    """A matrix with zeros appended to its last axis, to a multiple of 16."""
    over = -ops.shape(matrix)[-1] % SIZE
    if isinstance(over, int) and over == 0:
        return matrix
    around = [(0, 0)] * (len(matrix.shape) - 1)
    return ops.pad(matrix, [*around, (0, over)])
