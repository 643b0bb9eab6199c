"""Float8 kernels with their scales, on the host, to freeze, save and export.

All code here is NumPy, so that a kernel has the same bytes on every backend.
Only one kernel at a time is in float32.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from keras_policy_ext import formats

__all__ = [
    "BLOCK",
    "GRANULARITIES",
    "WEIGHTS",
    "Axes",
    "StoredKernel",
    "as_matrix",
    "of_matrix",
    "quantize",
    "scale_shape",
    "spread_blocks",
]

GRANULARITIES = ("channel", "tensor", "block")
"""One scale per output channel, per kernel, or per 128x128 block of it."""

WEIGHTS = ("float8_e4m3fn", "float8_e5m2")
"""The formats that a kernel can be stored in."""

BLOCK = 128
"""The rows and columns of a block with one scale."""

_SMALLEST_SCALE = float(np.finfo("float32").smallest_normal)

Array = np.ndarray[Any, Any]


class Axes(NamedTuple):
    """The axes of a kernel: those that a matmul sums over, and the others.

    Attributes:
        summed: The summed axes, in their order in the columns of `matrix`.
        free: All other axes, in the order in which they form its rows.
    """

    summed: tuple[int, ...]
    free: tuple[int, ...]

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of columns, then of rows, of a kernel's matrix."""
        columns = math.prod([shape[axis] for axis in self.summed])
        return columns, math.prod([shape[axis] for axis in self.free])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredKernel:
    """A kernel as float8 codes and scales, in NumPy arrays.

    Attributes:
        codes: Uint8, in the shape of the kernel.
        scale: Float32. Per channel or tensor it has the rank of the kernel,
            and size 1 along all axes that share a scale. Per block it is
            (rows / 128, columns / 128), rounded up, of `matrix`.
        weights: The ml_dtypes name of the format of the codes.
        granularity: `"channel"`, `"tensor"` or `"block"`.
        axes: The summed and the free axes of the kernel.
    """

    codes: Array
    scale: Array
    weights: str
    granularity: str
    axes: Axes

    @property
    def nbytes(self) -> int:
        """The size of the codes and scales in bytes."""
        return self.codes.nbytes + self.scale.nbytes

    @property
    def values(self) -> Array:
        """The codes as float8 values, in the ml_dtypes dtype of the format."""
        return self.codes.view(formats.get(self.weights).dtype)

    def dequantized(self) -> Array:
        """Return the dequantized kernel in float32, in the kernel's shape.

        Each element is `float32(value) * scale`, rounded once.
        """
        values = self.values.astype("float32")
        if self.granularity != "block":
            return np.asarray(values * self.scale)
        # Reversed: `sizes` has the columns first.
        spread = spread_blocks(self.scale, self.axes.sizes(values.shape)[::-1])
        return of_matrix(
            as_matrix(values, self.axes) * spread, values.shape, self.axes
        )

    @property
    def matrix(self) -> Array:
        """The codes as a contiguous matrix: free axes by summed axes."""
        return np.ascontiguousarray(as_matrix(self.codes, self.axes))

    @property
    def matrix_scale(self) -> Array:
        """The scales of `matrix`: (rows, 1), (1, 1), or one per block."""
        if self.granularity == "block":
            return self.scale
        return as_matrix(self.scale, self.axes)


