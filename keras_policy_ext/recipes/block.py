"""Block scaling: one scale per 128 elements, or per 128x128 of a kernel."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from keras_policy_ext import formats
from keras_policy_ext._types import override
from keras_policy_ext.recipes.fields import boolean
from keras_policy_ext.recipes.quantization import Quantization, Tile
from keras_policy_ext.recipes.recipe import Recipe

BLOCK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaling(Recipe):
    """One scale per 128 elements of a row; per 128x128 elements of a kernel.

    Both matmuls of a kernel read the same blocks, so it is quantized once. All
    values are in e4m3fn, and there is no state. The last block may be smaller.

    Source: DeepSeek-V3 (arXiv 2412.19437), Transformer Engine's
    `Float8BlockScaling`. See `Recipe` for the fields that all recipes have.

    Attributes:
        power_of_two: Whether to round scales up to powers of two. None leaves
            it to the device: a policy fills it in when it is made. A recipe
            that still has None does not round.

    Raises:
        TypeError, ValueError: If a value has the wrong type or range.
    """

    name: ClassVar[str] = "block"
    granularity: ClassVar[str] = "blockwise"

    power_of_two: bool | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        boolean(self, "power_of_two", or_none=True)
        super().__post_init__()

    @property
    def for_activations(self) -> Recipe:
        """The recipe for two activations: both have a scale per 1x128.

        A scale per 128x128 elements would cover 128 keys, masked ones too.
        """
        if self.remembers:  # A subclass, which needs a state.
            return super().for_activations
        return _BlocksOfRows(**self.get_config())

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return e4m3fn with a scale per 1x128, or 128x128 of a kernel."""
        if self.in_high_precision(matmul):
            return None
        of_kernel = operand == "kernel"
        return Quantization(
            format=formats.ALIASES["e4m3"],
            tile=Tile(BLOCK if of_kernel else 1, BLOCK),
            scale_rounding="up" if self.power_of_two else "nearest",
        )


class _BlocksOfRows(BlockScaling):
    """Block scaling of two activations: no scale covers several rows."""

    @property
    def for_activations(self) -> Recipe:
        return self

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return e4m3fn with a scale per 1x128, for each operand."""
        return super().quantization("inputs", matmul)
