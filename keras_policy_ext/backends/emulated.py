"""Emulated kernels: they multiply decoded operands in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.backends.matmuls import (
    Convolution,
    Convolutions,
    MatmulKernel,
    Request,
)
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import Quantization

Product = Callable[[Tensor, Tensor], Tensor]
"""Multiplies matrices (b, m, k) and (b, n, k) to (b, m, n)."""


class KerasConvolutions(Convolutions):
    """Keras's convolutions: they are linear, so gradients are transposes."""

    def __init__(self, reason: str):
        self.reason = reason

    @override
    def outputs(self, conv: Convolution, x: Tensor, w: Tensor) -> Tensor:
        return conv.of(x, w)

    @override
    def inputs_grad(
        self, conv: Convolution, g: Tensor, w: Tensor, shape: Shape
    ) -> Tensor:
        """Compute the inputs' gradient: a transposed linear function."""
        return backends.current.transpose(
            lambda x: self.outputs(conv, x, w), shape, g
        )

    @override
    def kernel_grad(
        self, conv: Convolution, x: Tensor, g: Tensor, shape: Shape
    ) -> Tensor:
        """Compute the kernel's gradient: a transposed linear function."""
        return backends.current.transpose(
            lambda w: self.outputs(conv, x, w), shape, g
        )


#: Of float32: the largest number, and the smallest that is normal.
LARGEST = float(np.finfo("float32").max)
SMALLEST = 2.0**-126


class Emulated(MatmulKernel):
    """A kernel that multiplies the values of float8 operands in float32.

    Scales that are constant along the contracted axis multiply the output.
    Other scales multiply the operands first. `fast` changes no emulated sum.
    """

    native = False

    def __init__(self, product: Product):
        self.product = product

    def supports(self, request: Request) -> str | None:
        """Return None: this kernel supports every request."""
        return None

    def reason(self, request: Request) -> str:
        """Return a sentence that tells users what this kernel computes."""
        return "float8 numbers are multiplied in float32"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        product = self.product(unscaled(a), unscaled(b))
        return scaled(product, a, b, dtype)


class Plain(MatmulKernel):
    """A kernel for unquantized operands; sums in float32 or 64, never fast."""

    native = False

    def __init__(self, product: Product):
        self.product = product

    def supports(self, request: Request) -> str | None:
        """Return the reason to refuse any float8 matmul, always."""
        return "not for float8 operands"

    def reason(self, request: Request) -> str:
        """Return a sentence that tells users what this kernel computes."""
        return "a matmul in the compute dtype"

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        return ops.cast(self.product(a.values, b.values), dtype)


def unscaled(operand: Quantized) -> Tensor:
    """Return an operand in float32, times scales that vary along the sum.

    Scales that are constant along the sum are left out: they multiply the
    output later.
    """
    quantization = operand.quantization
    if quantization is None or quantization.scale_leaves_sum:
        return casting.as_dtype(operand.values, "float32")
    return operand.dequantize()


def folded(operand: Quantized, across: bool) -> Quantized:
    """Multiply an operand by the scales that vary along the sum.

    This is done before transposing. A compiler that multiplies and transposes
    in one kernel reads memory with large strides (three times as slow, JAX
    0.10, CPU). `across` says that the matmul reads the transpose.
    """
    quantization = operand.quantization
    if quantization is None:
        return operand
    as_read = quantization.transposed if across else quantization
    if as_read.scale_leaves_sum:
        return operand
    # So that `are_powers_of_two` answers for the result as for the operand.
    kept = quantization.tensorwise if are_powers_of_two(operand) else None
    return Folded(
        values=operand.dequantize(),
        scale=_ones(),
        quantization=kept,
        tensor_scale=operand.tensor_scale,
        exact=quantization.exact_in_bfloat16,
    )


@dataclasses.dataclass(frozen=True)
class Folded(Quantized):
    """An operand whose values are already multiplied by their scales.

    Attributes:
        exact: Whether bfloat16 represents the values exactly.
    """

    exact: bool = False

    def with_values(self, values: Tensor) -> Folded:
        """Return a copy of this operand with other values, and its scales."""
        return self._with(values, self.scale, self.quantization)

    def _with(
        self, values: Tensor, scale: Tensor, quantization: Quantization | None
    ) -> Folded:
        tensor_scale = self.tensor_scale
        return Folded(values, scale, quantization, tensor_scale, self.exact)


def exact_in(dtype: str, *operands: Quantized) -> bool:
    """Return True if a 16-bit dtype represents exactly what is multiplied.

    Both represent all float8 values, bfloat16 also those times an 8-bit scale.
    """
    in_bfloat16 = dtype == "bfloat16"
    for operand in operands:
        quantization = operand.quantization
        if isinstance(operand, Folded):
            exact = in_bfloat16 and operand.exact
        elif quantization is None or dtype == "float32":
            exact = False
        else:
            # A scale that leaves the sum multiplies no operand.
            exact = quantization.scale_leaves_sum or (
                in_bfloat16 and quantization.exact_in_bfloat16
            )
        if not exact:
            return False
    return True


