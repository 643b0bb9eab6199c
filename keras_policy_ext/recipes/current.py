"""Current scaling: each tensor is scaled by its own amax."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from keras_policy_ext._types import override
from keras_policy_ext.recipes.fields import (
    FP8_FORMATS,
    boolean,
    choice,
    tensorwise,
)
from keras_policy_ext.recipes.quantization import Quantization
from keras_policy_ext.recipes.recipe import Recipe, quantizations_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(Recipe):
    """One scale per tensor, from the tensor's current amax.

    Source: Transformer Engine's `Float8CurrentScaling`, torchao's
    `tensorwise`. See `Recipe` for the fields that all recipes have.

    Attributes:
        fp8_format: `"hybrid"` (e4m3fn forward, e5m2 output gradients) or
            `"e4m3"` (e4m3fn everywhere); `"hybrid_fnuz"` or `"e4m3fnuz"` in
            the formats of AMD's MI300.
        power_of_two: Whether to round scales up to powers of two.

    Raises:
        TypeError, ValueError: If a value has the wrong type or range.

    Examples:
        >>> recipe = kpe.recipes.CurrentScaling(power_of_two=True)
        >>> recipe.spec
        'current(power_of_two=True)'
        >>> recipe.remembers
        False
    """

    name: ClassVar[str] = "current"

    fp8_format: str = "hybrid"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        choice(self, "fp8_format", FP8_FORMATS)
        boolean(self, "power_of_two")
        super().__post_init__()

    @property
    def for_activations(self) -> Recipe:
        """The recipe for a matmul of two activations: one scale per tensor."""
        quantized = quantizations_of(self)  # A subclass may have more scales.
        has_one_scale = all(q is None or q.keeps_axes for q in quantized)
        return self if has_one_scale else super().for_activations

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return one scale per tensor, in a format of `fp8_format`."""
        # Both matmuls of an operand read the same values.
        if self.in_high_precision(matmul):
            return None
        rounding = "up" if self.power_of_two else "nearest"
        return tensorwise(self.fp8_format, operand, rounding)
