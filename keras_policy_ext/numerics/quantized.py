"""The quantized tensor: values, and the scales that belong to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext.numerics import casting, scaling, tiles
from keras_policy_ext.recipes import WHOLE, Quantization, Tile

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Quantized:
    """`values * scale` approximates a matrix, the contracted axis last.

    Operands of convolutions keep their own axes; one scale is that of all.

    Attributes:
        values: (b, m, k), numbers of a float8 format: in that dtype where
            the matmul reads float8 itself, in float32 where it is emulated.
        scale: Float32 (b, m', k'), one for each tile; (1, 1, 1) for a whole
            tensor.
        quantization: What was asked for; None for values that stand for
            themselves, with a scale of 1.
    """

    values: Tensor
    scale: Tensor
    quantization: Quantization | None

    @property
    def tile(self) -> Tile:
        """How far one scale reaches."""
        return WHOLE if self.quantization is None else self.quantization.tile

    @property
    def transposed(self) -> Quantized:
        """The same for a matmul that sums over the other axis."""
        if self.tile.is_whole:
            return Quantized(
                _swapped(self.values), self.scale, self.quantization
            )
        return Quantized(
            _swapped(self.values),
            _swapped(self.scale),
            self.quantization and self.quantization.transposed,
        )

    @property
    def spread_scale(self) -> Tensor:
        """The scale of each value, in a shape that goes with the values."""
        return tiles.spread(self.scale, self.tile, self.values)

    def narrowed(self, dtype: str) -> Quantized:
        """The same, held in a narrow dtype, of which values are numbers.

        What is kept for a backward pass. What is not quantized stays as it
        is, and so is what is narrow.
        """
        if self.quantization is None or not is_wide(self.values):
            return self
        if dtype == "float32":
            return self
        return self.with_values(ops.cast(self.values, dtype))

    def dequantize(self, dtype: str = "float32") -> Tensor:
        """What the values stand for.

        Args:
            dtype: Of the result.

        Returns:
            Tensor of the shape of the values.
        """
        return casting.dequantize(self.values, self.spread_scale, dtype)

    def marked(self, amax: Tensor) -> Quantized:
        """With a scale of NaN for each tile whose amax is not finite.

        A saturating cast turns an infinite operand into a finite one. A
        recipe with state carries the infinity out in its observation; one
        without has only the gradients to tell a loss scaler to skip the step.
        """
        mark = amax * 0.0 + 1.0
        return Quantized(self.values, self.scale * mark, self.quantization)

    def with_values(self, values: Tensor) -> Quantized:
        """The same scale of other values."""
        return Quantized(values, self.scale, self.quantization)

    def leaves(self) -> list[Tensor]:
        """The tensors, in a fixed order."""
        return [self.values, self.scale]


def is_wide(values: Tensor) -> bool:
    """Whether values are held in float32."""
    return bool(keras.backend.standardize_dtype(values.dtype) == "float32")


def unquantized(x: Tensor) -> Quantized:
    """An operand that is read as it is."""
    return Quantized(x, ops.ones((1, 1, 1), "float32"), None)


def scale_of(amax: Tensor, quantization: Quantization) -> Tensor:
    """The scales of tiles with these amaxes; 1 where an amax says nothing.

    Args:
        amax: Float32 tensor of any shape, not negative.
        quantization: What is asked for.
    """
    limit = formats.get(quantization.format).max
    up = quantization.scale_rounding == "up"
    return scaling.scale_for_limit(amax, limit, power_of_two=up)


def quantize(
    x: Tensor,
    quantization: Quantization,
    scale: Tensor | None = None,
    cast: Any = casting.quantize_float32,
    whole_amax: Any = scaling.amax,
) -> tuple[Quantized, Tensor | None]:
    """Quantize an operand.

    Args:
        x: (b, m, k), of any real dtype, read as float32; any shape for one
            scale of all.
        quantization: What becomes of it.
        scale: Float32 scale of the tensor; None to find those of the tiles.
        cast: Takes `x`, a scale for each number, and the name of the format;
            returns the numbers as the matmul is going to read them.
        whole_amax: Finds the amax of a tensor that has one scale.

    Returns:
        The quantized tensor, and the amaxes of its tiles where they were
        found here.
    """
    amax = None
    if scale is None:
        if quantization.tile.is_whole:
            amax = whole_amax(x)
        else:
            amax = tiles.tile_amax(x, quantization.tile)
        scale = scale_of(amax, quantization)
    if quantization.tile.is_whole:
        values = cast(x, scale, quantization.format)
        return Quantized(values, scale[None, None, None], quantization), amax
    spread = tiles.spread(scale, quantization.tile, x)
    values = cast(x, spread, quantization.format)
    return Quantized(values, scale, quantization), amax


def _swapped(matrix: Tensor) -> Tensor:
    """(b, m, k) to (b, k, m)."""
    if keras.backend.backend() == "torch":
        # A tenth of the time that the operation takes in an eager call.
        return matrix.mT
    if matrix.shape[0] == 1:
        # With the first axis between them XLA does not take a transpose into
        # a matmul: four copies in a step of an MLP (JAX 0.10, CPU).
        single = ops.transpose(ops.squeeze(matrix, 0))
        return ops.expand_dims(single, 0)
    return ops.swapaxes(matrix, 1, 2)
