"""The kernel that is saved for the backward pass: its codes, or the weights.

Where matmuls read an operand in one layout only, a kernel is quantized into
two: one for the forward pass and one for the gradient of the inputs. To save
the second would take a byte for each weight of a model. It is computed in the
backward pass instead, from the same weights and the same scale, with the same
bits. Where one compiled step computes the gradients and updates the weights,
XLA fuses this into the update, and moves no more bytes (JAX 0.10).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.matmuls import Choice, Engine
from keras_policy_ext.numerics.quantized import Quantized


class SavedKernel:
    """Saves the codes of a kernel."""

    def save(self, kernel: Tensor, codes: Quantized) -> Quantized:
        """Return what is saved of a kernel.

        Args:
            kernel: The weights.
            codes: The kernel as `inputs_grad` reads it.
        """
        return codes

    def load(
        self, saved: Quantized, outputs_grad: Quantized
    ) -> tuple[Quantized, Quantized]:
        """Return output gradient and kernel as `inputs_grad` reads them.

        Args:
            saved: From `save`, with the quantization of the kernel.
            outputs_grad: Quantized.
        """
        return outputs_grad, saved


class RequantizedKernel(SavedKernel):
    """Saves the weights, and quantizes them again in the backward pass.

    Args:
        contraction: What is multiplied.
        engine: The kernels of the framework.
    """

    def __init__(self, contraction: Any, engine: Engine):
        self._contraction, self._engine = contraction, engine

    def save(self, kernel: Tensor, codes: Quantized) -> Quantized:
        """Return the weights with the scale of their codes."""
        # With a quantization `narrowed` would make codes of the weights.
        return dataclasses.replace(codes, values=kernel, quantization=None)

    def load(
        self, saved: Quantized, outputs_grad: Quantized
    ) -> tuple[Quantized, Quantized]:
        """Quantize the weights again, once the scale of the gradient is known.

        The two scales are tied together, so that a compiler does not quantize
        the kernel earlier, in the forward pass.
        """
        quantization: Any = saved.quantization
        scales = (ops.reshape(x.scale, ()) for x in (saved, outputs_grad))
        scale, other = backends.current().known_together(*scales)
        home = self._contraction.operand("kernel", saved.values, quantization)
        values = self._engine.narrow_cast(
            home, scale, quantization.format, False
        )
        outputs_grad = dataclasses.replace(
            outputs_grad, scale=ops.reshape(other, (1, 1, 1))
        )
        return outputs_grad, saved.with_values(values)


def bind_saved_kernel(
    plan: Any, engine: Engine, selections: dict[str, tuple[Any, Choice]]
) -> SavedKernel:
    """Choose what is saved of the kernel of a plan.

    Args:
        plan: A `Plan`.
        engine: The kernels of the framework.
        selections: The kernel of each matmul, and the reason for it.
    """
    quantization = plan.operands.quantizations["kernel", "forward"]
    requantizes = (
        engine.requantizes_kernels()
        and plan.gathering is None
        and plan.operands.shares_quantization["kernel"]
        and quantization is not None
        and quantization.keeps_axes
        and quantization.rounding == "nearest"
        and all(selections[m][1].native for m in ("forward", "inputs_grad"))
    )
    if requantizes:
        return RequantizedKernel(plan.contraction, engine)
    return SavedKernel()
