"""Kernels in few bits with their scales, to freeze, save and export them.

All code here is NumPy, so that a kernel has the same bytes on every backend.
Only one kernel at a time is in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from keras_policy_ext import formats

__all__ = [
    "BLOCK",
    "GRANULARITIES",
    "SCALE_FORMATS",
    "WEIGHTS",
    "Axes",
    "Grid",
    "StoredKernel",
    "are_codes",
    "as_matrix",
    "clipped_scales",
    "of_matrix",
    "pack",
    "quantize",
    "rounded_scales",
    "scale_dtype",
    "scale_shape",
    "spread_blocks",
    "tile_of",
    "unpack",
]

GRANULARITIES = (
    "channel",
    "tensor",
    "block",
    "group16",
    "group32",
    "group64",
    "group128",
)
"""One scale per output channel, per kernel, per 128x128 block of it, or per 16,
32, 64 or 128 elements that a matmul sums."""

WEIGHTS = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1fn",
    *formats.INTEGERS,
)
"""The formats that a kernel can be stored in."""

E4M3 = "float8_e4m3fn"

SCALE_FORMATS = ("float32", "bfloat16", "float8_e8m0fnu", E4M3)
"""The formats that scales can have: `"float8_e8m0fnu"` has the powers of two.

In e4m3fn they are numbers of it times one power of two for the whole kernel;
see `outer_scale`.
"""

CLIPS = tuple(np.linspace(1.0, 0.5, 51))
"""The shares of an amax that `clipped_scales` tries as the largest value."""

BLOCK = 128
"""The rows and columns of a block with one scale."""

_SMALLEST_SCALE = float(np.finfo("float32").smallest_normal)
_LARGEST_SCALE = 2.0**127  # The largest power of two in float32.

LARGEST_IN_E4M3 = 256.0
"""The bound of a kernel's scales as numbers of e4m3fn."""

LEAST_IN_E4M3 = 2.0**-100
"""The least that a kernel's largest scale counts as, if scales are in e4m3fn.

The smallest scale is then a normal number too.
"""

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


