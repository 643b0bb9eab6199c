"""A quantized operand: its values, scales and quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import keras
from keras import ops

from keras_policy_ext import _extensions
from keras_policy_ext._types import Size, Tensor
from keras_policy_ext.numerics import casting, scaling, tiles
from keras_policy_ext.numerics.casting import Cast, Codec
from keras_policy_ext.numerics.tiles import Scales, scales_of
from keras_policy_ext.recipes import WHOLE, Quantization, Tile


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix: narrow values, and scales to multiply them by.

    An operand with one scale keeps its own axes until a matmul reads it;
    operands of convolutions always keep theirs. So the tensor that is
    transposed is narrow, and XLA has no reshape to move past the operations of
    a cast. If a constant is transposed before it is quantized, XLA for a CPU
    computes wrong values (JAX 0.10).

    Attributes:
        values: (b, m, k), values of a narrow format: in its dtype if the
            matmul reads float8, in float32 if it is emulated. Saved for the
            backward pass they may be uint8 codes.
        scale: Float32 (b, m', k'), one per tile; (1, 1, 1) for a whole tensor.
            If the values are codes, scales of a narrow format are codes too.
        quantization: How it was quantized; None for plain values, with scale 1.
        tensor_scale: Float32 scalar that multiplies values and scales, or None.
    """

    values: Tensor
    scale: Tensor
    quantization: Quantization | None
    tensor_scale: Tensor | None = None

    @property
    def tile(self) -> Tile:
        """The shape of the part of the matrix that shares one scale."""
        return WHOLE if self.quantization is None else self.quantization.tile

    @property
    def transposed(self) -> Quantized:
        """The transpose, for a matmul that sums over the other axis."""
        quantization = self.quantization
        if quantization is None or quantization.has_one_scale:
            return self.with_values(swapped(self.values))
        return self._with(
            swapped(self.values), swapped(self.scale), quantization.transposed
        )

    @property
    def spread_scale(self) -> Tensor:
        """The scale of each element; its shape broadcasts to the values."""
        quantization = self.quantization
        if quantization is None or quantization.has_one_scale:
            return self.scale
        return tiles.spread(self.scale, quantization.tile, self.values)

    def encoded(self, dtype: str, encode: Codec = casting.encode) -> Quantized:
        """Return a copy whose values are in a narrow dtype, or codes.

        A code has the bits of a narrow value. This is the form saved for the
        backward pass. `dtype` is float32 for no change, uint8 for codes, or the
        dtype of the format. Eight-bit scales then become codes. Unquantized and
        narrow tensors stay unchanged.
        """
        quantization, values, scale = self.quantization, self.values, self.scale
        if quantization is None or dtype == "float32":
            return self
        has_narrow_scales = quantization.scale_format != "float32"
        if is_wide(values):
            if dtype == "uint8":
                values = encode(values, quantization.format)
            else:
                values = casting.as_dtype(values, dtype)
        elif not has_narrow_scales:
            return self
        if has_narrow_scales and is_wide(scale):
            scale = casting.encode_scales(scale, quantization.scale_format)
        return self._with(values, scale, quantization)

    def decoded(
        self,
        widen: Codec = casting.widen,
        decode: Codec = casting.decode,
        compute_dtype: str = "float32",
    ) -> Quantized:
        """Return a copy with float32 scales, and values in a wide dtype.

        `decode` converts codes to values, `widen` values of a float8 dtype to
        float32 or to the compute dtype.
        """
        quantization, values = self.quantization, self.values
        if quantization is None:
            return self
        dtype = str(values.dtype)  # Keras does not know all of them.
        if "uint8" in dtype:
            values = decode(values, quantization.format)
        elif "float32" not in dtype:
            values = widen(values, compute_dtype)
        wide = self if values is self.values else self.with_values(values)
        has_narrow_scales = quantization.scale_format != "float32"
        return wide.with_float32_scales if has_narrow_scales else wide

    @property
    def with_float32_scales(self) -> Quantized:
        """A copy of this operand, with scales decoded to float32."""
        quantization = self.quantization
        if quantization is None or quantization.scale_format == "float32":
            return self
        if "uint8" not in str(self.scale.dtype):
            return self
        scale = casting.decode_scales(self.scale, quantization.scale_format)
        return self._with(self.values, scale, quantization)

    def dequantize(self, dtype: str = "float32") -> Tensor:
        """Return the values times the scales, without `tensor_scale`."""
        return casting.dequantize(self.values, self.spread_scale, dtype)

    def with_nan_scales(self, amax: Tensor) -> Quantized:
        """Return a copy with NaN scales for tiles of infinite or NaN amax.

        A saturating cast makes an infinite value finite. A recipe with history
        reports the infinity in its observation. Without history only NaN
        gradients can tell a loss scaler to skip the step.
        """
        mark = amax * 0.0 + 1.0  # NaN for infinity and NaN, else 1.
        return self._with(self.values, self.scale * mark, self.quantization)

    def with_values(self, values: Tensor) -> Quantized:
        """Return a copy with other values and the same scales."""
        return Quantized(
            values, self.scale, self.quantization, self.tensor_scale
        )

    def _with(
        self, values: Tensor, scale: Tensor, quantization: Quantization | None
    ) -> Quantized:
        """Return a copy with other values, scales and quantization."""
        return Quantized(values, scale, quantization, self.tensor_scale)

    def leaves(self) -> list[Tensor]:
        """Return the operand's tensors, as `of_leaves` takes them."""
        others = [] if self.tensor_scale is None else [self.tensor_scale]
        return [self.values, self.scale, *others]