def times_scales(
    product: Tensor,
    a: Quantized,
    b: Quantized,
    multiply: Callable[[Tensor, Tensor], Tensor] = ops.multiply,
) -> Tensor:
    """Multiply a matmul's float32 result by the scales of both operands.

    Two normal scales can have a subnormal or infinite product although the
    result is normal. Then a power of two multiplies the scales and divides the
    result, which rounds nothing. `multiply` may overwrite its first argument.
    """
    # An empty array has no maximum, and TensorFlow's optimizer of graphs ends
    # the process, dividing by its sizes, if the scales are ones (TF 2.21).
    if 0 in tuple(product.shape):
        return product
    first, second = _scales_of(a, b)
    if backends.current.have_normal_product(first, second):
        return multiply(product, first * second)
    power = _power_for(first, second)
    # Without this `abs` TensorFlow's graphs multiply factors in any order.
    factor = ops.abs(first * power) * second
    return multiply(product, factor) / power


def _scales_of(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """Return the two factors of the matmul of two `unscaled` operands.

    The output is multiplied by one, then by the other: by the scales of its
    rows and of its columns. Where tensors have scales besides, as in NVFP4, the
    second factor is such a scale, and the first the product of all others.
    """
    of_a, of_b = a.quantization, b.quantization
    if of_a and of_b and of_a.keeps_axes and of_b.keeps_axes:
        return a.scale, b.scale  # One number each: none is of rows.
    of_rows, of_columns = _left_scale(a), _left_scale(b)
    if of_b is not None and not of_b.has_one_scale:
        # The rows of b (b, n, k) are the columns of the output (b, m, n).
        of_columns = ops.swapaxes(of_columns, 1, 2)
    of_both = a.tensor_scale, b.tensor_scale
    of_tensors = [scale for scale in of_both if scale is not None]
    if not of_tensors:
        return of_rows, of_columns
    # Two factors only: all but the last of three or four are multiplied here.
    first, last = of_rows * of_columns, of_tensors.pop()
    return (first * of_tensors[0] if of_tensors else first), last


def _left_scale(operand: Quantized) -> Tensor:
    """Return the scale that is still to multiply the output, or 1."""
    quantization = operand.quantization
    if quantization is None or quantization.scale_leaves_sum:
        return operand.spread_scale
    return _ones()


def _power_for(first: Tensor, second: Tensor) -> Tensor:
    """Return, per row, a power of two that brings both scales into range."""
    # It is 1 unless the largest product of scales in a row is tiny or infinite.
    has_one_column = 1 in tuple(second.shape)[-1:]
    largest = first * (second if has_one_column else ops.max(second))
    # Below 2^-62, `first` is below 2^64, as `second` is at least 2^-126.
    power = ops.where(largest < 2.0**-62, 2.0**64, ops.ones_like(largest))
    return ops.where(largest > LARGEST, SMALLEST, power)


def _ones() -> Tensor:
    return ops.ones((1, 1, 1), "float32")


def are_powers_of_two(*operands: Quantized) -> bool:
    """Return True if all scales of these operands are powers of two."""
    quantizations = [each.quantization for each in operands]
    # "up" and "floor" round scales to powers of two.
    return all(
        q is not None and q.scale_rounding != "nearest" for q in quantizations
    )


def may_write_bfloat16(a: Quantized, b: Quantized, dtype: str) -> bool:
    """Return True if a GPU may write a matmul's sums in bfloat16.

    A number times a power of two is rounded to bfloat16 as the number is, and
    bfloat16 is half of what a float32 result moves.
    """
    return dtype == "bfloat16" and are_powers_of_two(a, b)


#: A product with at least as many elements, and at least as many rows,
#: columns and terms, is not split by XLA.
UNSPLIT, UNSPLIT_SIDE = 1 << 22, 64


def scales_in_product(a: Quantized, b: Quantized, dtype: str) -> bool:
    """Return True if a GPU's float8 matmul can apply the scales itself.

    XLA is then given `product * scale`, both in the compute dtype. It passes
    the scale to cuBLASLt as it was before it was rounded to that dtype. XLA
    splits the sums of a small product, to occupy more of a GPU: in JAX 0.10 and
    0.11 one with less than 1.5 tiles of 64 x 128 for each of the 132 or 148
    multiprocessors, in XLA of August 2026 one with less than half a tile of 185
    x 185. Then it would multiply by the rounded scale. Float16 would overflow,
    should XLA not take the scale into the matmul.
    """
    if dtype == "float16" or not a.scale.shape == b.scale.shape == (1, 1, 1):
        return False
    if dtype == "float32":
        return True  # A scale in float32 is not rounded.
    (batch, rows, terms), columns = a.values.shape, b.values.shape[1]
    sizes = rows, columns, terms
    if None in (batch, *sizes) or min(sizes) < UNSPLIT_SIDE:  # None: unknown.
        return False
    return batch * rows * columns >= UNSPLIT


def is_vector_product(a: Quantized, b: Quantized) -> bool:
    """Return True if one of the two operands is a vector.

    XLA does not make a matmul of such a product: it sums in the output's dtype.
    """
    return 1 in (*a.values.shape[1:], *b.values.shape[1:])


def scaled(product: Tensor, a: Quantized, b: Quantized, dtype: str) -> Tensor:
    """Multiply a matmul's float32 result by both scales; cast it."""
    return ops.cast(times_scales(product, a, b), dtype)
