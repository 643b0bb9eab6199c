"""The Hadamard transform that spreads an outlier over sixteen numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.primitives import primitives

SIZE = 16

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""What each of sixteen numbers is multiplied by first, fixed and not drawn.

Source: Transformer Engine's NVFP4 recipe.
"""


def hadamard(matrix: Tensor, axis: int = 2) -> Tensor:
    """`x · diag(signs) · H / 4` of each run of sixteen along an axis.

    H is Sylvester's matrix, `H[i][j] = (-1)^popcount(i & j)`; so divided it
    is orthogonal, and a product of two operands that are both transformed
    along the summed axis is what it was. In four stages of additions, over
    distances of 1, 2, 4 and 8, which give the same bits on every backend, as
    a matmul would not.

    Args:
        matrix: Float32 (b, m, k).
        axis: 1 or 2; the size of this axis is a multiple of 16.

    Returns:
        Float32 tensor of the same shape.
    """
    axes = primitives()
    shape = ops.shape(matrix)
    after = 1 if axis == 2 else shape[2]
    signs = np.array(SIGNS, "float32")[:, np.newaxis]
    x = ops.reshape(matrix, (-1, SIZE, after)) * ops.convert_to_tensor(signs)
    for distance in (1, 4):
        # Two stages at once: a pass over memory less, each.
        quarters = (-1, 4 // distance, 4, distance, after)
        fours = axes.reshape(x, quarters)
        a, b, c, d = (fours[:, :, i] for i in range(4))
        a, b, c, d = a + b, a - b, c + d, c - d
        x = axes.stack([a + c, b + d, a - c, b - d], axis=2)
    return axes.reshape(x, shape) * 0.25


def inverse(matrix: Tensor, size: Any, axis: int = 2) -> Tensor:
    """Undo `hadamard`, and drop the zeros that `padded` appended.

    Args:
        matrix: Float32 (b, m, k), as `hadamard` returns it.
        size: Of the axis, before it was padded.
        axis: 1 or 2.

    Returns:
        Float32 tensor of that size along the axis.
    """
    sixteens = ops.shape(matrix)[axis] // SIZE
    signs = ops.tile(np.array(SIGNS, "float32"), sixteens)
    signs = ops.reshape(signs, (1, -1, 1) if axis == 1 else (1, 1, -1))
    x = hadamard(matrix * signs, axis) * signs
    return x[:, :size] if axis == 1 else x[:, :, :size]


def padded(matrix: Tensor, axis: int = 2) -> Tensor:
    """(b, m, k) with zeros appended to an axis, to a multiple of 16."""
    size = ops.shape(matrix)[axis]
    # In this form JAX sees of a symbolic size that it divides evenly.
    over = (size + SIZE - 1) // SIZE * SIZE - size
    if isinstance(over, int) and over == 0:
        return matrix
    around = [(0, 0), (0, 0), (0, 0)]
    around[axis] = (0, over)
    return ops.pad(matrix, around)
