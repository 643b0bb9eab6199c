"""PyTorch: casts to float8 and back, as a CPU does them best."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.torch import devices
from keras_policy_ext.backends.torch.backend import is_real
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.primitives import HALVES


def narrow_cast(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """`casting.quantize`; on a CPU part by part, so with little memory."""
    narrow = getattr(torch, dtype)
    if scale.numel() > 1 or not _is_on_cpu(x):
        return _clipped(x, scale, dtype, is_factor).to(narrow)
    q = torch.empty_like(x, dtype=narrow)
    for numbers, part in _in_parts(x, q):
        part.copy_(_clipped(numbers, scale, dtype, is_factor))
    return q


def cast(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """`narrow_cast` where a float8 dtype is there, else `quantize_float32`.

    What is compiled or exported stays in float32, with no cast to float8 and
    back in its graph.
    """
    if torch.compiler.is_exporting():
        values = _clipped(x, scale, dtype, is_factor)
        return _signed_like(x, _round_to_format(values, dtype), dtype)
    if torch.compiler.is_compiling():
        return _rounded_in_graph(x, scale, dtype, is_factor)
    if _is_castable(dtype, x.device):
        return narrow_cast(x, scale, dtype, is_factor)
    return _rounded(x, scale, dtype, is_factor)


def widen(q: Tensor, compute_dtype: str = "float32") -> Tensor:
    """`casting.widen`; in bfloat16 where a CPU multiplies that.

    Part by part then, so that they are never all there in float32.
    """
    narrow = compute_dtype == "bfloat16" and q.dtype.itemsize == 1
    if not (narrow and _is_on_cpu(q) and devices.multiplies_bfloat16()):
        return _widened(q)
    if q.numel() <= _FEW:
        return q.to(torch.bfloat16)
    wide = torch.empty_like(q, dtype=torch.bfloat16)
    for numbers, part in _in_parts(q, wide):
        part.copy_(_widened(numbers))
    return wide


def _widened(q: Tensor) -> Tensor:
    """Float8 numbers in float32; on a CPU by way of float16.

    There it takes a tenth of the time of a cast (2 M numbers on one core:
    0.4 ms against 5.4 ms, torch 2.13).
    """
    name = str(q.dtype).removeprefix("torch.")
    if not _is_on_cpu(q) or name not in HALVES or q.numel() <= _FEW:
        return q.float()
    if _has_nan_of_e4m3fn(q):
        return q.float()
    shift, factor = HALVES[name]
    # The sign is extended, and so stays where float16 has it.
    codes = q.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift)
    if name == "float8_e4m3fn":
        codes.bitwise_and_(_BUT_SIGN_EXTENDED)
    halves = codes.view(torch.float16)
    return halves.float() if factor == 1 else halves.float().mul_(factor)


_BUT_SIGN_EXTENDED = ~0x4000
"""Clears the bit below the sign, which a shift by 7 makes equal to it."""


def _has_nan_of_e4m3fn(q: Tensor) -> bool:
    """True if a code is one of its two NaN, which are numbers of float16.

    Reads bytes, in less than a tenth of the time of widening them.
    """
    if q.dtype != torch.float8_e4m3fn or q.numel() == 0:
        return False
    largest = q.view(torch.int8).amax(), q.view(torch.uint8).amax()
    return int(largest[0]) == 0x7F or int(largest[1]) == 0xFF


_FEW = 1 << 12
"""Up to so many numbers one cast takes less time than a few operations."""

_PART = 1 << 18
"""How many numbers fit a cache in float32."""


def _in_parts(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of two tensors that lie in memory alike, or both as they are."""
    if x.numel() <= _PART or not (x.is_contiguous() and y.is_contiguous()):
        return iter([(x, y)])
    return zip(x.view(-1).split(_PART), y.view(-1).split(_PART), strict=True)


def _is_on_cpu(x: Tensor) -> bool:
    """Return True if there are numbers, in the memory of a CPU."""
    return x.device.type == "cpu" and is_real(x)


def _is_castable(dtype: str, device: torch.device) -> bool:
    return dtype in HALVES and devices.casts_to_float8(device)


def _clipped(x: Tensor, scale: Tensor, dtype: str, is_factor: bool) -> Tensor:
    limit = formats.get(dtype).max
    wide = x.float()
    wide = wide * scale if is_factor else wide / scale
    return wide.clamp_(-limit, limit)


def _rounded(x: Tensor, scale: Tensor, dtype: str, is_factor: bool) -> Tensor:
    """The quantized numbers, in float32."""
    values = _clipped(x, scale, dtype, is_factor)
    if _is_castable(dtype, x.device):
        return widen(values.to(getattr(torch, dtype)))
    return _signed_like(x, _round_to_format(values, dtype), dtype)


def _signed_like(x: Tensor, rounded: Tensor, dtype: str) -> Tensor:
    """Rounded numbers with the signs of `x`, where a zero may have one."""
    if not formats.get(dtype).has_negative_zero:
        return rounded
    if torch.compiler.is_exporting():
        return rounded.copysign(x)
    return rounded.copysign_(x)


@torch.library.custom_op("keras_policy_ext::rounded", mutates_args=())
def _rounded_in_graph(
    x: torch.Tensor, scale: torch.Tensor, dtype: str, is_factor: bool
) -> torch.Tensor:
    """`_rounded` as one operation that a compiler cannot look into.

    Inductor computes in float32 throughout and drops a cast to float8 and
    back (torch 2.13): nothing would be quantized.
    """
    return _rounded(x, scale, dtype, is_factor)


@_rounded_in_graph.register_fake
def _(x: Tensor, scale: Tensor, dtype: str, is_factor: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _round_to_format(x: Tensor, dtype: str) -> Tensor:
    """`casting.round_to_format` in place, the signs of zeros left to do.

    Most of the time of a new tensor is that of its memory.
    """
    lowest, shift = casting.grid_constants(dtype)
    bits = x.view(torch.int32) & casting.EXPONENT_BITS
    anchor = bits.clamp_min_(lowest).add_(shift).view(torch.float32)
    return x.add_(anchor).sub_(anchor)
