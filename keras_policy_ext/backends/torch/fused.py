"""PyTorch on CUDA: casts by Triton, where it is there and gives our codes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from typing import Any

import torch

from keras_policy_ext import _user_code
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.both_layouts import Both, ScaleHint
from keras_policy_ext.backends.torch import casts, observations
from keras_policy_ext.backends.torch.backend import is_real
from keras_policy_ext.formats import FAMILIES
from keras_policy_ext.numerics.scale_protocol import HistoryScales, ScaleRule
from keras_policy_ext.numerics.scale_sources import DelayedSource
from keras_policy_ext.recipes import DelayedScaling, Quantization

# Builds of PyTorch for CUDA bring Triton along, others do not.
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from keras_policy_ext.backends.torch import triton_casts, triton_scales


class TritonCasts:
    """See `BothLayouts`.

    Args:
        interpreted: For tests: on any device, by Triton's interpreter.
    """

    def __init__(self, interpreted: bool = False):
        self.interpreted = interpreted

    def supports(
        self, like: Tensor, dtype: str, format_name: str
    ) -> str | None:
        """See `BothLayouts.supports`."""
        if format_name not in FAMILIES["ocp"]:
            return f"Triton's casts do not write {format_name}"
        if dtype not in ("bfloat16", "float16", "float32"):
            return f"Triton's casts do not read {dtype}"
        return _refusal(like, self.interpreted)

    def quantize(
        self,
        matrix: Tensor,
        asked: Quantization,
        known: ScaleHint,
        observe: bool,
    ) -> Both:
        """See `BothLayouts.quantize`."""
        if is_real(matrix):
            return triton_casts.quantize_both_ways(
                matrix, asked, known, observe, self.interpreted
            )
        dtype, wide = getattr(torch, asked.format), torch.float32
        m, k = matrix.shape
        tiles = (triton_casts.number_of_tiles(m, k),)
        parts = () if known.scale is None else tiles
        return Both(
            matrix.new_empty((m, k), dtype=dtype),
            matrix.new_empty((k, m), dtype=dtype),
            matrix.new_empty((), dtype=wide),
            matrix.new_empty(parts, dtype=wide) if observe else None,
        )


class TritonStates:
    """See `StateKernels`.

    Args:
        interpreted: For tests: on any device, by Triton's interpreter.
    """

    def __init__(self, interpreted: bool = False):
        self.interpreted = interpreted

    def supports(self, source: Any, state: Tensor) -> str | None:
        """See `StateKernels.supports`."""
        if type(source) is not DelayedSource:
            return "Triton's arithmetic is that of delayed scaling"
        if not is_real(state) or state.dtype != torch.float32:
            return "this state has no float32 numbers yet"
        return _refusal(state, self.interpreted)

    def history_scales(self, source: Any, state: Tensor) -> HistoryScales:
        """See `StateKernels.history_scales`."""
        tells = self.interpreted or tells_the_host()
        told = observations.told(state) if tells else None
        matrix = state.contiguous()
        return triton_scales.history_scales(source, matrix, told)

    def observation(
        self, source: Any, amaxes: list[Tensor], slot: int
    ) -> Tensor:
        """See `StateKernels.observation`."""
        return triton_scales.observation(source, amaxes, slot)

    def settle(self, source: Any, value: Tensor, previous: Tensor) -> Tensor:
        """See `StateKernels.settle`."""
        pair = value.contiguous(), previous.contiguous()
        return triton_scales.settle(source, *pair)


def _refusal(x: Tensor, interpreted: bool) -> str | None:
    if interpreted:
        return None
    if x.device.type != "cuda":
        return "Triton's kernels are for CUDA"
    return lacking()


@functools.cache
def lacking() -> str | None:
    """Why casts are not by Triton, or None if they are.

    Asked once for a process, with numbers: a compiler that is missing, or one
    that rounds otherwise, is found before it casts anything that counts.
    """
    if not HAS_TRITON:
        return "Triton is not installed"
    try:
        with _numbers():
            if _gives_our_codes():
                return None
    # A compiler may raise anything on a device that nobody has tried. It is
    # the reason that users see.
    except Exception as error:
        return f"Triton fails here: {type(error).__name__}: {error}"
    return "Triton does not cast here as PyTorch does"


def _numbers() -> contextlib.AbstractContextManager[Any]:
    """A block in which tensors have numbers, also while a graph is made.

    Not public (torch 2.11 to 2.13); where it is gone, Triton is not used if
    the first call is traced.
    """
    try:
        from torch._subclasses.fake_tensor import unset_fake_temporarily
    except ImportError:
        return contextlib.nullcontext()
    return unset_fake_temporarily()


@functools.cache
def tells_the_host() -> bool:
    """Return True if a kernel writes into pinned memory.

    Asked once for a process: where it may not, launching it is an error.
    """
    source = DelayedSource(DelayedScaling())
    try:
        with _numbers():
            state = torch.zeros(source.state_shape, device="cuda")
            state[:, 0], state[:, -1] = -1.0, 1.0
            told = observations.pinned_flags(len(state))
            triton_scales.history_scales(source, state, told)
            torch.cuda.synchronize()
            return not told.any()
    # See `lacking`. The numbers are the same, so this is no error.
    except Exception as error:
        warnings.warn(
            "Triton does not write into memory of the host here, so that each "
            "float8 layer runs three small kernels more in a step. Received: "
            f"{type(error).__name__}: {error}",
            UserWarning,
            stacklevel=_user_code.stacklevel(),
        )
        return False


def _gives_our_codes() -> bool:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    x = every.view(torch.bfloat16).reshape(256, 256)
    x = torch.where(torch.isnan(x), 0.0, x)
    for name in FAMILIES["ocp"]:
        for scale in (torch.tensor(s, device="cuda") for s in (0.37, 1e-30)):
            expected = _bits(casts.narrow_cast(x, scale, name))
            known = ScaleHint(scale, None, ScaleRule(inverted=True))
            asked = Quantization(format=name)
            both = triton_casts.quantize_both_ways(x, asked, known, True)
            found, across = _bits(both.values), _bits(both.across)
            if not torch.equal(found, expected):
                return False
            if not torch.equal(across.t(), found):
                return False
    return True


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
