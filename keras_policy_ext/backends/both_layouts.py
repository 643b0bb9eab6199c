"""An operand quantized once for two matmuls, in the layout of each."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_sources import HistoryScales, ScaleRule
from keras_policy_ext.recipes import OPERANDS, Quantization


class ScaleHint(NamedTuple):
    """The scale of an operand as far as it is known, on its device.

    Attributes:
        scale: Float32 scalar; None for a recipe without state.
        unseen: Bool scalar, whether the operand was never observed, so that
            its scale comes from its own amax; None where that is never so.
        rule: How a scale comes from an amax.
        seen_lately: See `HistoryScales`.
    """

    scale: Tensor | None
    unseen: Tensor | None
    rule: ScaleRule
    seen_lately: bool = False


class Both(NamedTuple):
    """An operand in both layouts.

    Attributes:
        values: (m, k), in the dtype of the format.
        across: (k, m), the same numbers, in memory of their own.
        scale: Float32 scalar.
        amax: Float32, those of its parts; a scalar where the scale comes
            from it. NaN where a number is; None if not wanted.
    """

    values: Tensor
    across: Tensor
    scale: Tensor
    amax: Tensor | None


class BothLayouts(Protocol):
    """Quantizes a matrix and writes it in the layout of each matmul."""

    def supports(
        self, like: Tensor, dtype: str, format_name: str
    ) -> str | None:
        """Why this is not for an operand in a format; None if it is.

        Args:
            like: A tensor where the operand is.
            dtype: Of the operand.
            format_name: Of what becomes of it.
        """

    def quantize(
        self,
        matrix: Tensor,
        asked: Quantization,
        known: ScaleHint,
        observe: bool,
    ) -> Both:
        """Quantize a matrix, with one scale.

        Args:
            matrix: (m, k).
            asked: What becomes of it.
            known: What is known of its scale.
            observe: Whether the amax is wanted.
        """


class QuantizedForBoth(NamedTuple):
    """An operand as it was quantized for each of its two matmuls.

    Attributes:
        first: For the first matmul; the home matrix if cast in both layouts.
        second: For the second one; then the home matrix too, whose transpose
            lies as that matmul wants it.
        amax: Of the operand, float32, or those of its parts; None if it was
            not wanted.
    """

    first: Quantized
    second: Quantized
    amax: Tensor | None


def read_both(
    both: BothLayouts,
    matrix: Tensor,
    operand: str,
    asked: Quantization,
    rule: ScaleRule,
    history: HistoryScales | None,
    observe: bool,
) -> QuantizedForBoth:
    """Quantize a matrix for a recipe with one scale for a tensor.

    Args:
        both: What casts.
        matrix: (1, m, k), the home matrix.
        operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
        asked: What becomes of it.
        rule: How a scale comes from an amax.
        history: What the state says; None for a source without state.
        observe: Whether the amax is needed for the state.
    """
    known = ScaleHint(None, None, rule)
    if history is not None:
        index, unseen = OPERANDS.index(operand), history.unseen
        flag = None if unseen is None else unseen[index]
        lately = history.seen_lately
        known = ScaleHint(history.scales[index], flag, rule, lately)
    stateless = history is None
    found = both.quantize(matrix[0], asked, known, observe or stateless)
    scale = ops.reshape(found.scale, (1, 1, 1))
    first = Quantized(found.values[None], scale, asked)
    second = Quantized(found.across.mT[None], scale, asked)
    if stateless:
        second = second.with_nan_scales(found.amax)
        first = (
            first
            if operand != "outputs_grad"
            else first.with_nan_scales(found.amax)
        )
    return QuantizedForBoth(first, second, found.amax if observe else None)
