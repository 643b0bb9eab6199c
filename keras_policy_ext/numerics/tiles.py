"""Tiles: the parts of a matrix that have a scale each.

A matrix is (b, m, k), the contracted axis last. Scales are (b, m', k'), one
for each tile; a tile that is not full at the end of an axis counts as filled
with zeros.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.primitives import primitives
from keras_policy_ext.recipes import Tile


def tile_amax(matrix: Tensor, tile: Tile) -> Tensor:
    """The largest magnitude in each tile.

    Args:
        matrix: (b, m, k), of any real dtype.
        tile: How far one scale reaches.

    Returns:
        Float32 (b, m', k'); a scalar for a whole tensor.
    """
    if tile.is_whole:
        return scaling.amax(matrix)
    if tile.free in (None, 1) and tile.contracted in (None, 1):
        axes = _whole_axes(tile)
        return scaling.amax(matrix, axes, keepdims=True)
    return scaling.amax(_blocks(matrix, tile), axis=(2, 4))


def spread(scale: Tensor, tile: Tile, matrix: Tensor) -> Tensor:
    """The scale of each number in a matrix.

    Args:
        scale: (b, m', k'), one for each tile.
        tile: How far one scale reaches.
        matrix: (b, m, k), for its sizes.

    Returns:
        Tensor of three axes, of the size of the matrix or of size 1 each.
    """
    for axis, size in ((1, tile.free), (2, tile.contracted)):
        if size not in (None, 1):
            scale = primitives().repeat(scale, size, axis)
            whole = ops.shape(matrix)[axis]
            scale = scale[:, :whole] if axis == 1 else scale[:, :, :whole]
    return scale


def _whole_axes(tile: Tile) -> tuple[int, ...]:
    pairs = ((1, tile.free), (2, tile.contracted))
    return tuple(axis for axis, size in pairs if size is None)


def _blocks(matrix: Tensor, tile: Tile) -> Tensor:
    """(b, m', free, k', contracted), zeros appended."""
    b, m, k = ops.shape(matrix)
    rows, free = _counted(m, tile.free)
    columns, contracted = _counted(k, tile.contracted)
    over = rows * free - m, columns * contracted - k
    if not all(isinstance(each, int) and each == 0 for each in over):
        matrix = ops.pad(matrix, ((0, 0), (0, over[0]), (0, over[1])))
    blocks = (b, rows, free, columns, contracted)
    return primitives().reshape(matrix, blocks)


def _counted(size: Any, of: int | None) -> tuple[Any, Any]:
    """How many tiles an axis has, and the size of each along it.

    Written so that JAX sees that a symbolic size, padded, divides evenly.
    """
    return (1, size) if of is None else ((size + of - 1) // of, of)
