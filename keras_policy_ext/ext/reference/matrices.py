"""Quantize operands to the matrices that matmuls read, in NumPy."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from keras_policy_ext import formats
from keras_policy_ext.ext.reference.casting import (
    cast,
    float32,
    random_bits,
    stochastic_cast,
)
from keras_policy_ext.ext.reference.hadamard_transform import SIZE, hadamard
from keras_policy_ext.ext.reference.scales import (
    BLOCK_SCALE,
    E8M0,
    Tile,
    amax,
    e8m0_floor,
    e8m0_up,
    floor_scale,
    four_over_six_scales,
    multiplier,
    scale_from_amax,
    scale_of_multiplier,
    spread,
    tensor_scale,
    tile_amax,
    two_level_scales,
)

Array = np.ndarray[Any, Any]


class Asked(Protocol):
    """The quantization that is asked for, as in `recipes.Quantization`."""

    @property
    def format(self) -> str:
        """The ml_dtypes name of the format of the values."""

    @property
    def tile(self) -> Tile:
        """The (rows, columns) of a tile with one scale; columns are summed."""

    @property
    def scale_format(self) -> str:
        """The scale format: float32, float8_e8m0fnu or float8_e4m3fn."""

    @property
    def scale_rounding(self) -> str:
        """The rounding of scales: to nearest, or to a power of two.

        `"nearest"`, or to powers of two `"up"` or `"floor"`.
        """

    @property
    def rounding(self) -> str:
        """The rounding of values: `"nearest"` or `"stochastic"`."""

    @property
    def hadamard(self) -> int | None:
        """The size of a Hadamard transform along the columns, or None."""

    @property
    def four_over_six(self) -> bool:
        """True if the amax of a tile becomes 4 or 6, by the smaller error."""

    @property
    def constant_scale(self) -> float | None:
        """The scale of every tile; None to compute scales from amaxes."""

    @property
    def of_each_matrix(self) -> "Asked":
        """The same with a scale per matrix where there is one per tensor."""

    @property
    def transposed(self) -> "Asked":
        """The same quantization for the transposed matrix."""


class Quantized(NamedTuple):
    """The quantized matrices of an operand, as one matmul reads them.

    Attributes:
        codes: `(batch, rows, columns)` in the narrow format. The columns are
            summed; a Hadamard transform lengthens them to a multiple of 16.
        scales: One per tile, in the format of scales: `(batch, rows /
            tile[0], columns / tile[1])`, rounded up; `(1, 1, 1)` for one
            scale of the whole tensor, `(batch, 1, 1)` for one of each matrix.
        tensor_scale: float32 scalar that multiplies e4m3fn scales; None for
            other scales.
        tile: Rows and columns of a tile; None is all of an axis.
        finite: Whether the amax of each tile is finite, of scales' shape.
        nan: Where x is NaN, of codes' shape: e2m1fn has no code for it.
    """

    codes: Array
    scales: Array
    tensor_scale: np.float32 | None
    tile: Tile
    finite: Array
    nan: Array

    @property
    def transposed(self) -> "Quantized":
        """The transposed matrices, for the matmul that sums the other axis."""
        return self._replace(
            codes=self.codes.swapaxes(1, 2),
            scales=self.scales.swapaxes(1, 2),
            tile=(self.tile[1], self.tile[0], *self.tile[2:]),
            finite=self.finite.swapaxes(1, 2),
            nan=self.nan.swapaxes(1, 2),
        )

    @property
    def marked(self) -> "Quantized":
        """A copy whose scale is NaN for each tile with a non-finite amax."""
        dtype = self.scales.dtype
        marked = np.where(self.finite, float32(self.scales), np.nan)
        return self._replace(scales=marked.astype(dtype))

    def dequantize(self) -> Array:
        """Return the dequantized values as float64 `(batch, rows, columns)`."""
        scales = self.scales.astype(np.float64)
        values = self.codes.astype(np.float64)
        values = np.where(self.nan, np.nan, values)
        values = values * spread(scales, self.tile, values.shape)
        if self.tensor_scale is not None:
            values = values * np.float64(self.tensor_scale)
        return values


def quantize_matrices(
    x: ArrayLike, asked: Asked, key: int | None = None
) -> Quantized:
    """Quantize matrices `(batch, rows, columns)` as a matmul reads them.

    If the amax of a tile is not finite, its scale is that of an amax of 0, and
    its values saturate. Matmuls of gradients read `Quantized.marked` instead.

    Args:
        x: `(batch, rows, columns)`, where the columns are summed. A tile is
            within one matrix; `(None, None)` is the whole tensor.
        asked: A `recipes.Quantization`.
        key: The key of the random bits for stochastic rounding: an int32 (see
            `matmul_key`).

    Returns:
        A `Quantized`.

    Raises:
        ValueError: If the transform has another size than 16, or stochastic
            rounding has no key.
    """
    _check(asked, key)
    values = hadamard(x) if asked.hadamard else float32(x)
    found = tile_amax(values, asked.tile)
    finite = np.isfinite(found)
    usable = np.where(finite, found, np.float32(0))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled, scales, above = _scaled(values, usable, finite, asked)
    if asked.rounding == "stochastic":
        bits = random_bits(values.shape, key or 0)
        codes = stochastic_cast(scaled, bits, asked.format)
    else:
        codes = cast(scaled, asked.format)
    return Quantized(codes, scales, above, asked.tile, finite, np.isnan(values))


def _scaled(
    x: Array, usable: Array, finite: Array, asked: Asked
) -> tuple[Array, Array, np.float32 | None]:
    """Return (x divided by the scales, scales, tensor scale or None)."""
    tile, shape = asked.tile, x.shape
    if asked.constant_scale is not None:
        constant = np.float32(asked.constant_scale)
        scales = np.full_like(usable, constant)
        if asked.scale_format == E8M0:
            scales = scales.astype(formats.get(E8M0).dtype)
        return x / constant, scales, None
    if asked.scale_format == E8M0:
        rules = {"up": e8m0_up, "floor": e8m0_floor}
        codes = rules[asked.scale_rounding](usable, asked.format)
        factor = multiplier(codes)
        scales = codes.view(formats.get(E8M0).dtype)
        return x * spread(factor, tile, shape), scales, None
    if asked.scale_format == BLOCK_SCALE:
        whole = amax(usable) if finite.all() else np.float32(0)
        if asked.four_over_six:
            scales, factor = four_over_six_scales(x, usable, whole, tile)
        else:
            scales, factor = two_level_scales(usable, whole, asked.format)
        above = tensor_scale(whole, asked.format, asked.four_over_six)
        return x * spread(factor, tile, shape), scales, above
    scales = _float32_scales(usable, asked)
    return x / spread(scales, tile, shape), scales, None


def _float32_scales(usable: Array, asked: Asked) -> Array:
    if asked.scale_rounding == "up":
        return scale_from_amax(usable, asked.format, power_of_two=True)
    if asked.scale_rounding == "floor":
        return floor_scale(usable, asked.format)
    in_blocks = None not in asked.tile[:2]
    rule = scale_of_multiplier if in_blocks else scale_from_amax
    return rule(usable, asked.format)


def _check(asked: Asked, key: int | None) -> None:
    if asked.hadamard not in (None, SIZE):
        raise ValueError(
            "`hadamard` is not the size that the transform has. Received: "
            f"hadamard={asked.hadamard!r}. Allowed: {SIZE}, or None. Change "
            "`quantization` of the recipe."
        )
    if asked.rounding == "stochastic" and key is None:
        raise ValueError(
            "`key` is missing, which values that are rounded at random need. "
            "Received: key=None. Allowed: an int32. Pass the key of the step."
        )
