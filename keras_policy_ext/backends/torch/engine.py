"""PyTorch: matmul kernels and convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.emulated import (
    LARGEST,
    SMALLEST,
    Emulated,
    KerasConvolutions,
    Plain,
    are_powers_of_two,
    exact_in,
    times_scales,
    unscaled,
)
from keras_policy_ext.backends.interface import Shape
from keras_policy_ext.backends.matmuls import Convolution, Engine
from keras_policy_ext.backends.torch import backend, casts, straight
from keras_policy_ext.backends.torch.backend import is_known, is_real
from keras_policy_ext.backends.torch.scaled_mm import (
    ScaledMM,
    ScaledMMOfBlocks,
    ScaledMMOfMatrices,
    ScaledMMOfMX,
    ScaledMMOfRows,
)
from keras_policy_ext.numerics.quantized import Quantized

Pads = list[tuple[int, int]]
"""The zeros before and after each spatial axis; negative for a crop."""


class TorchConvolutions(KerasConvolutions):
    """Keras's convolutions, with the backward pass of PyTorch.

    A transposed convolution is PyTorch's, cropped to the window of Keras.
    """

    @override
    def outputs(self, conv: Convolution, x: Tensor, w: Tensor) -> Tensor:
        """Compute a convolution; PyTorch's own if it is transposed."""
        if not conv.is_transposed:
            return super().outputs(conv, x, w)
        pads = conv.around(tuple(w.shape[:-2]))
        whole = torch.convolution(
            _channels_first(conv, x),
            _outputs_first(w),
            None,  # No bias.
            *_conv_options(conv),
            1,  # Keras's transposed convolutions have one group.
        )
        return _channels_as_given(conv, F.pad(whole, _flat(pads)))

    @override
    def inputs_grad(
        self, conv: Convolution, g: Tensor, w: Tensor, shape: Shape
    ) -> Tensor:
        x = g.new_zeros(tuple(shape))  # Only its shape matters.
        return _conv_backward(conv, g, x, w, operand="inputs")

    @override
    def kernel_grad(
        self, conv: Convolution, x: Tensor, g: Tensor, shape: Shape
    ) -> Tensor:
        w = g.new_zeros(tuple(shape))  # Only its shape matters.
        return _conv_backward(conv, g, x, w, operand="kernel")


def _conv_backward(
    conv: Convolution, g: Tensor, x: Tensor, w: Tensor, operand: str
) -> Tensor:
    """Return the gradient of a convolution's inputs or kernel."""
    # All tensors have Keras's layouts: `(batch, *spatial, channels)` or
    # channels first, and `(*spatial, channels / groups, filters)` for the
    # kernel, or `(*spatial, filters, channels)` for a transposed one.
    x, g = _channels_first(conv, x), _channels_first(conv, g)
    rank = len(conv.strides)
    pads = [(0, 0)] * rank
    if conv.is_transposed:
        # As many as the forward pass added are cropped, and the reverse.
        outputs_pads = conv.around(tuple(w.shape[:rank]))
        g = F.pad(g, [-pad for pad in _flat(outputs_pads)])
    else:
        pads = _same_padding(conv, x.shape[2:], w.shape[:rank])
    w = _outputs_first(w)
    inputs_grad, kernel_grad, _ = torch.ops.aten.convolution_backward(
        g.contiguous(),
        F.pad(x, _flat(pads)),
        w,
        None,  # No bias.
        *_conv_options(conv),
        1 if conv.is_transposed else x.shape[1] // w.shape[1],  # Groups.
        [operand == "inputs", operand == "kernel", False],
    )
    if operand == "kernel":
        return kernel_grad.permute(*range(2, rank + 2), 1, 0)  # Keras's axes.
    for axis, (before, _) in enumerate(pads):
        inputs_grad = inputs_grad.narrow(axis + 2, before, x.shape[axis + 2])
    return _channels_as_given(conv, inputs_grad)


def _conv_options(conv: Convolution) -> tuple[Any, ...]:
    """Return the arguments of `torch.convolution` from strides to `groups`.

    There is no padding: the caller pads or crops.
    """
    no_padding = [0] * len(conv.strides)
    rates = list(conv.dilation_rate)
    return list(conv.strides), no_padding, rates, conv.is_transposed, no_padding


def _channels_first(conv: Convolution, x: Tensor) -> Tensor:
    """Move channels from where Keras has them to axis 1."""
    return x.movedim(-1, 1) if conv.data_format == "channels_last" else x


def _channels_as_given(conv: Convolution, x: Tensor) -> Tensor:
    """Move channels from axis 1 back to where Keras has them."""
    return x.movedim(1, -1) if conv.data_format == "channels_last" else x


def _outputs_first(w: Tensor) -> Tensor:
    """Transpose a kernel from Keras's axis order to PyTorch's."""
    rank = w.dim() - 2
    return w.permute(rank + 1, rank, *range(rank))


def _flat(pads: Pads) -> list[int]:
    """Flatten pairs of paddings for `F.pad`, which begins at the last axis."""
    return [pad for pair in reversed(pads) for pad in pair]


