"""Products of numbers in float32, and the scales that belong to them."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext.kernels.contract import Request
from keras_policy_ext.numerics.quantized import Quantized

Tensor = Any


class Emulated:
    """Multiplies the numbers of float8 operands in float32.

    Scales that are equal along the summed axis are applied to the product,
    others to the operands.

    Args:
        product: Of float32 matrices (b, m, k) and (b, n, k), to (b, m, n).
    """

    native = False

    def __init__(self, product: Any):
        self.product = product

    def supports(self, request: Request) -> str | None:
        """Supports everything."""
        return None

    def reason(self, request: Request) -> str:
        """One sentence for the user."""
        return "float8 numbers are multiplied in float32"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`."""
        product = self.product(unscaled(a), unscaled(b))
        return scaled(product, a, b, dtype)


class Plain:
    """Multiplies what is not quantized, accumulated in float32.

    Args:
        product: As for `Emulated`, of any floating dtype.
    """

    native = False

    def __init__(self, product: Any):
        self.product = product

    def supports(self, request: Request) -> str | None:
        """Never in the list of kernels for float8."""
        return "not for float8 operands"

    def reason(self, request: Request) -> str:
        """One sentence for the user."""
        return "a matmul in the compute dtype"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`."""
        return ops.cast(self.product(a.values, b.values), dtype)


def float32(operand: Quantized) -> Tensor:
    """The values of an operand, unscaled, in float32."""
    return ops.cast(operand.values, "float32")


def unscaled(operand: Quantized) -> Tensor:
    """What is multiplied: values, with the scales that stay in the sum."""
    asked = operand.quantization
    if asked is None or asked.scale_leaves_sum:
        return float32(operand)
    return operand.dequantize()


def product_scale(a: Quantized, b: Quantized) -> Tensor:
    """What a product of `unscaled` operands is to be multiplied by."""
    if a.tile.is_whole and b.tile.is_whole:
        return a.scale * b.scale
    one = ops.ones((1, 1, 1), "float32")
    rows, columns = (
        each.spread_scale if each.tile.contracted is None else one
        for each in (a, b)
    )
    return rows * ops.swapaxes(columns, 1, 2)


def are_powers_of_two(*operands: Quantized) -> bool:
    """Whether all scales are, so that multiplying by them rounds nothing."""
    asked = [each.quantization for each in operands]
    return all(q is not None and q.scale_rounding != "nearest" for q in asked)


def scaled(product: Tensor, a: Quantized, b: Quantized, dtype: str) -> Tensor:
    """Apply both scales in float32, then cast to `dtype`."""
    return ops.cast(ops.multiply(product, product_scale(a, b)), dtype)
