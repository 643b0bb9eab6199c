"""Rowwise scaling: one scale per row of the matrix that a matmul reads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from keras_policy_ext import formats
from keras_policy_ext._types import override
from keras_policy_ext.recipes.fields import boolean
from keras_policy_ext.recipes.quantization import WHOLE, Quantization, Tile
from keras_policy_ext.recipes.recipe import Recipe, scales_rows_apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseScaling(Recipe):
    """One scale per row of each matrix; the matmul sums along the rows.

    Each token has its own scale, and so does each output channel of a kernel.
    The two gradients sum over other axes, so every operand is quantized twice.
    There is no state.

    With `kernel_grad="high_precision"` that matmul runs in the compute dtype,
    and the kernel that `inputs_grad` reads has one scale per tensor. Source:
    torchao's `rowwise` and `rowwise_with_gw_hp`. See `Recipe` for all fields.

    Attributes:
        power_of_two: Whether to round scales up to powers of two. None leaves
            it to the device: a policy fills it in when it is made. A recipe
            that still has None does not round.

    Raises:
        TypeError, ValueError: If a value has the wrong type or range.

    Examples:
        >>> recipe = kpe.recipes.RowwiseScaling(kernel_grad="high_precision")
        >>> recipe.quantization("inputs", "kernel_grad") is None
        True
        >>> recipe.quantization("inputs", "forward").format
        'float8_e4m3fn'
    """

    name: ClassVar[str] = "rowwise"
    granularity: ClassVar[str] = "rowwise"

    power_of_two: bool | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        boolean(self, "power_of_two", or_none=True)
        super().__post_init__()

    @property
    def for_activations(self) -> Recipe:
        """This recipe: a scale per row of both activations."""
        return self if scales_rows_apart(self) else super().for_activations

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return e4m3fn with a scale per row, or one of the kernel."""
        if self.in_high_precision(matmul):
            return None
        # As in torchao: one scale lets shards be gathered in float8.
        whole = (operand, matmul) == ("kernel", "inputs_grad")
        whole = whole and self.in_high_precision("kernel_grad")
        return Quantization(
            format=formats.ALIASES["e4m3"],
            tile=WHOLE if whole else Tile(free=1),
            scale_rounding="up" if self.power_of_two else "nearest",
        )