def quantize(
    kernel: Array,
    axes: Axes,
    granularity: str = "channel",
    weights: str = "float8_e4m3fn",
    scale: float | Array | None = None,
) -> StoredKernel:
    """Quantize a float kernel to a `StoredKernel`.

    A scale is `amax / max` in float32, as in compressed-tensors, or 1 if all
    values are 0. A value is divided by it, rounded to nearest, ties to even,
    and clipped to the range of the format.

    Args:
        kernel: The kernel, of any floating dtype of NumPy or ml_dtypes.
        axes: The summed and the free axes of the kernel.
        granularity: What shares a scale: `"channel"`, `"tensor"`, `"block"`.
        weights: The format to quantize to.
        scale: The scale of the whole kernel, such as one from training, with
            `"tensor"`; or all scales, in their shape. None to compute them.

    Raises:
        ValueError: If an argument is wrong, or the kernel is not finite.
    """
    _check(granularity, weights)
    kernel = np.asarray(kernel, "float32")
    if not np.all(np.isfinite(kernel)):
        raise ValueError(
            "A kernel with NaN or infinity cannot be stored in float8. "
            f"Received: {int(np.sum(~np.isfinite(kernel)))} of its values. "
            "Allowed: finite values. Load the weights of an earlier "
            "checkpoint."
        )
    limit = np.float32(formats.get(weights).max)
    if scale is None:
        scales = _scales(_amax(kernel, axes, granularity), limit)
    else:
        array = np.asarray(scale, "float32")
        scales = array if array.ndim else array.reshape((1,) * kernel.ndim)
    if granularity == "block":
        matrix = as_matrix(kernel, axes)
        divided = matrix / spread_blocks(scales, matrix.shape)
        divided = of_matrix(divided, kernel.shape, axes)
    else:
        divided = kernel / scales
    bounded = np.clip(divided, -limit, limit)
    codes = bounded.astype(formats.get(weights).dtype).view("uint8")
    return StoredKernel(
        codes=codes,
        scale=scales,
        weights=weights,
        granularity=granularity,
        axes=axes,
    )


def as_matrix(kernel: Array, axes: Axes) -> Array:
    """Reshape a kernel, or its scales, to a matrix: free by summed axes."""
    return kernel.transpose(axes.free + axes.summed).reshape(
        math.prod(kernel.shape[axis] for axis in axes.free), -1
    )


def of_matrix(matrix: Array, shape: tuple[int, ...], axes: Axes) -> Array:
    """Reshape a matrix that `as_matrix` returned to the kernel's shape."""
    order = axes.free + axes.summed
    turned = matrix.reshape([shape[axis] for axis in order])
    return np.ascontiguousarray(turned.transpose(np.argsort(order)))


def spread_blocks(scale: Array, shape: tuple[int, ...]) -> Array:
    """Expand block scales to one scale per element of a matrix."""
    rows, columns = (np.arange(size) // BLOCK for size in shape)
    return np.asarray(scale[rows[:, None], columns[None, :]])


def scale_shape(
    shape: tuple[int, ...], axes: Axes, granularity: str
) -> tuple[int, ...]:
    """Return the shape of the scales of a stored kernel of this shape."""
    if granularity == "tensor":
        return (1,) * len(shape)
    if granularity == "channel":
        return tuple(
            1 if axis in axes.summed else size
            for axis, size in enumerate(shape)
        )
    columns, rows = axes.sizes(shape)
    return -(-rows // BLOCK), -(-columns // BLOCK)


def _amax(kernel: Array, axes: Axes, granularity: str) -> Array:
    """Return the amaxes of a kernel, in the shape of its scales."""
    magnitude = np.abs(kernel)
    if granularity == "tensor":
        return np.asarray(magnitude.max(keepdims=True, initial=0.0))
    if granularity == "channel":
        return np.asarray(
            magnitude.max(axis=axes.summed, keepdims=True, initial=0.0)
        )
    matrix = as_matrix(magnitude, axes)
    around = [(0, -size % BLOCK) for size in matrix.shape]
    padded = np.pad(matrix, around)
    rows, columns = (size // BLOCK for size in padded.shape)
    blocks = padded.reshape(rows, BLOCK, columns, BLOCK)
    return np.asarray(blocks.max(axis=(1, 3), initial=0.0))


def _scales(amax: Array, limit: np.float32) -> Array:
    """Return `amax / limit`, at least a normal number; 1 for 0."""
    scales = np.maximum(amax / limit, np.float32(_SMALLEST_SCALE))
    return np.where(amax > 0, scales, 1).astype("float32")


def _check(granularity: str, weights: str) -> None:
    """Raise if the granularity or the format is not allowed."""
    for name, value, allowed in (
        ("granularity", granularity, GRANULARITIES),
        ("weights", weights, WEIGHTS),
    ):
        if value not in allowed:
            raise ValueError(
                f"`{name}` is not a way to store a kernel. Received: "
                f"{name}={value!r}. Allowed: {', '.join(map(repr, allowed))}. "
                "Pass one of them."
            )