class Grid(NamedTuple):
    """The grid of numbers that kernels are trained for.

    Attributes:
        weights: The format of the numbers, one of `WEIGHTS`.
        granularity: What has a scale, one of `GRANULARITIES`.
        clip: The share of an amax that becomes the largest number.
        inputs: The format to which inputs are rounded by token, or None.
        delay: The steps before kernels are rounded.
        scale_format: The format of the scales, one of `SCALE_FORMATS`.
    """

    weights: str
    granularity: str
    clip: float = 1.0
    inputs: str | None = None
    delay: int = 0
    scale_format: str = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredKernel:
    """A kernel as codes and scales, in NumPy arrays.

    Attributes:
        codes: Uint8, in the shape of the kernel; of integers the bits of int8,
            and of e2m1fn those of a number in the lower half.
        scale: Float32. Per channel or tensor it has the rank of the kernel,
            and size 1 along all axes that share a scale. Per block it is
            (rows / 128, columns / 128), rounded up, of `matrix`; per group
            (rows, columns / size).
        weights: The name of the format of the codes.
        granularity: One of `GRANULARITIES`.
        axes: The summed and the free axes of the kernel.
        scale_format: The format that holds all scales, one of
            `SCALE_FORMATS`.
    """

    codes: Array
    scale: Array
    weights: str
    granularity: str
    axes: Axes
    scale_format: str = "float32"

    @property
    def nbytes(self) -> int:
        """The size of the codes, packed, and of the scales in bytes."""
        in_a_byte = formats.get(self.weights).numbers_per_byte
        of_scales = self.scale.size * scale_dtype(self.scale_format).itemsize
        outer = 4 if self.scale_format == E4M3 else 0
        return -(-self.codes.size // in_a_byte) + of_scales + outer

    @property
    def values(self) -> Array:
        """The codes as values, in the ml_dtypes dtype of the format."""
        return self.codes.view(formats.get(self.weights).dtype)

    @property
    def scale_codes(self) -> Array:
        """The scales as the bits of their format, unsigned integers.

        In e4m3fn those of the scales divided by `outer_scale`.
        """
        dtype, scale = scale_dtype(self.scale_format), self.scale
        if self.scale_format == E4M3:
            scale = scale / self.outer_scale
        return scale.astype(dtype).view(f"uint{8 * dtype.itemsize}")

    @property
    def outer_scale(self) -> np.float32:
        """The power of two by which scales are numbers of e4m3fn."""
        return outer_scale(self.scale)

    def dequantized(self) -> Array:
        """Return the dequantized kernel in float32, in the kernel's shape.

        Each element is `float32(value) * scale`, rounded once.
        """
        values = self.values.astype("float32")
        tile = tile_of(self.granularity)
        if tile is None:
            return np.asarray(values * self.scale)
        # Reversed: `sizes` has the columns first.
        sizes = self.axes.sizes(values.shape)[::-1]
        spread = spread_blocks(self.scale, sizes, tile)
        return of_matrix(
            as_matrix(values, self.axes) * spread, values.shape, self.axes
        )

    @property
    def matrix(self) -> Array:
        """The codes as a contiguous matrix: free axes by summed axes."""
        return np.ascontiguousarray(as_matrix(self.codes, self.axes))

    @property
    def matrix_scale(self) -> Array:
        """The scales of `matrix`: (rows, 1), (1, 1), or one per tile."""
        if tile_of(self.granularity) is not None:
            return self.scale
        return as_matrix(self.scale, self.axes)


def quantize(
    kernel: Array,
    axes: Axes,
    granularity: str = "channel",
    weights: str = "float8_e4m3fn",
    scale: float | Array | None = None,
    scale_format: str = "float32",
) -> StoredKernel:
    """Quantize a float kernel to a `StoredKernel`.

    A scale is `amax / max` in float32, as in compressed-tensors, or 1 if all
    values are 0, rounded by `rounded_scales`. A value is divided by it, rounded
    to nearest, ties to even, and clipped to the range of the format.

    Args:
        kernel: The kernel, of any floating dtype of NumPy or ml_dtypes.
        axes: The summed and the free axes of the kernel.
        granularity: What shares a scale, one of `GRANULARITIES`.
        weights: The format to quantize to.
        scale: The scale of the whole kernel, such as one from training, with
            `"tensor"`; or all scales, in their shape. None to compute them.
        scale_format: The format of the scales, one of `SCALE_FORMATS`.

    Raises:
        ValueError: If an argument is wrong, or the kernel is not finite.
    """
    _check(granularity, weights, scale_format)
    kernel = np.asarray(kernel, "float32")
    if not np.all(np.isfinite(kernel)):
        raise ValueError(
            f"A kernel with NaN or infinity cannot be stored in {weights}. "
            f"Received: {int(np.sum(~np.isfinite(kernel)))} of its values. "
            "Allowed: finite values. Load the weights of an earlier "
            "checkpoint."
        )
    limit = np.float32(formats.get(weights).max)
    tile = tile_of(granularity)
    if scale is None:
        amax = _amax(kernel, axes, granularity)
        scales = _scales(amax, limit, scale_format)
    else:
        array = np.asarray(scale, "float32")
        scales = array if array.ndim else array.reshape((1,) * kernel.ndim)
        scales = rounded_scales(scales, scale_format)
    if tile is not None:
        matrix = as_matrix(kernel, axes)
        divided = matrix / spread_blocks(scales, matrix.shape, tile)
        divided = of_matrix(divided, kernel.shape, axes)
    else:
        divided = kernel / scales
    bounded = np.clip(divided, -limit, limit)
    if formats.get(weights).is_integer:
        codes = np.rint(bounded).astype("int8").view("uint8")
    else:
        codes = bounded.astype(formats.get(weights).dtype).view("uint8")
    return StoredKernel(
        codes=codes,
        scale=scales,
        weights=weights,
        granularity=granularity,
        axes=axes,
        scale_format=scale_format,
    )


def clipped_scales(
    kernel: Array,
    axes: Axes,
    granularity: str,
    weights: str,
    clips: Sequence[float] = CLIPS,
    scale_format: str = "float32",
) -> Array:
    """Return the scales, each by the clip that has the least squared error.

    A clip is the share of an amax that becomes the largest value: larger
    values are clipped, and all others are rounded to a finer grid. Of equal
    errors the first clip counts. The arguments are those of `quantize`.
    """
    _check(granularity, weights, scale_format)
    kernel = np.asarray(kernel, "float32")
    amax = _amax(kernel, axes, granularity)
    limit = np.float32(formats.get(weights).max)
    best, least = None, None
    for clip in clips:
        scale = _scales(amax * np.float32(clip), limit, scale_format)
        if len(clips) == 1:
            return scale
        stored = quantize(kernel, axes, granularity, weights, scale)
        error = np.square(stored.dequantized() - kernel, dtype="float64")
        sums = _reduced(np.sum, error, axes, granularity)
        if best is None or least is None:
            best, least = scale, sums
        best, least = np.where(sums < least, (scale, sums), (best, least))
    return np.asarray(best, "float32")


def tile_of(granularity: str) -> tuple[int, int] | None:
    """Return the rows and columns of a kernel's matrix that share a scale.

    None if its scales have the rank of the kernel: per channel or tensor.
    """
    if granularity == "block":
        return BLOCK, BLOCK
    if granularity.startswith("group"):
        return 1, int(granularity.removeprefix("group"))
    return None


def are_codes(codes: Array, weights: str) -> bool:
    """Return True if codes, uint8, are all those of finite numbers.

    Integers may also be the lowest one of their bits, which is not symmetric.
    """
    form = formats.get(weights)
    if form.is_integer:
        numbers = codes.view("int8").astype("int16")
        return bool(np.all((numbers >= -form.max - 1) & (numbers <= form.max)))
    if form.bits < 8:
        return bool(np.all(codes < 1 << form.bits))
    return bool(np.all(np.isfinite(codes.view(form.dtype).astype("float32"))))


def pack(codes: Array, weights: str) -> Array:
    """Return codes as files have them: a vector of full bytes.

    The first code is in the lowest bits. Codes of eight bits are unchanged.
    """
    count = formats.get(weights).numbers_per_byte
    if count == 1:
        return codes
    bits, flat = 8 // count, codes.reshape(-1)
    flat = np.pad(flat, (0, -flat.size % count)) & np.uint8((1 << bits) - 1)
    shifts = np.arange(count, dtype="uint8") * np.uint8(bits)
    return np.asarray(
        np.bitwise_or.reduce(flat.reshape(-1, count) << shifts, axis=1)
    )


def unpack(packed: Array, shape: tuple[int, ...], weights: str) -> Array:
    """Return the codes of which `pack` has made a vector, in their shape."""
    count = formats.get(weights).numbers_per_byte
    if count == 1:
        return packed
    bits = 8 // count
    # Shifted left and back, so that the sign of an integer fills the upper
    # bits, and zeros do in e2m1fn.
    shifts = np.arange(count - 1, -1, -1, dtype="uint8") * np.uint8(bits)
    kind = np.dtype("int8" if formats.get(weights).is_integer else "uint8")
    codes = (packed[:, None] << shifts).view(kind) >> kind.type(8 - bits)
    flat = codes.reshape(-1)[: math.prod(shape)]
    return flat.reshape(shape).view("uint8")


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


def spread_blocks(
    scale: Array,
    shape: tuple[int, ...],
    tile: tuple[int, int] = (BLOCK, BLOCK),
) -> Array:
    """Expand scales of tiles to one scale per element of a matrix."""
    rows, columns = (
        np.arange(size) // part for size, part in zip(shape, tile, strict=True)
    )
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
    tile = tile_of(granularity) or (BLOCK, BLOCK)
    return -(-rows // tile[0]), -(-columns // tile[1])


def _amax(kernel: Array, axes: Axes, granularity: str) -> Array:
    """Return the amaxes of a kernel, in the shape of its scales."""
    return _reduced(np.max, np.abs(kernel), axes, granularity)


def _reduced(
    reduce: Callable[..., Any], values: Array, axes: Axes, granularity: str
) -> Array:
    """Reduce non-negative values of a kernel to one for each scale."""
    tile = tile_of(granularity)
    if tile is None:
        axis = None if granularity == "tensor" else axes.summed
        return np.asarray(reduce(values, axis=axis, keepdims=True, initial=0.0))
    matrix = as_matrix(values, axes)
    sizes = zip(matrix.shape, tile, strict=True)
    padded = np.pad(matrix, [(0, -size % part) for size, part in sizes])
    rows, columns = (
        size // part for size, part in zip(padded.shape, tile, strict=True)
    )
    blocks = padded.reshape(rows, tile[0], columns, tile[1])
    return np.asarray(reduce(blocks, axis=(1, 3), initial=0.0))


def _scales(amax: Array, limit: np.float32, scale_format: str) -> Array:
    """Return `amax / limit`, at least a normal number, rounded to a format."""
    scales = np.maximum(amax / limit, np.float32(_SMALLEST_SCALE))
    scales = np.where(amax > 0, scales, scale_of_zeros(scale_format))
    return rounded_scales(scales.astype("float32"), scale_format)


def scale_of_zeros(scale_format: str) -> float:
    """Return the scale, before it is rounded, of values that are all 0.

    It is 1, and in e4m3fn so small that it is not the largest of a kernel.
    """
    return _SMALLEST_SCALE if scale_format == E4M3 else 1.0


def rounded_scales(scales: Array, scale_format: str) -> Array:
    """Return positive float32 scales, rounded to a format, in float32.

    In bfloat16 and e4m3fn they are rounded to nearest, ties to even; in e4m3fn
    to numbers above 0, times `outer_scale`. To powers of two they are rounded
    up, so that no value is clipped.
    """
    if scale_format == "float32":
        return scales
    bounded = np.minimum(scales, np.float32(_LARGEST_SCALE))
    if scale_format == "bfloat16":
        return bounded.astype(ml_dtypes.bfloat16).astype("float32")
    if scale_format == E4M3:
        outer = outer_scale(bounded)
        least = np.float32(formats.get(E4M3).smallest_subnormal)
        numbers = np.maximum(bounded / outer, least)
        return numbers.astype(ml_dtypes.float8_e4m3fn).astype("float32") * outer
    mantissa, exponent = np.frexp(bounded)  # A power of two has 0.5.
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5))


