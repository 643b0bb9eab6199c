"""PyTorch: a rectifier that keeps a bit a number for its gradient."""

from __future__ import annotations

from typing import Any

import torch

from keras_policy_ext._types import Tensor

_FIRST_BITS = 0x0102040810204080
"""Eight bytes of 0 or 1, read as one int64 and multiplied by this, have their
bits in the highest byte: byte i becomes bit i. Source: Warren, "Hacker's
Delight", 7-2."""


class Relu(torch.autograd.Function):
    """`torch.relu`, whose own gradient keeps the outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The outputs."""
        outputs = torch.relu(x)
        ctx.axes = _as_in_memory(outputs)
        ctx.save_for_backward(_kept(outputs.permute(ctx.axes)))
        return outputs

    @staticmethod
    def backward(ctx: Any, outputs_grad: Tensor) -> Tensor:
        """The gradient of `x`."""
        (kept,) = ctx.saved_tensors
        mask = _mask(kept, outputs_grad.permute(ctx.axes).shape)
        # Back to the order in memory of the outputs: the gradient gets the
        # order of the mask, and sums over it depend on the order.
        back = [ctx.axes.index(axis) for axis in range(mask.dim())]
        passes = mask.permute(back).to(outputs_grad.dtype)
        return torch.ops.aten.threshold_backward(outputs_grad, passes, 0)


def _as_in_memory(x: Tensor) -> list[int]:
    """The axes of a tensor, in the order in which it lies in memory."""
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def _kept(outputs: Tensor) -> Tensor:
    """Where outputs are not zero: eight numbers in a byte on a CPU.

    A byte each on other devices, where memory is fast and each operation is
    one more kernel; and where numbers do not fill bytes.
    """
    mask = outputs.bool()
    if mask.device.type != "cpu" or mask.numel() % 8:
        return mask
    eights = mask.flatten().view(torch.int64)
    bits = eights.mul(_FIRST_BITS).bitwise_right_shift_(56)
    return bits.to(torch.uint8)


def _mask(kept: Tensor, shape: Any) -> Tensor:
    """The mask of what `_kept` made of outputs of a shape."""
    if kept.dtype == torch.bool:
        return kept
    eights = _EIGHTS.index_select(0, kept.int())
    return eights.view(torch.bool).view(shape)


# This module may be loaded while a step is being compiled.
@torch.compiler.disable
def _eights() -> Tensor:
    """The eight bytes that each byte of bits stands for, as one number."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return bits.bool().view(torch.int64).flatten()


_EIGHTS = _eights()
