"""Quantize moments on a CPU with PyTorch, in place in a few tensors.

The bits are those of `numerics.moments`. Each operation is a pass over a part
that is in the cache. Comparisons, `where` and look-ups take ten times as long
as integer arithmetic (torch 2.13).
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from keras_policy_ext._types import Tensor
from keras_policy_ext.reference.moments import (
    GOLDEN,
    KINDS,
    LARGEST,
    OFFSET,
    SMALLEST,
    SMALLEST_NORMAL,
)


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


_MAGNITUDE = 0x7FFFFFFF
_MANTISSA = 0x007FFFFF
_NORMAL = _bits(SMALLEST_NORMAL)


def quantized(
    rows: Tensor, kind: str, form: str, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of blocks, as `numerics.moments` does."""
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
    bits.clamp_max_(_bits(code.largest))
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
    """Return the numbers of blocks, as `numerics.moments` does."""
    code = KINDS[kind]
    if form == "mx":
        scale = scale.to(torch.int32).bitwise_left_shift_(23)
        scale = scale.view(torch.float32)
    bits = codes.to(torch.int32)
    if code.signed:
        sign = bits.bitwise_and(0x80).bitwise_left_shift_(24)
        bits.bitwise_and_(0x7F)
    bits.bitwise_left_shift_(code.dropped).bitwise_or_(_bits(OFFSET))
    found = bits.view(torch.float32).sub_(OFFSET).mul_(scale.unsqueeze(1))
    if code.signed:
        bits.bitwise_or_(sign)
        return found
    return found.mul_(found)


def _scales(largest: Tensor, kind: str, form: str) -> Tensor:
    """Return the scales of blocks, of the bits of their largest magnitudes."""
    code, limit = KINDS[kind], LARGEST[kind]
    limit = limit if code.signed else limit**2
    amax = largest.clamp_max(_bits(limit)).view(torch.float32)
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
