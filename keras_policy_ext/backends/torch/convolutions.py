"""PyTorch: convolutions of float32 tensors, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.keras_convolutions import KerasConvolutions

Pads = list[tuple[int, int]]


class TorchConvolutions(KerasConvolutions):
    """Keras's convolution, and PyTorch's own backward pass of it.

    A transposed one is PyTorch's, cut to the window that Keras has.
    """

    def outputs(self, conv: Any, x: Tensor, w: Tensor) -> Tensor:
        """See `Convolutions.outputs`."""
        if not conv.is_transposed:
            return super().outputs(conv, x, w)
        pads = conv.around(tuple(w.shape[:-2]))
        whole = torch.convolution(
            _channels_first(conv, x), _outputs_first(w), None, *_how(conv), 1
        )
        return _as_lying(conv, F.pad(whole, _flat(pads)))

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
    channels first, kernel `(*spatial, channels / groups, filters)`, or
    `(*spatial, filters, channels)` of a transposed one.
    """
    x, g = _channels_first(conv, x), _channels_first(conv, g)
    rank = len(conv.strides)
    pads = [(0, 0)] * rank
    if conv.is_transposed:
        around = conv.around(tuple(w.shape[:rank]))
        cut = [(-before, -after) for before, after in around]
        g = F.pad(g, _flat(cut))
    else:
        pads = _same_padding(conv, x.shape[2:], w.shape[:rank])
    w = _outputs_first(w)
    gradients = torch.ops.aten.convolution_backward(
        g.contiguous(),
        F.pad(x, _flat(pads)),
        w,
        None,
        *_how(conv),
        1 if conv.is_transposed else x.shape[1] // w.shape[1],
        [operand == 0, operand == 1, False],
    )
    if operand == 1:
        return gradients[1].permute(*range(2, rank + 2), 1, 0)
    gradient = gradients[0]
    for axis, (before, _) in enumerate(pads):
        gradient = gradient.narrow(axis + 2, before, x.shape[axis + 2])
    return _as_lying(conv, gradient)


def _how(conv: Any) -> tuple[Any, ...]:
    """Strides, padding, dilation, whether transposed, padding of outputs."""
    none = [0] * len(conv.strides)
    rates = list(conv.dilation_rate)
    return list(conv.strides), none, rates, conv.is_transposed, none


def _channels_first(conv: Any, x: Tensor) -> Tensor:
    return x.movedim(-1, 1) if conv.data_format == "channels_last" else x


def _as_lying(conv: Any, x: Tensor) -> Tensor:
    """The reverse of `_channels_first`."""
    return x.movedim(1, -1) if conv.data_format == "channels_last" else x


def _outputs_first(w: Tensor) -> Tensor:
    """A kernel of Keras as PyTorch has it."""
    rank = w.dim() - 2
    return w.permute(rank + 1, rank, *range(rank))


def _flat(pads: Pads) -> list[int]:
    """Pads of each axis as `F.pad` wants them: the last axis first."""
    return [pad for pair in reversed(pads) for pad in pair]


def _same_padding(
    conv: Any, sizes: torch.Size, kernel_sizes: torch.Size
) -> Pads:
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