def of_leaves(
    leaves: Iterator[Tensor], quantization: Quantization | None
) -> Quantized:
    """Rebuild a `Quantized` from the next tensors of an iterator.

    `leaves` yields what `Quantized.leaves` returned.
    """
    values, scale = next(leaves), next(leaves)
    is_next = quantization is not None and quantization.has_tensor_scale
    tensor_scale = next(leaves) if is_next else None
    return Quantized(values, scale, quantization, tensor_scale)


def is_wide(values: Tensor) -> bool:
    """Return True for float32, by its name: Keras does not know all dtypes."""
    return "float32" in str(values.dtype)


def passthrough(x: Tensor) -> Quantized:
    """Return a tensor as an unquantized operand with a scale of 1."""
    return Quantized(x, ops.ones((1, 1, 1), "float32"), None)


class Extended(Protocol):
    """Computes quantizations whose `is_extended` is True.

    They have two levels of scales, a transform, or rounding at random. An
    extension registers one by `register`.
    """

    def quantize(
        self,
        x: Tensor,
        quantization: Quantization,
        scale: Tensor | None,
        cast: Cast,
        whole_amax: Callable[[Tensor], Tensor],
        key: Tensor | None,
        across: bool,
    ) -> tuple[Quantized, Tensor | None]:
        """Quantize a matrix; see `quantize`."""

    def untransformed(self, values: Tensor, size: Size, axis: int) -> Tensor:
        """Undo the transform of an axis, which had this `size` before."""


_extended: list[Extended] = []


def register(extended: Extended) -> None:
    """Register what computes extended quantizations."""
    _extended.append(extended)


def extended() -> Extended:
    """Return what computes extended quantizations.

    Raises:
        ValueError: If no extension that is installed does.
    """
    _extensions.import_for("quantizations")
    if not _extended:
        raise ValueError(
            "What computes scales on two levels, transforms and rounding at "
            "random is not installed here. Received: the core alone, without "
            "`keras_policy_ext.ext`. Allowed: recipes without these, such as "
            "'mxfp8'. Install the whole package, or choose another recipe."
        )
    return _extended[0]


def quantize(
    x: Tensor,
    quantization: Quantization,
    scale: Tensor | None = None,
    cast: Cast = casting.quantize_float32,
    whole_amax: Callable[[Tensor], Tensor] = scaling.amax,
    key: Tensor | None = None,
    across: bool = False,
) -> tuple[Quantized, Tensor | None]:
    """Quantize a matrix; return the `Quantized`, and amaxes if computed.

    Args:
        x: (b, m, k), any real dtype, read as float32; any shape with one scale.
        quantization: How to quantize it.
        scale: Float32 scale of the tensor; None for scales by amaxes of `x`.
        cast: Takes `x`, a scale per element, the name of the format, and
            whether to multiply by that scale instead of dividing. Returns the
            values in the dtype that the matmul reads.
        whole_amax: Computes the amax of a tensor that has one scale.
        key: Int32 scalar, the random key for stochastic rounding.
        across: Whether the matmul reads the transpose, so that it sums over
            the second axis and not the last one.

    Returns:
        The quantized tensor, and the amaxes of its tiles if they were computed
        here. With a transform its contracted axis is padded.
    """
    if quantization.is_extended:
        return extended().quantize(
            x, quantization, scale, cast, whole_amax, key, across
        )
    return scaled_and_cast(x, quantization, scale, cast, whole_amax, scales_of)


def scaled_and_cast(
    x: Tensor,
    quantization: Quantization,
    scale: Tensor | None,
    cast: Cast,
    whole_amax: Callable[[Tensor], Tensor],
    scales_of: Callable[[Tensor, Quantization], Scales],
) -> tuple[Quantized, Tensor | None]:
    """Compute the scales of a matrix and cast it; see `quantize`.

    `scales_of` computes the scales of tiles from their amaxes.
    """
    tile, amax = quantization.tile, None
    has_one_scale = quantization.has_one_scale
    scales = Scales(scale)
    # With a constant scale the amaxes tell only what is not finite.
    if scale is None or quantization.constant_scale is not None:
        amax = whole_amax(x) if has_one_scale else tiles.tile_amax(x, tile)
        scales = scales_of(amax, quantization)
    is_factor = scales.factor is not None
    applied = scales.factor if is_factor else scales.scale
    if not has_one_scale:
        applied = tiles.spread(applied, tile, x)
    values = cast(x, applied, quantization.format, is_factor)
    scale = scales.scale[None, None, None] if has_one_scale else scales.scale
    return Quantized(values, scale, quantization, scales.tensor_scale), amax


def swapped(matrix: Tensor) -> Tensor:
    """Transpose matrices (b, m, k) to (b, k, m)."""
    if keras.backend.backend() == "torch":
        # A tenth of the time that the operation takes in an eager call.
        return matrix.mT
    if matrix.shape[0] == 1:
        # XLA fuses no transpose of three axes into a matmul: four copies in a
        # step of an MLP (JAX 0.10, CPU).
        single = ops.transpose(ops.squeeze(matrix, 0))
        return ops.expand_dims(single, 0)
    return ops.swapaxes(matrix, 1, 2)
