"""Kernels that are stored in few bits and not trained."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from keras_policy_ext import formats
from keras_policy_ext._types import override
from keras_policy_ext.recipes.quantization import WHOLE, Quantization, Tile
from keras_policy_ext.recipes.recipe import HIGH_PRECISION, REGISTRY, Recipe
from keras_policy_ext.stored_kernels import (
    GRANULARITIES,
    SCALE_FORMATS,
    WEIGHTS,
    tile_of,
)

ACTIVATIONS = (None, "dynamic", "static")
"""How inputs are quantized: not at all, or with one of two kinds of scale."""

_TILES = {"channel": Tile(free=1), "tensor": WHOLE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenKernels(Recipe):
    """Kernels that are stored in few bits and not trained.

    `keras_policy_ext.freeze` gives this recipe to layers. A kernel has the
    values that it was rounded to. Gradients pass through its matmul in the
    compute dtype, with the dequantized kernel. See `stored_kernels.quantize`
    for its scales.

    Attributes:
        weights: Their format: `"float8_e4m3fn"`, `"float8_e5m2"`,
            `"float4_e2m1fn"`, or integers from `"int8"` to `"int2"`.
        per: The granularity of the scales: `"channel"` (one per output of the
            kernel), `"tensor"`, `"block"` (one per 128x128 elements), or
            from `"group16"` to `"group128"` (one per so many elements that a
            matmul sums).
        activations: How inputs are quantized: `"dynamic"` with one scale per
            token, `"static"` with one fixed scale, which integers have not.
            They are in e4m3fn, and in int8 if the kernel has integers. None
            does not quantize them, as always beside `"float4_e2m1fn"`.
        scale_format: The format of the scales: `"float32"`, `"bfloat16"`,
            `"float8_e8m0fnu"`, which has the powers of two, or
            `"float8_e4m3fn"`, times one power of two per kernel.

    Raises:
        ValueError: If a field has another value.
    """

    name: ClassVar[str] = "frozen"
    trains: ClassVar[bool] = False

    weights: str = "float8_e4m3fn"
    per: str = "channel"
    activations: str | None = None
    scale_format: str = "float32"
    inputs_grad: str = HIGH_PRECISION
    kernel_grad: str = HIGH_PRECISION

    def __post_init__(self) -> None:
        """Check the fields."""
        _check(self, "weights", WEIGHTS)
        _check(self, "per", GRANULARITIES)
        _check(self, "activations", ACTIVATIONS)
        _check(self, "scale_format", SCALE_FORMATS)
        _check_inputs(self)
        if self.has_integers and self.activations == "static":
            raise ValueError(
                "A kernel of integers has no static scale of its inputs. "
                f"Received: weights={self.weights!r} and activations='static'. "
                "Allowed: None, or 'dynamic', with which inputs are in int8 by "
                "token. Pass one of them."
            )
        super().__post_init__()

    @property
    @override
    def mode(self) -> str:
        return "integers" if self.has_integers else self.family

    @property
    def has_integers(self) -> bool:
        """True if kernels are stored as integers."""
        return formats.get(self.weights).is_integer

    @property
    def for_activations(self) -> Recipe:
        """The recipe for two activations: with `"dynamic"` a scale per row.

        Otherwise each tensor is scaled by its own amax, if at all. Beside
        integers two activations are not quantized.
        """
        rounds = not self.in_high_precision("forward")
        if self.activations != "dynamic" or not rounds:
            return super().for_activations
        rowwise: Any = REGISTRY["rowwise"]
        return rowwise(
            power_of_two=False,
            inputs_grad=HIGH_PRECISION,
            kernel_grad=HIGH_PRECISION,
        )

    @override
    def quantization(self, operand: str, matmul: str) -> Quantization | None:
        """Return how a forward operand is quantized; else None."""
        # Where inputs are not quantized, the kernel is widened and multiplied.
        if matmul != "forward" or self.activations is None:
            return None
        if self.has_integers:  # No device has a matmul of these here.
            return None
        if self.in_high_precision(matmul):
            return None
        if operand == "kernel":
            tile = _TILES.get(self.per) or Tile(*(tile_of(self.per) or ()))
            return Quantization(format=self.weights, tile=tile)
        is_static = self.activations == "static"
        tile = WHOLE if is_static else Tile(free=1)
        return Quantization(format=formats.ALIASES["e4m3"], tile=tile)


def _check_inputs(recipe: FrozenKernels) -> None:
    """Raise if the inputs beside a kernel in four-bit floats are quantized."""
    if recipe.weights == "float4_e2m1fn" and recipe.activations is not None:
        raise ValueError(
            "Inputs are not quantized beside a kernel in float4_e2m1fn. "
            f"Received: weights={recipe.weights!r} and activations="
            f"{recipe.activations!r}. Allowed: activations=None. Leave it "
            "out, or take integers."
        )


def _check(
    recipe: FrozenKernels, name: str, allowed: tuple[str | None, ...]
) -> None:
    """Raise if a field of a recipe is not one of the allowed values."""
    value = getattr(recipe, name)
    if value not in allowed:
        raise ValueError(
            f"Wrong {name} of {type(recipe).__name__}. Received: {value!r}. "
            f"Allowed: {', '.join(map(repr, allowed))}. Pass one of them."
        )
