"""NVFP4: 4-bit values, with scales on two levels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from keras_policy_ext._types import override
from keras_policy_ext.recipes.fields import boolean, integer
from keras_policy_ext.recipes.quantization import Quantization, Tile
from keras_policy_ext.recipes.recipe import Recipe

BLOCK = 16
LARGEST_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4Scaling(Recipe):
    """Values in e2m1fn (4 bits), a scale per 16 values and one per tensor.

    The scale of 16 values is in e4m3fn, the scale of a tensor in float32.

    A kernel has a scale per 16×16 elements, which both of its matmuls read.
    Both operands of `kernel_grad` go through a Hadamard transform. Output
    gradients are rounded stochastically, so that they are unbiased. The state
    of a kernel is a counter of steps.

    Source: "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149),
    Transformer Engine's `NVFP4BlockScaling`. See `Recipe` for the fields that
    all recipes have; here they are `"float4"` or `"high_precision"`.
    `four_over_six` is from "Four Over Six: More Accurate NVFP4 Quantization
    with Adaptive Block Scaling" (arXiv 2512.02010).

    Attributes:
        hadamard: Whether `kernel_grad` reads transformed operands.
        stochastic_rounding: Whether output gradients are rounded so.
        four_over_six: Whether the largest of 16 values becomes 4 or 6, by the
            smaller squared error of all of them; otherwise always 6.
        seed: The seed of stochastic rounding; runs with equal seeds are equal.

    Raises:
        TypeError, ValueError: If a value has the wrong type or range.
    """

    name: ClassVar[str] = "nvfp4"
    granularity: ClassVar[str] = "blockwise"

    forward: str = "float4"
    inputs_grad: str = "float4"
    kernel_grad: str = "float4"
    hadamard: bool = True
    stochastic_rounding: bool = True
    four_over_six: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("hadamard", "stochastic_rounding", "four_over_six"):
            boolean(self, field)
        integer(self, "seed", 0, LARGEST_SEED)
        super().__post_init__()

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        if self.in_high_precision(matmul):
            return None
        transformed = self.hadamard and matmul == "kernel_grad"
        at_random = self.stochastic_rounding and operand == "outputs_grad"
        return Quantization(
            format="float4_e2m1fn",
            tile=Tile(BLOCK if operand == "kernel" else 1, BLOCK),
            scale_format="float8_e4m3fn",
            rounding="stochastic" if at_random else "nearest",
            hadamard=BLOCK if transformed else None,
            four_over_six=self.four_over_six,
        )
