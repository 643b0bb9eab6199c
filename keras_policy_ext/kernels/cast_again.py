"""Kernels that are cast again for the backward pass, and whose codes go.

Where matmuls read an operand in one layout only, a kernel is cast into two:
one for the forward pass and one for the gradient of the inputs. The second
would be held from one to the other, a byte for each weight of a model. It is
made of the same kernel and the same scale when it is needed instead, and has
the same bits. XLA makes it in the kernel that updates the weights, where a
step does that at once: it then moves no more bytes (JAX 0.10).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from keras import ops

from keras_policy_ext import frameworks
from keras_policy_ext.kernels import engines
from keras_policy_ext.numerics.quantized import Quantized

Tensor = Any


def is_cast_again(plan: Any) -> bool:
    """Whether the kernel of a plan is.

    Args:
        plan: A `Plan`.
    """
    asked = plan.asked["kernel", "forward"]
    return (
        engines.engine().casts_again()
        and plan.gathering is None
        and plan.operands.read_once["kernel"]
        and asked is not None
        and asked.keeps_axes
        and asked.rounding == "nearest"
        and all(plan.choose(m)[1].native for m in ("forward", "inputs_grad"))
    )


def kept(plan: Any, kernel: Tensor, read: Quantized) -> Quantized:
    """What is kept of a kernel: the weights themselves, or what is read.

    Args:
        plan: A `Plan`.
        kernel: As it is.
        read: What `inputs_grad` reads.
    """
    if not is_cast_again(plan):
        return read
    # With a quantization `narrowed` would make codes of the weights.
    return dataclasses.replace(read, values=kernel, quantization=None)


def read(
    plan: Any, kept: Quantized, outputs_grad: Quantized
) -> tuple[Quantized, Quantized]:
    """Output gradient and kernel, quantized, as `inputs_grad` reads them.

    Args:
        plan: A `Plan`.
        kept: From `kept`, with what was asked for.
        outputs_grad: Quantized, so that its scale is known in the backward
            pass. The scale of the kernel is not used before.
    """
    if not is_cast_again(plan):
        return outputs_grad, kept
    asked: Any = kept.quantization
    scales = (ops.reshape(x.scale, ()) for x in (kept, outputs_grad))
    scale, other = frameworks.current().at_once(*scales)
    home = plan.contraction.operand("kernel", kept.values, asked)
    values = engines.engine().narrow_cast(home, scale, asked.format, False)
    outputs_grad = dataclasses.replace(
        outputs_grad, scale=ops.reshape(other, (1, 1, 1))
    )
    return outputs_grad, kept.with_values(values)
