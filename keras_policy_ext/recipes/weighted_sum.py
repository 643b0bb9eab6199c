"""The recipe for weights times values: the sum that ends an attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_policy_ext._types import override
from keras_policy_ext.recipes.quantization import Quantization
from keras_policy_ext.recipes.recipe import Recipe, scales_rows_apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedSum(Recipe):
    """Weights are scaled by rows; values have the scale 1 in the outputs.

    The sum is over keys. A scale of values along that axis would be of several
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
        quantization = self.activations.quantization(operand, matmul)
        if quantization is None or (operand, matmul) != ("kernel", "forward"):
            return quantization
        return dataclasses.replace(quantization, constant_scale=1.0)


def weighted_sum_of(activations: Recipe) -> Recipe:
    """Return the recipe for weights times values, from that of activations.

    It is a `WeightedSum` if no scale of `activations` is of two rows; otherwise
    `activations`, also if its forward matmul is not in float8.
    """
    quantization: Any = activations.quantization("kernel", "forward")
    if quantization is None or not scales_rows_apart(activations):
        return activations
    return WeightedSum(activations=activations)
