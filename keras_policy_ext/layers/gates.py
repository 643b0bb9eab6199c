"""The product with some of the gates in a kernel of a recurrent cell."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras import ops

from keras_policy_ext import kernels
from keras_policy_ext.kernels import einsum

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Gates(kernels.Einsum):
    """An einsum with a kernel whose columns are those of several gates.

    The kernel is quantized whole, so that all gates have one scale and the
    amax is that of the whole kernel; then it is cut.

    Attributes:
        equation: Over a kernel of the axes (inputs, gate, unit).
        count: How many gates are in the kernel.
        first: The first gate that is multiplied.
        last: The gate after the last one.
    """

    count: int
    first: int
    last: int

    def forward(
        self,
        engine: kernels.Engine,
        x: kernels.Quantized,
        w: kernels.Quantized,
        dtype: str,
    ) -> Tensor:
        """The outputs, in `dtype`."""
        return super().forward(engine, x, self._cut(w), dtype)

    def inputs_grad(
        self,
        engine: kernels.Engine,
        g: kernels.Quantized,
        w: kernels.Quantized,
        shape: Any,
        dtype: str,
    ) -> Tensor:
        """The gradient of inputs of this shape, in `dtype`."""
        return super().inputs_grad(engine, g, self._cut(w), shape, dtype)

    def kernel_grad(
        self,
        engine: kernels.Engine,
        x: kernels.Quantized,
        g: kernels.Quantized,
        shape: Any,
        dtype: str,
    ) -> Tensor:
        """The gradient of a whole kernel of this shape, in `dtype`."""
        rows, columns = shape
        cut = rows, self.last - self.first, columns // self.count
        gradient = super().kernel_grad(engine, x, g, cut, dtype)
        around = (0, 0), (self.first, self.count - self.last), (0, 0)
        return ops.reshape(ops.pad(gradient, around), (rows, columns))

    def _cut(self, w: kernels.Quantized) -> kernels.Quantized:
        rows, columns = w.values.shape
        shape = rows, self.count, columns // self.count
        values = ops.reshape(w.values, shape)[:, self.first : self.last]
        return kernels.Quantized(values, w.scale)


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
    equation = einsum.explicit(f"{inputs},igu->...gu", rank, 3)
    return Gates(equation, count, first, last)
