"""Tiles of the matrices of a batch: their amaxes, and their values spread."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext.reference.casting import float32
from keras_policy_ext.reference.scales import amax

Array = np.ndarray[Any, Any]

#: How far one scale reaches along the last two axes; None is all of an axis.
Tile = tuple[int | None, int | None]


def tile_amax(x: ArrayLike, tile: Tile) -> Array:
    """The largest magnitude of each tile, NaN where it has one.

    The last tile of an axis may be smaller. `(None, None)` is the whole
    array with all its axes; every other tile lies within one matrix.

    Args:
        x: `(..., rows, columns)`.
        tile: Rows and columns of a tile.

    Returns:
        float32 `(..., rows / tile[0], columns / tile[1])`, rounded up; a
        single number with as many axes for the whole array.
    """
    magnitudes = np.abs(float32(x))
    if tile == (None, None):
        return np.reshape(amax(magnitudes), (1,) * magnitudes.ndim)
    for axis, size in zip((-2, -1), tile, strict=True):
        length = magnitudes.shape[axis]
        starts = np.arange(0, length, size or max(length, 1))
        magnitudes = np.maximum.reduceat(magnitudes, starts, axis=axis)
    return magnitudes


def spread(tiles: Array, tile: Tile, shape: tuple[int, ...]) -> Array:
    """Repeat one value per tile over the elements of `(..., rows, columns)`."""
    for axis, size in zip((-2, -1), tile, strict=True):
        tiles = tiles.repeat(size or shape[axis], axis=axis)
    return np.broadcast_to(tiles[..., : shape[-2], : shape[-1]], shape)
