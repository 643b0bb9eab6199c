"""Delayed scaling: scales from the amaxes of earlier steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from keras_policy_ext import formats
from keras_policy_ext._types import override
from keras_policy_ext.recipes.fields import (
    FP8_FORMATS,
    choice,
    integer,
    put,
    tensorwise,
)
from keras_policy_ext.recipes.quantization import Quantization
from keras_policy_ext.recipes.recipe import Recipe

_E4M3 = formats.get(formats.ALIASES["e4m3"])

LARGEST_MARGIN = int(math.log2(_E4M3.max / _E4M3.smallest_subnormal))
"""The largest `margin`; beyond it every value in e4m3fn rounds to 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of the tensor in earlier steps.

    Source: Transformer Engine's `DelayedScaling`, Flax's `fp8_ops`. See
    `Recipe` for the fields that all recipes have.

    Attributes:
        amax_history_length: The number of steps in the history (int >= 1).
        margin: Headroom for a growing tensor, in powers of two (int from 0 to
            17): the scale is multiplied by `2**margin`. With more, every value
            in e4m3fn would round to 0.
        fp8_format: `"hybrid"` (e4m3fn forward, e5m2 output gradients) or
            `"e4m3"` (e4m3fn everywhere); `"hybrid_fnuz"` or `"e4m3fnuz"` in
            the formats of AMD's MI300.
        amax_compute: `"max"` of the history, or `"most_recent"`.
        initial_scale: The scale before the first observation: `"current"` uses
            the tensor's own amax; `1.0` is 1, as in Flax, Transformer Engine.

    Raises:
        TypeError, ValueError: If a value has the wrong type or range.

    Examples:
        >>> recipe = kpe.recipes.DelayedScaling(amax_history_length=16)
        >>> recipe.format_of("outputs_grad")
        'float8_e5m2'
        >>> kpe.Float8DTypePolicy("mixed_bfloat16", recipe=recipe).full_name
        'float8/16_from_mixed_bfloat16'
    """

    name: ClassVar[str] = "delayed"

    amax_history_length: int = 1024
    margin: int = 0
    fp8_format: str = "hybrid"
    amax_compute: str = "max"
    initial_scale: str | float = "current"

    def __post_init__(self) -> None:
        integer(self, "amax_history_length", 1)
        integer(self, "margin", 0, LARGEST_MARGIN)
        choice(self, "fp8_format", FP8_FORMATS)
        choice(self, "amax_compute", ("max", "most_recent"))
        put(self, "initial_scale", _initial_scale(self.initial_scale))
        super().__post_init__()

    @property
    def remembers(self) -> bool:
        """True: a kernel has a history for each of its operands."""
        return True

    @override
    def unfit(self, matmul: str, *quantizations: Quantization | None) -> str:
        quantized = [each for each in quantizations if each is not None]
        # It keeps its axes with one scale, if no code depends on its position.
        if not all(each.keeps_axes for each in quantized):
            return "a history has one amax for a tensor: Tile(), to nearest"
        if any(each.constant_scale for each in quantized):
            return "a history has no use where `constant_scale` is the scale"
        return super().unfit(matmul, *quantizations)

    @property
    def scale_options(self) -> dict[str, Any]:
        """The keyword arguments for `scale_from_amax`: margin, power_of_two."""
        return {"margin": self.margin, "power_of_two": False}

    @property
    def spec(self) -> str:
        """The short string of this recipe in policy names; see `Recipe.spec`.

        It is the history length alone if only that differs from its default.
        """
        # A number stands for this class and no subclass.
        if type(self) is DelayedScaling:
            if not self._changed_fields:
                return ""
            if self._changed_fields == ["amax_history_length"]:
                return str(self.amax_history_length)
        return super().spec

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        # Both matmuls of an operand read the same values.
        if self.in_high_precision(matmul):
            return None
        return tensorwise(self.fp8_format, operand)


def _initial_scale(value: object) -> str | float:
    """Return "current" or 1.0; raise for others."""
    if isinstance(value, str) and value == "current":
        return "current"
    is_number = isinstance(value, (int, float, np.number))
    if is_number and not isinstance(value, bool) and value == 1:
        return 1.0
    raise ValueError(
        f"Wrong initial_scale of DelayedScaling. Received: {value!r}. "
        "Allowed: 'current' or 1.0. Leave it out for 'current'."
    )
