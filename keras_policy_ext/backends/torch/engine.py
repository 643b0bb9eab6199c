"""PyTorch: matmul kernels, convolutions, and state arithmetic on a CPU."""

from __future__ import annotations

import math
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
from keras_policy_ext.backends.matmuls import Convolution, Engine, StateKernels
from keras_policy_ext.backends.torch import backend, casts, straight
from keras_policy_ext.backends.torch.backend import is_known, is_real
from keras_policy_ext.backends.torch.scaled_mm import (
    ScaledMM,
    ScaledMMOfBlocks,
    ScaledMMOfMatrices,
    ScaledMMOfMX,
    ScaledMMOfRows,
)
from keras_policy_ext.numerics.observations import (
    ROUNDING,
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.scale_sources import DelayedSource, HistoryScales
from keras_policy_ext.numerics.scaling import inverted_of_number
from keras_policy_ext.recipes import OPERANDS

Pads = list[tuple[int, int]]


class TorchConvolutions(KerasConvolutions):
    """Keras's convolutions, with the backward pass of PyTorch.

    A transposed convolution is PyTorch's, cropped to the window of Keras.
    """

    @override
    def outputs(self, conv: Convolution, x: Tensor, w: Tensor) -> Tensor:
        if not conv.is_transposed:
            return super().outputs(conv, x, w)
        pads = conv.around(tuple(w.shape[:-2]))
        whole = torch.convolution(
            _channels_first(conv, x),
            _outputs_first(w),
            None,
            *_conv_options(conv),
            1,
        )
        return _channels_as_given(conv, F.pad(whole, _flat(pads)))

    @override
    def inputs_grad(
        self, conv: Convolution, g: Tensor, w: Tensor, shape: Shape
    ) -> Tensor:
        return _conv_backward(conv, g, g.new_zeros(tuple(shape)), w, 0)

    @override
    def kernel_grad(
        self, conv: Convolution, x: Tensor, g: Tensor, shape: Shape
    ) -> Tensor:
        return _conv_backward(conv, g, x, g.new_zeros(tuple(shape)), 1)


def _conv_backward(
    conv: Convolution, g: Tensor, x: Tensor, w: Tensor, operand: int
) -> Tensor:
    """Return the gradient of a convolution's operand: 0 inputs, 1 kernel."""
    # All tensors have Keras's layouts: `(batch, *spatial, channels)` or
    # channels first, and `(*spatial, channels / groups, filters)` for the
    # kernel, or `(*spatial, filters, channels)` for a transposed one.
    x, g = _channels_first(conv, x), _channels_first(conv, g)
    rank = len(conv.strides)
    pads = [(0, 0)] * rank
    if conv.is_transposed:
        # The zeros that the forward pass added around its outputs; negative:
        # what it cropped. So the gradient is cropped, or padded, by as many.
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
        *_conv_options(conv),
        1 if conv.is_transposed else x.shape[1] // w.shape[1],
        [operand == 0, operand == 1, False],
    )
    if operand == 1:
        return gradients[1].permute(*range(2, rank + 2), 1, 0)  # Keras's axes.
    gradient = gradients[0]
    for axis, (before, _) in enumerate(pads):
        gradient = gradient.narrow(axis + 2, before, x.shape[axis + 2])
    return _channels_as_given(conv, gradient)


def _conv_options(conv: Convolution) -> tuple[Any, ...]:
    """Return strides, padding, dilation, transposed and output padding."""
    none = [0] * len(conv.strides)
    rates = list(conv.dilation_rate)
    return list(conv.strides), none, rates, conv.is_transposed, none


def _channels_first(conv: Convolution, x: Tensor) -> Tensor:
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
    """Return the zeros to pad before and after each spatial axis."""
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


Array = np.ndarray[Any, Any]

FIRST = 2 + SLOTS
"""The first column of the history in a row, after the last used scale."""

_KERNEL = OPERANDS.index("kernel")


