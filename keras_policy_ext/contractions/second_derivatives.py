"""The derivatives of a contraction's two gradients.

`y = C(x, w)` is linear in each operand, and so are its gradients. Rounding and
scaling count as the identity, as in the gradients themselves. Let `g` be the
gradient of `y`. Let `v` and `u` be the gradients of the results of
`inputs_grad` and `kernel_grad`. The three derivatives are again matmuls of the
contraction:

| gradient of | is |
|---|---|
| `g` | `forward(v, w) + forward(x, u)` |
| `x` | `inputs_grad(g, u)` |
| `w` | `kernel_grad(v, g)` |

`x` and `w` are the dequantized values saved for the backward pass, so nothing
more is saved. The matmuls are in the compute dtype.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import quantized
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import MATMULS, matmuls_of

Needed = tuple[bool, bool, bool]


def second_gradients(
    bound: Any,
    residuals: Any,
    outputs_grad: Tensor,
    v: Tensor | None,
    u: Tensor | None,
    needed: Needed = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Differentiate both gradients by outputs gradient, inputs and kernel.

    For `v` and `u` see this module. `v` has the shape and dtype of the inputs,
    `u` those of the kernel; None stands for zeros. `needed` says which of the
    three to compute; None is returned for one that is not needed, or zero.
    """
    read = _Operands(bound, residuals, outputs_grad)
    g = x = w = None
    g_needed, x_needed, w_needed = needed
    if g_needed and v is not None:
        g = read.product("forward", read.plain("inputs", v), read.kernel)
    if g_needed and u is not None:
        more = read.product("forward", read.inputs, read.plain("kernel", u))
        g = more if g is None else ops.add(g, more)
    if x_needed and u is not None:
        x = read.product("inputs_grad", read.gradient, read.plain("kernel", u))
    if w_needed and v is not None:
        w = read.product("kernel_grad", read.plain("inputs", v), read.gradient)
        w = ops.cast(w, bound.plan.kernel_dtype)
    return g, x, w


class _Operands:
    """The operands of a contraction, as matrices of its compute dtype.

    They are those of the backward pass: dequantized, or the gradient itself. A
    `Quantized` of them has no quantization, and a scale of 1.
    """

    def __init__(self, bound: Any, residuals: Any, outputs_grad: Tensor):
        """Keep the bound plan, what it saved, and the outputs gradient."""
        self._bound, self._plan = bound, bound.plan
        self._residuals = residuals
        self._outputs_grad = outputs_grad

    @property
    def inputs(self) -> Quantized:
        """The inputs, as the matrix that the forward matmul reads."""
        return self._saved_matrix("inputs", self._residuals.inputs)

    @property
    def kernel(self) -> Quantized:
        """The kernel, as the matrix that the forward matmul reads."""
        return self._saved_matrix("kernel", self._residuals.kernel)

    @property
    def gradient(self) -> Quantized:
        """The outputs gradient, as the matrix of its first matmul."""
        return self.plain("outputs_grad", self._outputs_grad)

    def product(self, matmul: str, a: Quantized, b: Quantized) -> Tensor:
        """Run a matmul of a contraction on two operands that are not rounded.

        They are `Quantized` without a quantization, for `contraction.product`.
        """
        contraction = self._plan.contraction
        engine = self._bound.engine
        kernel, _ = contraction.choose(engine, matmul, a=None, b=None)
        # `a` and `b` have the layout of the first matmul that reads them; for
        # the other one they are transposed.
        operands = (
            read
            if matmul == matmuls_of(operand)[0]
            else contraction.transposed(read)
            for operand, read in zip(MATMULS[matmul], (a, b), strict=True)
        )
        shapes, dtype = self._residuals.shapes, self._plan.inputs_dtype
        return contraction.product(matmul, kernel, *operands, shapes, dtype)

    def plain(self, operand: str, x: Tensor) -> Quantized:
        """Return an unquantized operand as its matrix."""
        plan = self._plan
        home = plan.contraction.operand(operand, x, None)
        plain = quantized.passthrough(ops.cast(home, plan.inputs_dtype))
        return plan.contraction.read(operand, plain)

    def _saved_matrix(self, operand: str, saved: Quantized) -> Quantized:
        """Dequantize a saved operand; return the matrix of its first matmul."""
        bound_operand = getattr(self._bound, operand)
        # The second matmul reads what was saved, or else its transpose.
        across = bound_operand.second.reads_transpose
        quantization = saved.quantization
        wide = saved.decoded(decode=self._bound.engine.decode)
        matrix = bound_operand.matrix(wide)
        values = matrix.values if quantization is None else matrix.dequantize()
        if wide.tensor_scale is not None:
            values = ops.multiply(values, wide.tensor_scale)
        if quantization is not None and quantization.hadamard is not None:
            # Crop the padding of the axis that it sums with the gradient.
            axis, summed = 1 if across else 2, 1 if operand == "inputs" else 2
            size = ops.shape(self.gradient.values)[summed]
            values = quantized.extended().untransformed(values, size, axis)
        plain = quantized.passthrough(ops.cast(values, self._plan.inputs_dtype))
        return plain if across else self._plan.contraction.transposed(plain)