def _same_padding(
    conv: Convolution, sizes: torch.Size, kernel_sizes: torch.Size
) -> Pads:
    """Return the zeros that `padding="same"` adds; none for another padding."""
    if conv.padding != "same":
        return [(0, 0)] * len(conv.strides)
    pads = []
    for size, kernel_size, stride, dilation in zip(
        sizes, kernel_sizes, conv.strides, conv.dilation_rate, strict=True
    ):
        outputs_size = -(-size // stride)
        window = (kernel_size - 1) * dilation + 1
        total = max((outputs_size - 1) * stride + window - size, 0)
        pads.append((total // 2, total - total // 2))
    return pads


Array = np.ndarray[Any, Any]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (b, m, k) by (b, n, k) transposed, to (b, m, n)."""
    if a.shape[0] == 1:
        return torch.matmul(a.squeeze(0), b.squeeze(0).t()).unsqueeze(0)
    return torch.matmul(a, b.mT)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as `_product` does, in float64 or else in float32."""
    if a.dtype == torch.float64:
        return _product(a, b)
    return _product(a.float(), b.float())


class Float32Matmul(Emulated):
    """An emulated kernel that multiplies in float32, or exactly in bfloat16."""

    @override
    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """Multiply the decoded operands in the fastest exact way."""
        # `fast` is ignored: it is for float8 matmuls of a GPU.
        if dtype == "bfloat16" and _fits_bfloat16(a, b):
            if not _have_one_scale_each(a, b):
                return self._product_in_bfloat16(a, b)
            scale = float(a.scale * b.scale)
            if SMALLEST <= scale <= LARGEST:
                return _scaled_bfloat16_product(a, b, scale)
        if _are_for_tensor_cores(a, b):
            product = _float32_sums(a, b)
        else:
            product = self.product(unscaled(a), unscaled(b))
        product = times_scales(product, a, b, torch.Tensor.mul_)
        return product.to(getattr(torch, dtype))

    def _product_in_bfloat16(self, a: Quantized, b: Quantized) -> Tensor:
        """Multiply in bfloat16 two operands whose scales are powers of two."""
        # The operands are then exact in bfloat16, and the scales that multiply
        # the output do not change how it is rounded.
        product = self.product(*(unscaled(x).bfloat16() for x in (a, b)))
        product = product.float()
        return times_scales(product, a, b, torch.Tensor.mul_).bfloat16()


ENGINE = Engine(
    name="torch",
    device=backend.here,
    matmuls=(
        ScaledMM(),
        ScaledMMOfMatrices(),
        ScaledMMOfRows(),
        ScaledMMOfBlocks(),
        ScaledMMOfMX(),
        Float32Matmul(_product),
    ),
    plain=Plain(_wide_product),
    convolutions=TorchConvolutions("torch has no float8 convolution"),
    cast=casts.cast,
    narrow_cast=casts.narrow_cast,
    widen=casts.widen,
    both_layouts=casts.TritonCasts(),
    straight=straight.bind,
)


def _fits_bfloat16(a: Quantized, b: Quantized) -> bool:
    """Return True if bfloat16 is as exact as float32 here, and faster."""
    # Bfloat16 represents every float8 value exactly, also times a power of two.
    # 256x512x2048 on a core with AVX512-BF16: 2.5 ms against 5.6 ms in float32;
    # with scales of 128 blocks 1.7 ms against 10 ms (torch 2.13).
    return (
        a.values.dtype in (torch.float32, torch.bfloat16)
        and (_have_one_scale_each(a, b) or are_powers_of_two(a, b))
        and is_known(a.scale)
        and backend.multiplies_bfloat16()
    )


def _are_for_tensor_cores(a: Quantized, b: Quantized) -> bool:
    """Return True if a GPU can multiply these operands exactly in 16 bits."""
    if not _is_cuda(a.values):
        return False
    narrow = backend.here().multiplies_in
    return (
        exact_in(narrow, a, b)
        # Tensors without data are for shapes alone.
        and is_real(a.values)
        and backend.sums_in_float32(narrow)
    )


def _is_cuda(x: Tensor) -> bool:
    return bool(x.device.type == "cuda")


def _float32_sums(a: Quantized, b: Quantized) -> Tensor:
    """Multiply the operands' values in 16 bits; return float32 sums."""
    narrow = getattr(torch, backend.here().multiplies_in)
    x, y = unscaled(a).to(narrow), unscaled(b).to(narrow).mT
    if x.shape[0] > 1:
        return torch.bmm(x, y, out_dtype=torch.float32)
    sums = torch.mm(x.squeeze(0), y.squeeze(0), out_dtype=torch.float32)
    return sums.unsqueeze(0)


def _have_one_scale_each(*operands: Quantized) -> bool:
    """Return True if each operand has one scale, and rounds to nearest."""
    quantizations = [each.quantization for each in operands]
    return all(each is not None and each.keeps_axes for each in quantizations)


def _scaled_bfloat16_product(
    a: Quantized, b: Quantized, scale: float
) -> Tensor:
    """Multiply in bfloat16; apply the scale before the result is rounded."""
    # `alpha` multiplies the float32 sums before they are rounded. Scaling a
    # bfloat16 result afterwards would round twice.
    x, y = a.values.bfloat16(), b.values.bfloat16().mT
    if x.shape[0] == 1:
        zero, x, y = x.new_zeros((1, 1)), x.squeeze(0), y.squeeze(0)
        return torch.addmm(zero, x, y, beta=0, alpha=scale).unsqueeze(0)
    return torch.baddbmm(x.new_zeros((1, 1, 1)), x, y, beta=0, alpha=scale)
