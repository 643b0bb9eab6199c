"""Quantize an operand with scales of rows for one or both of its matmuls."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from keras_policy_ext._types import Tensor
from keras_policy_ext.recipes import Quantization


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
        sums: bool = False,
    ) -> RowCastsOfBoth:
        """Quantize a matrix (m, k) and its transpose, each by its rows.

        `plain` says how to quantize the matrix, `across` the transpose, whose
        rows are the columns of the matrix; None leaves it out.
        """
