"""A matmul of a plan with its kernel, decided once for a device."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.matmuls import Choice, Shapes
from keras_policy_ext.contractions.bound_operands import BoundOperand
from keras_policy_ext.contractions.kinds import Einsum
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import MATMULS


class BoundMatmul:
    """One of the three matmuls.

    Args:
        plan: A `Plan`.
        matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.
        kernel: The kernel that multiplies.
        operands: Both operands, in the order of `MATMULS`.
    """

    def __init__(
        self, plan: Any, matmul: str, kernel: Any, operands: list[BoundOperand]
    ):
        self._matmul, self._kernel = matmul, kernel
        self._contraction = plan.contraction
        self._dtype = _dtype_of(plan, matmul, kernel)
        self._a, self._b = (
            each.first if matmul == each.first.matmul else each.second
            for each in operands
        )

    def __call__(self, a: Quantized, b: Quantized, shapes: Shapes) -> Tensor:
        """Multiply two quantized operands.

        Args:
            a: The first operand, as it was quantized.
            b: The second operand, likewise.
            shapes: Of the inputs and the kernel.
        """
        return self._product(self._kernel, a, b, shapes)

    def add(
        self, a: Quantized, b: Quantized, shapes: Shapes, bias: Tensor | None
    ) -> Tensor:
        """Multiply two quantized operands, and add a bias.

        Args:
            a: See `__call__`.
            b: See `__call__`.
            shapes: See `__call__`.
            bias: In the dtype of the product; None for none.
        """
        product = self(a, b, shapes)
        return product if bias is None else ops.add(product, bias)

    def _product(
        self, kernel: Any, a: Quantized, b: Quantized, shapes: Shapes
    ) -> Tensor:
        a, b = self._a.read(a), self._b.read(b)
        return self._contraction.product(
            self._matmul, kernel, a, b, shapes, self._dtype
        )


class MatmulWithBias(BoundMatmul):
    """A matmul whose kernel adds a number for each column before it rounds."""

    def add(
        self, a: Quantized, b: Quantized, shapes: Shapes, bias: Tensor | None
    ) -> Tensor:
        """Multiply, and have the kernel add the bias where it can."""
        if bias is not None:
            columns = self._contraction.of_columns(bias, shapes)
            kernel = None if columns is None else self._kernel.adding(columns)
            if kernel is not None:
                return self._product(kernel, a, b, shapes)
        return super().add(a, b, shapes, bias)


def bind_matmul(
    plan: Any,
    matmul: str,
    selection: tuple[Any, Choice],
    operands: dict[str, BoundOperand],
) -> BoundMatmul:
    """Choose how a matmul of a plan is computed.

    Args:
        plan: A `Plan`.
        matmul: `"forward"`, `"inputs_grad"` or `"kernel_grad"`.
        selection: Its kernel, and the reason for it.
        operands: How each operand is quantized.
    """
    kernel, _ = selection
    is_einsum = isinstance(plan.contraction, Einsum)
    adds = is_einsum and hasattr(kernel, "adding") and matmul == "forward"
    kind = MatmulWithBias if adds else BoundMatmul
    return kind(plan, matmul, kernel, [operands[x] for x in MATMULS[matmul]])


def _dtype_of(plan: Any, matmul: str, kernel: Any) -> str:
    """Choose the dtype of a product.

    The gradient of a kernel is rounded to the compute dtype. Not to float16,
    in which the gradient of a float32 kernel could overflow; and not where
    the kernel writes float32: a pass that widens what is rounded to 16 bits
    moves 6 bytes for a number.
    """
    if matmul != "kernel_grad":
        return str(plan.inputs_dtype)
    writes = getattr(kernel, "writes_float32", False)
    is_half = plan.inputs_dtype == "float16"
    if is_half or (writes and plan.kernel_dtype == "float32"):
        return str(plan.kernel_dtype)
    return str(plan.inputs_dtype)
