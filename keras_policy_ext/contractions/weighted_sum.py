"""Weights times values, the sum that ends an attention: recipe and scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
from keras import ops

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.contractions.equations import split
from keras_policy_ext.numerics import scaling
from keras_policy_ext.recipes.quantization import Quantization
from keras_policy_ext.recipes.recipe import Recipe, scales_rows_apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedSum(Recipe):
    """Weights are scaled by rows; values have the scale 1 in the outputs.

    The sum is over keys. A scale of values along that axis would cover several
    keys, masked ones too. So a power of two per key brings the values into the
    range of the format and multiplies the weights before they are quantized
    (`contractions.weighted_sum`). Gradients have the scales of `activations`.
    It has no name, since no policy asks for it.

    Attributes:
        activations: The recipe for two activations.
    """

    activations: Recipe

    def in_high_precision(self, matmul: str) -> bool:
        """Return True if `activations` excludes a matmul from float8."""
        return self.activations.in_high_precision(matmul)

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return that of `activations`; values get the scale 1."""
        asked = self.activations.quantization(operand, matmul)
        # The kernel is the values, which `fold` brings into range.
        if asked is None or (operand, matmul) != ("kernel", "forward"):
            return asked
        return dataclasses.replace(asked, constant_scale=1.0)


def weighted_sum_of(activations: Recipe) -> Recipe:
    """Return the recipe for weights times values, a `WeightedSum` if possible.

    It is `activations`, the recipe for two activations, if its forward matmul
    is not in float8, or if one of its scales covers several rows. A
    `WeightedSum` would then let masked keys in.
    """
    asked: Any = activations.quantization("kernel", "forward")
    if asked is None or not scales_rows_apart(activations):
        return activations
    return WeightedSum(activations=activations)


def fold(
    equation: str, weights: Tensor, values: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    """Return weights and values with the same product, values in range.

    Values are divided by a scale per key, and weights are multiplied by it: `P
    V = (P s) (V / s)`. It is a power of two, so that nothing is rounded, and a
    constant for gradients. No keys share a scale, so a key whose weight is 0,
    such as a masked one, changes nothing. A key with a value that is infinite
    or NaN has the scale NaN, as the outputs should.

    Args:
        equation: Explicit; the second operand is the values. All its axes but
            those of the columns tell keys apart.
        weights: The first operand, in the dtype of `values`, which has the
            range of float32.
        values: The second operand.
        limit: The largest value of the format of the values.

    Raises:
        ValueError: If neither weights nor outputs have an axis of the values.
    """
    weights_letters, values_letters, outputs_letters = split(equation)
    if set(values_letters) - set(weights_letters + outputs_letters):
        raise ValueError(
            "An axis of the values is in no other term of the equation, so a "
            "key has no single scale. Received: "
            f"{equation!r}. Allowed: axes that the weights or the outputs "
            "have too. Sum the values over the axis first."
        )
    columns = tuple(
        axis
        for axis, letter in enumerate(values_letters)
        if letter not in weights_letters
    )
    scale = ops.stop_gradient(_scale_of_keys(values, columns, limit))
    scale = ops.cast(scale, keras.backend.standardize_dtype(values.dtype))
    for_weights = _with_axes_of(weights_letters, scale, values_letters)
    return ops.multiply(weights, for_weights), ops.divide(values, scale)


def _scale_of_keys(
    values: Tensor, columns: tuple[int, ...], limit: float
) -> Tensor:
    """Return a float32 power of two for each key of the values of attention.

    The axes `columns` of the values then have size 1. A value divided by the
    scale is at most `limit`.
    """
    if columns:
        amax = scaling.amax(values, axis=columns, keepdims=True)
    else:
        amax = ops.cast(ops.abs(values), "float32")
    scale = scaling.scale_for_limit(amax, limit, power_of_two=True)
    return scale * (amax * 0.0 + 1.0)  # NaN where an amax is not finite.


def _with_axes_of(
    weights_letters: str, scale: Tensor, values_letters: str
) -> Tensor:
    """Give the scales of keys the axes of weights, to which they broadcast.

    `weights_letters` and `values_letters` are the einsum terms of both
    operands. `scale` has the axes of the values.
    """
    shared = [x for x in weights_letters if x in values_letters]  # Of keys.
    columns = [x for x in values_letters if x not in shared]
    order = [values_letters.index(letter) for letter in shared + columns]
    scale = ops.transpose(scale, order)
    # A reshape would need sizes, of which a graph may not know some.
    for _ in columns:
        scale = ops.squeeze(scale, -1)
    for axis, letter in enumerate(weights_letters):
        if letter not in shared:
            scale = ops.expand_dims(scale, axis)
    return scale