class CpuStates(StateKernels):
    """NumPy arithmetic of scales and states on a CPU; see `StateKernels`."""

    @override
    def supports(self, source: object, state: Tensor) -> str | None:
        if type(source) is not DelayedSource:
            return "this arithmetic is that of delayed scaling"
        there = is_real(state) and state.device.type == "cpu"
        if not there or state.dtype != torch.float32:
            return "this state has no float32 numbers on a CPU"
        # An export compiles too.
        if torch.compiler.is_compiling():
            return "a compiler does not see what NumPy does"
        return None

    @override
    def history_scales(
        self, source: DelayedSource, state: Tensor
    ) -> HistoryScales:
        before = _read_rows(source, state.detach().numpy())
        _, scales_before = zip(*before, strict=True)
        scales = np.array(scales_before, np.float32)
        unseen = scales == 0.0 if source.starts_from_current else None
        return HistoryScales(
            torch.from_numpy(scales),
            None if unseen is None else torch.from_numpy(unseen),
        )

    @override
    def observation(
        self, source: DelayedSource, amaxes: list[Tensor], slot: int
    ) -> Tensor:
        rows = np.zeros((len(OPERANDS), source.layout.width), "float32")
        rows[:, 0] = UNIT
        rows[:, 1 + slot % SLOTS] = [UNIT * amax.item() for amax in amaxes]
        return torch.from_numpy(rows)

    @override
    def settle(
        self, source: DelayedSource, value: Tensor, previous: Tensor
    ) -> Tensor:
        value, previous = value.detach(), previous.detach()
        values, settled = value.numpy(), previous.numpy().copy()
        before = _read_rows(source, settled)
        with np.errstate(over="ignore"):
            for row, numbers in enumerate(value[:, : FIRST + 1].tolist()):
                # The mark of a settled row is negative, zeros change nothing.
                if numbers[0] < 0.0:
                    _assign_row(settled[row], values[row])
                elif numbers[0] > 0.0 and _is_observation(numbers):
                    newest = _newest(numbers, value[row], row == _KERNEL)
                    _enter_row(settled[row], newest, *before[row])
                elif numbers[0] > 0.0:
                    settled[row] = 0.0
                    settled[row, 0] = UNSEEN
        return torch.from_numpy(settled)


def _read_rows(source: DelayedSource, state: Array) -> list[tuple[bool, float]]:
    """Return, for each row of a state, whether it is intact, and its scale.

    `limits_with_margin` are the largest values of the operands' formats.
    """
    history = state[:, FIRST:]
    largest = history.max(axis=1).tolist()
    newest_only = source.recipe.amax_compute == "most_recent"
    amaxes = history[:, 0].tolist() if newest_only else largest
    heads = state[:, :FIRST].tolist()
    initial: float = source.initial
    rows = []
    for head, peak, amax, limit in zip(
        heads, largest, amaxes, source.limits_with_margin, strict=True
    ):
        first, *slots, stored = head  # Mark, slots, last used scale.
        is_intact = first == VALID_MARK and not any(slots) and peak < math.inf
        if is_intact and amax > 0.0:
            scale = inverted_of_number(amax, limit)
        else:
            scale = stored if is_intact and stored > 0.0 else initial
        rows.append((is_intact, scale))
    return rows


def _is_observation(numbers: list[float]) -> bool:
    """Return True if `numbers`, the first of a row, are an observation."""
    # See `StateLayout._is_observation`.
    uses = _rounded(numbers[0] / UNIT)
    *slots, scale, newest = numbers[1:]
    uses_needed = math.inf if scale or newest else SLOTS - slots.count(0.0)
    return uses >= uses_needed and (uses.is_integer() or math.isinf(uses))


