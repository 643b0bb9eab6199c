"""MXFP8: an 8-bit power-of-two scale per 32 elements."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from keras_policy_ext import formats
from keras_policy_ext._types import override
from keras_policy_ext.recipes.fields import choice
from keras_policy_ext.recipes.quantization import Quantization, Tile
from keras_policy_ext.recipes.recipe import Recipe, scales_rows_apart

BLOCK = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Scaling(Recipe):
    """One E8M0 scale per 32 elements along the axis that a matmul sums.

    All values are in e4m3fn. Each operand is quantized separately for each of
    its matmuls. There is no state. The last block of an axis may be smaller.

    Source: the OCP Microscaling specification 1.0, and arXiv 2506.08027 for
    scales that are rounded up. See `Recipe` for the fields of all recipes.

    Attributes:
        rounding: How scales are rounded: `"round_up"`, so that no value
            saturates; or `"floor"`, as in OCP MX 1.0: the exponent of the amax
            minus that of the format's largest value. With `"floor"` the
            largest values may saturate.

    Raises:
        ValueError: If a field has another value.
    """

    name: ClassVar[str] = "mxfp8"
    granularity: ClassVar[str] = "blockwise"

    rounding: str = "round_up"

    def __post_init__(self) -> None:
        choice(self, "rounding", tuple(_ROUNDINGS))
        super().__post_init__()

    @property
    def for_activations(self) -> Recipe:
        """This recipe: a scale per block of 32 of both activations."""
        return self if scales_rows_apart(self) else super().for_activations

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return e4m3fn with an E8M0 scale per 32 elements."""
        if self.in_high_precision(matmul):
            return None
        return Quantization(
            format=formats.ALIASES["e4m3"],
            tile=Tile(1, BLOCK),
            scale_format="float8_e8m0fnu",
            scale_rounding=_ROUNDINGS[self.rounding],
        )


_ROUNDINGS = {"round_up": "up", "floor": "floor"}