def outer_scale(scales: Array) -> np.float32:
    """Return the power of two by which scales of a kernel are e4m3fn numbers.

    The largest scale divided by it is from 128 to 256. Rounded scales, times
    this power, are exact in float32 and bfloat16, and give the same power
    again, so that nothing else is stored in a layer. NVIDIA's tools take
    `amax / (6 * 448)` in its place; readers of NVFP4 accept any number.
    """
    largest = np.max(scales, initial=LEAST_IN_E4M3)
    power = rounded_scales(np.asarray(largest, "float32"), "float8_e8m0fnu")
    return np.float32(power / np.float32(LARGEST_IN_E4M3))


def scale_dtype(scale_format: str) -> np.dtype[Any]:
    """Return the dtype of NumPy or ml_dtypes that holds scales of a format."""
    return np.dtype(getattr(ml_dtypes, scale_format, None) or scale_format)


def _check(granularity: str, weights: str, scale_format: str) -> None:
    """Raise if the granularity or a format is not allowed."""
    for name, value, allowed in (
        ("granularity", granularity, GRANULARITIES),
        ("weights", weights, WEIGHTS),
        ("scale_format", scale_format, SCALE_FORMATS),
    ):
        if value not in allowed:
            raise ValueError(
                f"`{name}` is not a way to store a kernel. Received: "
                f"{name}={value!r}. Allowed: {', '.join(map(repr, allowed))}. "
                "Pass one of them."
            )
