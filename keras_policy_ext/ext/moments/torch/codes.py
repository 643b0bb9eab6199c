"""Quantize moments with PyTorch: on a CPU in place in a few tensors.

On CUDA Triton does it. The bits are those of `ext.moments.codes`. On a CPU each
operation is a pass over a part that is in the cache. Comparisons, `where` and
look-ups take ten times as long as integer arithmetic (torch 2.13).
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from keras_policy_ext import backends, user_code
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.torch.backend import is_real
from keras_policy_ext.backends.torch.gradients import are_transforms_active
from keras_policy_ext.ext.moments.codes import (
    GOLDEN,
    KINDS,
    LARGEST,
    OFFSET,
    SMALLEST,
    SMALLEST_NORMAL,
    bits_of,
)
from keras_policy_ext.ext.moments.moment_kernels import MomentKernels

_MANTISSA = 0x007FFFFF
_NORMAL = bits_of(SMALLEST_NORMAL)


def quantized(
    rows: Tensor, kind: str, form: str, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of blocks, as `ext.moments.codes` does."""
    code = KINDS[kind]
    x = rows.abs()
    scale = _scales(x.view(torch.int32).amax(1), kind, form)
    if not code.signed:
        # -1 for a number, 0 for a denormal or 0.
        mask = (_NORMAL - 1 - x.view(torch.int32)).bitwise_right_shift_(31)
        # Not `sqrt` of a float32, whose last bit may be off.
        x.copy_(x.double().sqrt_())
    x.mul_(scale.reciprocal().unsqueeze(1))
    bits = x.view(torch.int32)
    if not code.signed:
        x.clamp_min_(OFFSET * 2.0**-code.mantissa_bits)
        bits.bitwise_and_(mask)
    x.add_(OFFSET)
    bits.clamp_max_(bits_of(code.largest))
    if key is None:
        bits.add_(1 << (code.dropped - 1))
    else:
        random = (_multiples(x.numel()) + key).view(x.shape)
        random.bitwise_right_shift_(32 - code.dropped)
        bits.add_(random.bitwise_and_((1 << code.dropped) - 1))
    bits.bitwise_right_shift_(code.dropped)
    if code.signed:
        sign = rows.view(torch.int32).bitwise_right_shift(24)
        bits.bitwise_or_(sign.bitwise_and_(0x80))
    if form == "mx":
        exponents = scale.view(torch.int32).bitwise_right_shift(23)
        scale = exponents.to(torch.uint8)
    return bits.to(torch.uint8), scale


def numbers(codes: Tensor, scale: Tensor, kind: str, form: str) -> Tensor:
    """Return the numbers of blocks, as `ext.moments.codes` does."""
    code = KINDS[kind]
    if form == "mx":
        scale = scale.to(torch.int32).bitwise_left_shift_(23)
        scale = scale.view(torch.float32)
    bits = codes.to(torch.int32)
    if code.signed:
        sign = bits.bitwise_and(0x80).bitwise_left_shift_(24)
        bits.bitwise_and_(0x7F)
    bits.bitwise_left_shift_(code.dropped).bitwise_or_(bits_of(OFFSET))
    found = bits.view(torch.float32).sub_(OFFSET).mul_(scale.unsqueeze(1))
    if code.signed:
        bits.bitwise_or_(sign)
        return found
    return found.mul_(found)


def _scales(largest: Tensor, kind: str, form: str) -> Tensor:
    """Return the scales of blocks, of the bits of their largest magnitudes."""
    code, limit = KINDS[kind], LARGEST[kind]
    limit = limit if code.signed else limit**2
    amax = largest.clamp_max(bits_of(limit)).view(torch.float32)
    if not code.signed:
        amax = amax.double().sqrt_().float()
    scale = amax * float(np.float32(1 / (code.largest - OFFSET)))
    if form == "mx":
        bits = scale.view(torch.int32)
        bits.add_(_MANTISSA).bitwise_and_(~_MANTISSA)
    return torch.where(largest < _NORMAL, 1.0, scale.clamp_min_(SMALLEST))


