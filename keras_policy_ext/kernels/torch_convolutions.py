"""PyTorch: convolutions of float32 tensors, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from keras_policy_ext.kernels.keras_convolutions import KerasConvolutions

Tensor = Any


class TorchConvolutions(KerasConvolutions):
    """Keras's convolution, and PyTorch's own backward pass of it."""

    def inputs_grad(
        self, conv: Any, g: Tensor, w: Tensor, shape: Any
    ) -> Tensor:
        """See `Convolutions.inputs_grad`."""
        return _conv_backward(conv, g, g.new_zeros(tuple(shape)), w, 0)

    def kernel_grad(
        self, conv: Any, x: Tensor, g: Tensor, shape: Any
    ) -> Tensor:
        """See `Convolutions.kernel_grad`."""
        return _conv_backward(conv, g, x, g.new_zeros(tuple(shape)), 1)


def _conv_backward(
    conv: Any, g: Tensor, x: Tensor, w: Tensor, operand: int
) -> Tensor:
    """The gradient of a convolution for inputs (0) or kernel (1).

    All tensors are in Keras's layouts: `(batch, *spatial, channels)` or
    channels first, kernel `(*spatial, channels / groups, filters)`.
    """
    last = conv.data_format == "channels_last"
    if last:
        x, g = x.movedim(-1, 1), g.movedim(-1, 1)
    rank = len(conv.strides)
    w = w.permute(rank + 1, rank, *range(rank))
    pads = _same_padding(conv, x.shape[2:], w.shape[2:])
    flat = [p for pair in reversed(pads) for p in pair]
    padded = F.pad(x, flat)
    mask = [operand == 0, operand == 1, False]
    gradients = torch.ops.aten.convolution_backward(
        g.contiguous(),
        padded,
        w,
        None,
        list(conv.strides),
        [0] * rank,
        list(conv.dilation_rate),
        False,
        [0] * rank,
        x.shape[1] // w.shape[1],
        mask,
    )
    if operand == 1:
        return gradients[1].permute(*range(2, rank + 2), 1, 0)
    gradient = gradients[0]
    for axis, (before, _) in enumerate(pads):
        gradient = gradient.narrow(axis + 2, before, x.shape[axis + 2])
    return gradient.movedim(1, -1) if last else gradient


def _same_padding(
    conv: Any, sizes: torch.Size, kernel_sizes: torch.Size
) -> list[tuple[int, int]]:
    """Zeros before and after each spatial axis, as TensorFlow pads."""
    pads = []
    for size, kernel, stride, dilation in zip(
        sizes, kernel_sizes, conv.strides, conv.dilation_rate, strict=True
    ):
        outputs = -(-size // stride)
        reach = (kernel - 1) * dilation + 1
        total = max((outputs - 1) * stride + reach - size, 0)
        total = total if conv.padding == "same" else 0
        pads.append((total // 2, total - total // 2))
    return pads
