"""The product with some of the gates in a kernel of a recurrent cell."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from keras import ops

from keras_policy_ext import contractions
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import equations
from keras_policy_ext.contractions.kinds import in_one_scale
from keras_policy_ext.numerics.quantized import Quantized


@dataclasses.dataclass(frozen=True)
class Gates(contractions.Einsum):
    """An einsum with a kernel whose columns are those of several gates.

    With one scale for a tensor the kernel is quantized whole, so that all
    gates have that scale and the amax is that of the whole kernel; then it
    is cut. With finer tiles it is cut first: each gate is a matrix of its own.

    Attributes:
        equation: Over a kernel of the axes (inputs, gate, unit).
        count: How many gates are in the kernel.
        first: The first gate that is multiplied.
        last: The gate after the last one.
    """

    count: int
    first: int
    last: int

    reads_what_is_quantized: ClassVar[bool] = False

    def operand(self, name: str, x: Tensor, asked: Any) -> Tensor:
        """See `Contraction.operand`; of a kernel (inputs, gates * units)."""
        if name == "kernel":
            x = x if in_one_scale(asked) else self._cut(x)
        return super().operand(name, x, asked)

    def kernel_axes(self, axes: Any, asked: Any) -> tuple[Any, ...]:
        """See `Contraction.kernel_axes`; where it is cut, of its rows."""
        if in_one_scale(asked):
            return tuple(axes)
        rows, columns = axes
        gates, features, units = super().kernel_axes((rows, (), ()), asked)
        return gates, None if columns else features, units

    def read(self, name: str, quantized: Quantized) -> Quantized:
        """See `Contraction.read`: the gates that are multiplied."""
        if name == "kernel" and in_one_scale(quantized.quantization):
            quantized = quantized.with_values(self._cut(quantized.values))
        return super().read(name, quantized)

    def product(
        self, matmul: str, kernel: Any, a: Any, b: Any, shapes: Any, dtype: str
    ) -> Tensor:
        """See `Contraction.product`; of a whole kernel the gradient."""
        inputs, (rows, columns) = shapes
        cut = rows, self.last - self.first, columns // self.count
        result = super().product(matmul, kernel, a, b, (inputs, cut), dtype)
        if matmul != "kernel_grad":
            return result
        around = (0, 0), (self.first, self.count - self.last), (0, 0)
        return ops.reshape(ops.pad(result, around), (rows, columns))

    def _cut(self, kernel: Tensor) -> Tensor:
        rows, columns = kernel.shape
        shape = rows, self.count, columns // self.count
        return ops.reshape(kernel, shape)[:, self.first : self.last]


def gates_of(
    rank: int, per_gate: bool, first: int, last: int, count: int
) -> Gates:
    """The contraction of a cell.

    Args:
        rank: Of the inputs: (..., features), or (..., gate, features) if
            each gate has inputs of its own.
        per_gate: Whether it has.
        first: The first gate that is multiplied.
        last: The gate after the last one.
        count: How many gates are in the kernel.

    Returns:
        A contraction to (..., gate, units).
    """
    inputs = "...gi" if per_gate else "...i"
    equation = equations.explicit(f"{inputs},igu->...gu", rank, 3)
    return Gates(equation, count, first, last)
