"""Kernels that quantize an operand for both of its matmuls in one pass."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_sources import (
    Reading,
    ScaleRule,
)
from keras_policy_ext.recipes import Quantization


class ScaleHint(NamedTuple):
    """The scale of an operand, or how to compute it.

    Attributes:
        scale: Float32 scalar; None for a recipe without state.
        unseen: Bool scalar, True if the operand was never observed. Its scale
            is then computed from its own amax. None if it was always observed.
        rule: How a scale is computed from an amax.
        seen_lately: See `KnownScale`.
    """

    scale: Tensor | None
    unseen: Tensor | None
    rule: ScaleRule
    seen_lately: bool = False


class Both(NamedTuple):
    """A quantized matrix and its transpose, each in its own memory.

    Attributes:
        values: (m, k), in the dtype of the format.
        across: (k, m), the same values, in separate memory.
        scale: Float32 scalar.
        amax: Float32, one amax per tile; a scalar if the scale is computed
            from it. NaN if a value is NaN; None if it was not requested.
        column_sums: Float32 (k,), the sums of the columns of the unquantized
            matrix; None if they were not requested.
    """

    values: Tensor
    across: Tensor
    scale: Tensor
    amax: Tensor | None
    column_sums: Tensor | None = None


class Wanted(NamedTuple):
    """Options of a cast in both layouts.

    Attributes:
        amax: Whether to return the amax.
        is_transposed_in_memory: Whether memory holds the transpose of the
            matrix. Only a framework whose tensors have no strides needs it.
        no_transpose: Whether nothing reads the transpose.
        column_sums: Whether to sum the columns, if the kernel can.
    """

    amax: bool
    is_transposed_in_memory: bool = False
    no_transpose: bool = False
    column_sums: bool = False


class BothLayouts(Protocol):
    """A kernel that quantizes a matrix, and writes it and its transpose."""

    sums_columns: bool = False
    """Whether it can sum the columns of the matrix too."""

    def supports(
        self, like: Tensor, dtype: str, format_name: str
    ) -> str | None:
        """Return why the kernel cannot quantize an operand; None if it can.

        `like` is a tensor on the device of the operand.
        """

    def quantize(
        self,
        matrix: Tensor,
        quantization: Quantization,
        hint: ScaleHint,
        wanted: Wanted,
    ) -> Both:
        """Quantize a matrix (m, k) with one scale; write its transpose too.

        `hint` has the scale, or says how to compute it from the amax.
        """


class QuantizedForBoth(NamedTuple):
    """One operand, quantized for the two matmuls that read it.

    Attributes:
        first: For the first matmul; the home matrix if cast in both layouts.
        second: For the second matmul. If cast in both layouts, this is the home
            matrix too; its transpose has the memory layout of that matmul.
        amax: Float32, that of the operand or of each tile; None if not wanted.
    """

    first: Quantized
    second: Quantized
    amax: Tensor | None
    column_sums: Tensor | None = None


def read_both(
    kernel: BothLayouts,
    matrix: Tensor,
    operand: str,
    quantization: Quantization,
    rule: ScaleRule,
    reading: Reading | None,
    wanted: Wanted,
) -> QuantizedForBoth:
    """Quantize a matrix (1, m, k), once for both matmuls that read it.

    `reading` is what was read from the state of the recipe; None for a recipe
    without one. Where it has no scale, the amax of the operand gives that.
    """
    known = None if reading is None else reading.known_scale(operand)
    hint = ScaleHint(scale=None, unseen=None, rule=rule)
    if known is not None:
        hint = ScaleHint(known.scale, known.unseen, rule, known.seen_lately)
    needed = wanted._replace(amax=wanted.amax or known is None)
    both = kernel.quantize(matrix[0], quantization, hint, needed)
    scale = both.scale[None, None, None]
    first = Quantized(both.values[None], scale, quantization)
    second = Quantized(both.across.mT[None], scale, quantization)
    if known is None:
        # Only NaN in what the two gradients read reports an infinity. The first
        # matmul computes a gradient if it reads one, otherwise the outputs.
        second = second.with_nan_scales(both.amax)
        if operand == "outputs_grad":
            first = first.with_nan_scales(both.amax)
    amax = both.amax if wanted.amax else None
    return QuantizedForBoth(first, second, amax, both.column_sums)


class RowCast(NamedTuple):
    """A matrix that is quantized with one scale per row.

    Attributes:
        values: (m, k), in the dtype of the format.
        scale: Float32 (m,).
        amax: Float32 (m,); not finite if a value of the row is not.
    """

    values: Tensor
    scale: Tensor
    amax: Tensor


class RowCastsOfBoth(NamedTuple):
    """A matrix and its transpose, quantized by rows, each in its own memory.

    Attributes:
        plain: The quantized matrix; None if it was left out.
        across: The quantized transpose; None if it was left out.
        column_sums: Float32 (k,), the sums of the columns of the unquantized
            matrix; None if they were not requested.
    """

    plain: RowCast | None
    across: RowCast | None
    column_sums: Tensor | None


class RowCasts(Protocol):
    """A kernel that quantizes a matrix and its transpose, a scale per row."""

    def supports(self, like: Tensor, *format_names: str) -> str | None:
        """Return why the kernel cannot quantize an operand; None if it can."""

    def cast(
        self,
        matrix: Tensor,
        plain: Quantization | None,
        across: Quantization | None,
        column_sums: bool = False,
    ) -> RowCastsOfBoth:
        """Quantize a matrix (m, k) and its transpose, each by its rows.

        `plain` says how to quantize the matrix, `across` the transpose, whose
        rows are the columns of the matrix; None leaves it out. `column_sums`
        asks for the sums of the matrix's columns, the gradient of a bias.
        """
