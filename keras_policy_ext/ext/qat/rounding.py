"""Round operands to a grid, with gradients that pass straight through."""

from __future__ import annotations

import math

import keras
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import Contraction
from keras_policy_ext.contractions.frozen import rounded_by
from keras_policy_ext.layers.operands import register_rounding
from keras_policy_ext.numerics import casting, scaling, tiles
from keras_policy_ext.recipes import Tile
from keras_policy_ext.stored_kernels import Axes, Grid, scale_of_zeros, tile_of


def on_grid(
    grid: Grid,
    contraction: Contraction,
    inputs: Tensor,
    kernel: Tensor,
    axes: Axes,
    state: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:
    """Return the operands of a contraction on a grid; see `Rounding`."""
    fixed = ops.stop_gradient(kernel)
    rounded, passes = rounded_kernel(fixed, axes, grid)
    if grid.delay:
        # The count of steps is the last column; see `Counting`.
        counted = state[0][0, -1]
        begun = ops.stop_gradient(counted) >= float(grid.delay)
        rounded = ops.where(begun, rounded, ops.cast(fixed, "float32"))
        if passes is not None:
            passes = ops.logical_or(passes, ops.logical_not(begun))
    kernel = straight_through(kernel, rounded, passes)
    if grid.inputs is not None:
        given = ops.stop_gradient(inputs)
        rounded = rounded_by(contraction, given, grid.inputs)
        inputs = straight_through(inputs, rounded)
    return inputs, kernel


def straight_through(
    x: Tensor, rounded: Tensor, passes: Tensor | None = None
) -> Tensor:
    """Return `rounded`, in the dtype of `x`, with the gradient of `x`.

    Args:
        x: A tensor.
        rounded: What it was rounded to, without a gradient.
        passes: Where the gradient is that of `x`; elsewhere it is 0. None for
            everywhere.
    """
    zero = x - ops.stop_gradient(x)
    if passes is not None:
        zero = ops.where(passes, zero, 0.0)
    dtype = keras.backend.standardize_dtype(x.dtype)
    # Exact, while `x + (rounded - x)` would be rounded twice.
    return ops.cast(rounded, dtype) + zero


def rounded_kernel(
    kernel: Tensor, axes: Axes, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """Return a kernel on a grid, float32, and where it was not clipped.

    The numbers are those that `stored_kernels.quantize` stores, to the bit. The
    second is None if nothing can be clipped.
    """
    x = ops.cast(kernel, "float32")
    tile = tile_of(grid.granularity)
    if tile is None:
        axis = None if grid.granularity == "tensor" else axes.summed
        amax = scaling.amax(x, axis=axis, keepdims=True)
        return _rounded(x, _scale(amax, grid), grid)
    # A matrix whose columns are free, as the kernels of most layers are.
    shape, order = tuple(x.shape), axes.summed + axes.free
    moved = order != tuple(range(len(shape)))
    x = ops.transpose(x, order) if moved else x
    in_order, (columns, _) = tuple(x.shape), axes.sizes(shape)
    free, summed = tile
    matrix = ops.reshape(x, (1, columns, math.prod(shape) // columns))
    turned = Tile(summed, free)
    scale = _scale(tiles.tile_amax(matrix, turned), grid)
    both = _rounded(matrix, tiles.spread(scale, turned, matrix), grid)

    def back(y: Tensor | None) -> Tensor | None:
        """Return a matrix in the axes of the kernel."""
        if y is None:
            return None
        y = ops.reshape(y, in_order)
        places = sorted(range(len(order)), key=order.__getitem__)
        return ops.transpose(y, places) if moved else y

    values, passes = map(back, both)
    return values, passes


def _scale(amax: Tensor, grid: Grid) -> Tensor:
    """Return the scales of amaxes; NaN for one that is not finite."""
    mark = amax * 0.0 + 1.0
    if grid.clip < 1.0:
        amax = amax * grid.clip
    limit = formats.get(grid.weights).max
    of_zeros = scale_of_zeros(grid.scale_format)
    scale = scaling.scale_for_limit(amax, limit, previous=of_zeros)
    return scaling.round_scale(scale, grid.scale_format) * mark


def _rounded(
    x: Tensor, scale: Tensor, grid: Grid
) -> tuple[Tensor, Tensor | None]:
    """Return values on the grid times their scales; and what passes."""
    fmt = formats.get(grid.weights)
    if fmt.is_integer:
        values = casting.round_to_integers(x, scale, grid.weights)
    else:
        values = casting.quantize_float32(x, scale, grid.weights)
    passes = None
    if grid.clip < 1.0:
        # Half a step beyond the largest integer still rounds to it.
        limit = fmt.max + (0.5 if fmt.is_integer else 0.0)
        passes = ops.abs(x) <= scale * limit
    return values * scale, passes


register_rounding(on_grid)