def _newest(numbers: list[float], row: Tensor, is_kernel: bool) -> float | None:
    """Return the amax of an observation; None if an amax is not finite."""
    entries = numbers[1:]
    if not all(map(math.isfinite, entries)):
        return None
    if not is_kernel:
        return _rounded(max(entries) / UNIT)
    total = sum(entries)
    if entries.count(0.0) < len(entries) - 2:
        # More than two numbers have different sums in different orders.
        total = row[1 : FIRST + 1].sum().item()
    mean = _rounded(total) / max(_rounded(numbers[0] / UNIT), 1.0)
    return _rounded(_rounded(mean) / UNIT)


def _rounded(number: float) -> float:
    """Round a float to float32; infinite if it is out of range."""
    return float(np.float32(number))


def _assign_row(row: Array, value: Array) -> None:
    """Assign a row to a state; make a rounded mark of valid rows exact."""
    row[:] = value
    if abs(float(value[0]) - VALID_MARK) <= ROUNDING:
        row[0] = VALID_MARK


def _enter_row(
    row: Array, newest: float | None, intact: bool, scale: float
) -> None:
    """Write a scale and a new amax into a row of a settled state."""
    if not intact:
        row[FIRST:] = 0.0
    row[:FIRST] = 0.0
    row[0], row[FIRST - 1] = VALID_MARK, scale
    if newest is not None:
        # The ring turns left, and the newest overwrites its first entry.
        first = row[FIRST]
        row[FIRST:-1] = row[FIRST + 1 :]
        row[-1] = first
        row[FIRST] = newest


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
        if dtype == "bfloat16" and _fits_bfloat16(a, b):
            if not _in_one_scale(a, b):
                return self._narrow(a, b)
            scale = float(a.scale * b.scale)
            if SMALLEST <= scale <= LARGEST:
                return _bfloat16_product(a, b, scale)
        if _on_tensor_cores(a, b):
            product = _float32_sums(a, b)
        else:
            product = self.product(unscaled(a), unscaled(b))
        product = times_scales(product, a, b, torch.Tensor.mul_)
        return product.to(getattr(torch, dtype))

    def _narrow(self, a: Quantized, b: Quantized) -> Tensor:
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
    states=(casts.TritonStates(), CpuStates()),
    straight=straight.bind,
)


def _fits_bfloat16(a: Quantized, b: Quantized) -> bool:
    """Return True if bfloat16 is as exact as float32 here, and faster."""
    # Bfloat16 represents every float8 value exactly, also times a power of two.
    # 256x512x2048 on a core with AVX512-BF16: 2.5 ms against 5.6 ms in float32;
    # with scales of 128 blocks 1.7 ms against 10 ms (torch 2.13).
    return (
        a.values.dtype in (torch.float32, torch.bfloat16)
        and (_in_one_scale(a, b) or are_powers_of_two(a, b))
        and is_known(a.scale)
        and backend.multiplies_bfloat16()
    )


def _on_tensor_cores(a: Quantized, b: Quantized) -> bool:
    """Return True if a GPU can multiply these operands exactly in 16 bits."""
    if not _is_cuda(a.values):
        return False
    narrow = backend.here().multiplies_in
    return (
        exact_in(narrow, a, b)
        # Without data nothing is computed.
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


def _in_one_scale(*operands: Quantized) -> bool:
    quantizations = [each.quantization for each in operands]
    return all(each is not None and each.keeps_axes for each in quantizations)


def _bfloat16_product(a: Quantized, b: Quantized, scale: float) -> Tensor:
    """Multiply in bfloat16; apply the scale before the result is rounded."""
    # `alpha` multiplies the float32 sums before they are rounded. Scaling a
    # bfloat16 result afterwards would round twice.
    x, y = a.values.bfloat16(), b.values.bfloat16().mT
    if x.shape[0] == 1:
        zero, x, y = x.new_zeros((1, 1)), x.squeeze(0), y.squeeze(0)
        return torch.addmm(zero, x, y, beta=0, alpha=scale).unsqueeze(0)
    return torch.baddbmm(x.new_zeros((1, 1, 1)), x, y, beta=0, alpha=scale)
