"""How one operand of one matmul is quantized, as data."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from keras_policy_ext import formats

OPERANDS = ("inputs", "kernel", "outputs_grad")

MATMULS = {
    "forward": ("inputs", "kernel"),
    "inputs_grad": ("outputs_grad", "kernel"),
    "kernel_grad": ("inputs", "outputs_grad"),
}
"""The three matmuls of a contraction, and the two operands of each."""


@functools.cache
def matmuls_of(operand: str) -> tuple[str, str]:
    """Return the names of the two matmuls that read an operand, in order."""
    first, second = (m for m, two in MATMULS.items() if operand in two)
    return first, second


class Tile(NamedTuple):
    """The size of the part of a matrix whose elements share one scale.

    `Tile()` is the whole tensor; every other tile is within one matrix.

    Attributes:
        free: Its size along the axis that the result keeps; None for all.
        contracted: Its size along the axis that is summed; None for all of it.
        each_matrix: Whether a tile without sizes is one matrix of the batch,
            not the whole tensor.
    """

    free: int | None = None
    contracted: int | None = None
    each_matrix: bool = False

    @property
    def transposed(self) -> Tile:
        """The tile with both sizes exchanged, for a transposed matrix."""
        return Tile(self.contracted, self.free, self.each_matrix)

    @property
    def is_whole(self) -> bool:
        """True if all elements of the tensor share one scale."""
        return self == Tile()


WHOLE = Tile()
"""The tile of a tensor with one scale."""

EACH_MATRIX = Tile(each_matrix=True)
"""The tile of a batch of matrices with one scale each."""

SCALE_FORMATS = ("float32", "float8_e8m0fnu", "float8_e4m3fn")
SCALE_ROUNDINGS = ("nearest", "up", "floor")
ROUNDINGS = ("nearest", "stochastic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """The format, tile and scales of one operand in one matmul.

    Attributes:
        format: The ml_dtypes name of the format of the values.
        tile: The part of the matrix that shares one scale.
        scale_format: `"float32"`, `"float8_e8m0fnu"` (powers of two), or
            `"float8_e4m3fn"`, which adds a float32 scale per tensor.
        scale_rounding: `"nearest"` in the format of the scale; or to powers of
            two, `"up"` or `"floor"` (OCP MX 1.0: the exponent of the amax
            minus that of the format's largest value).
        rounding: How values are rounded: `"nearest"` or `"stochastic"`.
        hadamard: The size of a Hadamard transform along the contracted axis, a
            multiple of `tile.contracted`; None for no transform. Both operands
            of a matmul have the same size, so that the transforms cancel.
        four_over_six: Whether the amax of a tile becomes 4 or 6, the largest
            two values of e2m1fn, by the smaller error; otherwise always 6.
        constant_scale: The scale of every tile, a positive number, for values
            that were brought into the range of the format before; None to
            compute scales from amaxes.

    Raises:
        ValueError: If an attribute is not allowed, or two contradict.
    """

    format: str
    tile: Tile = WHOLE
    scale_format: str = "float32"
    scale_rounding: str = "nearest"
    rounding: str = "nearest"
    hadamard: int | None = None
    four_over_six: bool = False
    constant_scale: float | None = None

    def __post_init__(self) -> None:
        """Raise if an attribute is not allowed."""
        formats.get(self.format)  # Raises for others.
        for name, allowed in self._wrong_attributes():
            raise ValueError(
                f"`{name}` of this quantization is not valid. Received: "
                f"{name}={getattr(self, name)!r} in {self!r}. Allowed: "
                f"{allowed}. Change `{name}` in what `Recipe.quantization` "
                "returns."
            )

    def _wrong_attributes(self) -> Iterator[tuple[str, str]]:
        """Yield the names of attributes that are wrong, and what is allowed."""
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                yield name, repr(allowed)[1:-1]  # Without the brackets.
        sizes = [n for n in self.tile[:2] if n is not None]
        if any(size < 1 for size in sizes):
            yield "tile", "sizes >= 1, or None"
        if sizes and self.tile.each_matrix:
            yield "tile", "sizes, or each_matrix=True without them"
        if self.scale_format == "float8_e8m0fnu" and self._to_nearest:
            yield "scale_rounding", "'up' or 'floor' for scales in e8m0"
        if self.tile.is_whole and self.scale_format != "float32":
            yield (
                "scale_format",
                "'float32' if one scale covers the whole tensor; any if "
                "`tile` is smaller",
            )
        if self.has_tensor_scale and not self._to_nearest:
            yield "scale_rounding", "'nearest' for scales in e4m3"
        of_four_bits = self.format == "float4_e2m1fn" and self.has_tensor_scale
        if self.four_over_six and not of_four_bits:
            yield (
                "four_over_six",
                "False; True for values in float4_e2m1fn with scales in "
                "float8_e4m3fn",
            )
        if self.hadamard and self.hadamard % (self.tile.contracted or 1):
            yield "hadamard", "a multiple of tile.contracted"
        scale = self.constant_scale
        if scale is None:
            return
        if self.has_tensor_scale:
            yield "constant_scale", "None for scales in e4m3"
        if not 2.0**-126 <= scale <= 2.0**127:
            yield "constant_scale", "2**-126 to 2**127, or None"
        mantissa, _ = math.frexp(scale)  # 0.5 for a power of two.
        if not self._to_nearest and mantissa != 0.5:
            yield (
                "constant_scale",
                f"a power of two with {self.scale_rounding!r}",
            )

    @functools.cached_property
    def transposed(self) -> Quantization:
        """A copy with the tile transposed, for the transposed matrix."""
        return dataclasses.replace(self, tile=self.tile.transposed)

    @functools.cached_property
    def tensorwise(self) -> Quantization:
        """The most similar quantization that has one scale per tensor.

        Four-bit formats need a scale per few elements, so they become e4m3fn.
        """
        if self.keeps_axes:
            return self
        has_four_bits = formats.get(self.format).bits < 8
        return Quantization(
            format=formats.ALIASES["e4m3"] if has_four_bits else self.format,
            scale_rounding="nearest" if self._to_nearest else "up",
            constant_scale=self.constant_scale,
        )

    @functools.cached_property
    def of_each_matrix(self) -> Quantization:
        """The same with a scale per matrix where there is one per tensor."""
        if not self.has_one_scale or self.constant_scale is not None:
            return self
        return dataclasses.replace(self, tile=EACH_MATRIX)

    @functools.cached_property
    def has_one_scale(self) -> bool:
        """True if all elements of the tensor share one scale."""
        return self.tile.is_whole

    @functools.cached_property
    def keeps_axes(self) -> bool:
        """True if the operand can be quantized without becoming a matrix.

        There is one scale, and no code depends on the position of its element.
        """
        by_position = self.hadamard is not None or self.rounding == "stochastic"
        return self.has_one_scale and not by_position

    @functools.cached_property
    def has_tensor_scale(self) -> bool:
        """True if there is a float32 scale per tensor besides tile scales."""
        return self.scale_format == "float8_e4m3fn"

    @functools.cached_property
    def is_extended(self) -> bool:
        """True if an extension computes it: `numerics.quantized.Extended`."""
        at_random = self.rounding == "stochastic"
        return self.has_tensor_scale or self.hadamard is not None or at_random

    @functools.cached_property
    def scale_leaves_sum(self) -> bool:
        """True if no scale varies along the sum: it can multiply the output."""
        return self.tile.contracted is None

    @functools.cached_property
    def exact_in_bfloat16(self) -> bool:
        """True if bfloat16 holds exactly what the matmul multiplies.

        That is the values, or the values times scales that vary along the sum.
        The product is exact with scales in few bits, as powers of two are.
        """
        is_narrow = self.scale_format != "float32" or not self._to_nearest
        return self.scale_leaves_sum or is_narrow

    @property
    def _to_nearest(self) -> bool:
        return self.scale_rounding == "nearest"  # Not to a power of two.


_WORDS = {
    "scale_format": SCALE_FORMATS,
    "scale_rounding": SCALE_ROUNDINGS,
    "rounding": ROUNDINGS,
}


def read_transposed(
    first: Quantization | None, second: Quantization | None
) -> bool:
    """Return True if the second matmul can read the first one's transpose.

    Otherwise the operand is quantized twice, once for each matmul.
    """
    # A Hadamard transform is along the axis that one of the matmuls sums.
    if first is None or second is None or first.hadamard is not None:
        return False
    return first.transposed == second