@functools.lru_cache(maxsize=4)
def _multiples(count: int) -> Tensor:
    """Return the numbers from 0 times GOLDEN, int32 (count,)."""
    index = torch.arange(count, dtype=torch.int32)
    return index * (GOLDEN - (1 << 32))


class TorchMoments(MomentKernels):
    """The kernels of PyTorch, on a CPU and on CUDA."""

    @override
    def updated_in_parts(
        self,
        update: Callable[..., Sequence[Tensor]],
        store: Callable[..., Sequence[Tensor]],
        block: int,
        step: Tensor,
        read: Tensor,
        written: Sequence[Tensor],
    ) -> Sequence[Tensor] | None:
        count, size = read.numel(), backends.current.numbers_of_a_part
        if not all(_is_in_memory(x) for x in written) or not is_real(read):
            return None
        # A sparse gradient, or one that is broadcast, has no such parts.
        if read.layout != torch.strided or read.shape != written[0].shape:
            return None
        flat = [x.detach().reshape(-1) for x in (read, *written)]
        with torch.no_grad():
            for first in range(0, count, size):
                end = min(first + size, count)
                old = [
                    x[first:end]
                    if len(x) == count
                    else x[first // block : -(-end // block)]
                    for x in flat
                ]
                new = store(first, *update(*old))
                for place, value in zip(old[1:], new, strict=True):
                    place.copy_(value)
        return written

    @override
    def in_place(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    @override
    def quantize_blocks(
        self, rows: Tensor, kind: str, form: str, key: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if _is_in_memory(rows):
            return quantized(rows, kind, form, key)
        kernels = _triton_kernels(rows)
        return kernels and kernels.quantized(rows, kind, form, key)

    @override
    def dequantize_blocks(
        self, codes: Tensor, scale: Tensor, kind: str, form: str
    ) -> Tensor | None:
        if _is_in_memory(codes):
            return numbers(codes, scale, kind, form)
        kernels = _triton_kernels(codes)
        return kernels and kernels.numbers(codes, scale, kind, form)

    @override
    def moment_key(self, step: Tensor, number: int) -> Tensor | None:
        kernels = _triton_kernels(step)
        return kernels and kernels.moment_key(step, number)


KERNELS = TorchMoments()


def _is_in_memory(x: Tensor) -> bool:
    """Return True if a tensor is on the CPU and nothing is recorded."""
    return backends.current.on_cpu(x) and _is_eager(x)


def _is_eager(x: Tensor) -> bool:
    # In a transform of `torch.func` it would run in place.
    if torch.compiler.is_compiling() or are_transforms_active():
        return False
    return is_real(x) and x.is_contiguous()


def _triton_kernels(x: Tensor) -> Any:
    """Return the module of Triton's kernels for a tensor on CUDA, or None."""
    if x.device.type != "cuda" or not _is_eager(x):
        return None
    return _triton_moments()


# This module may be loaded while a step is being compiled.
@torch.compiler.disable
@functools.cache
def _triton_moments() -> Any:
    """Return the module of Triton's kernels for moments, or None."""
    if importlib.util.find_spec("triton") is None:
        return None  # Some sixty small kernels then compute the same bits.
    try:
        from keras_policy_ext.ext.moments.torch import (
            triton_codes as triton_moments,
        )

        triton_moments.check("cuda", quantized, numbers)
    # A compiler may raise anything on a device that nobody has tried.
    except Exception as error:
        warnings.warn(
            "Triton's kernels for one-byte moments do not work here, so that "
            "a step of the optimizer takes longer. Its numbers are the same. "
            f"Received: {type(error).__name__}: {error}",
            UserWarning,
            stacklevel=user_code.stacklevel(),
        )
        return None
    return triton_moments
