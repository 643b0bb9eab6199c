"""PyTorch: cast to float8 and back, on a CPU and by Triton kernels."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.both_layouts import (
    Both,
    BothLayouts,
    ScaleHint,
    Wanted,
)
from keras_policy_ext.backends.torch import (
    backend,
    stored_products,
)
from keras_policy_ext.backends.torch.backend import is_real
from keras_policy_ext.formats import FAMILIES
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.primitives import HALVES
from keras_policy_ext.numerics.scale_sources import ScaleRule
from keras_policy_ext.recipes import Quantization


def narrow_cast(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """Do as `casting.quantize`; on a CPU in parts, which saves memory."""
    narrow = getattr(torch, dtype)
    if x.numel() <= _PART or scale.numel() > 1 or not _is_on_cpu(x):
        return _clipped(x, scale, dtype, is_factor).to(narrow)
    q = torch.empty_like(x, dtype=narrow)
    for numbers, part in _in_parts(x, q):
        part.copy_(_clipped(numbers, scale, dtype, is_factor))
    return q


def cast(
    x: Tensor, scale: Tensor, dtype: str, is_factor: bool = False
) -> Tensor:
    """Quantize a tensor to a float8 dtype, or to float8 values in float32.

    Compiled and exported functions stay in float32: their graphs have no casts.
    """
    if torch.compiler.is_compiling():
        if not backend.is_exporting():
            return _rounded_in_graph(x, scale, dtype, is_factor)
        # An exported program has PyTorch's own operations only.
        values = _clipped(x, scale, dtype, is_factor)
        return _signed_like(x, _round_to_format(values, dtype), dtype)
    if not _is_castable(dtype, x.device):
        return _rounded(x, scale, dtype, is_factor)
    if x.numel() <= _PART:  # As `narrow_cast`, with a call less.
        return _clipped(x, scale, dtype, is_factor).to(getattr(torch, dtype))
    return narrow_cast(x, scale, dtype, is_factor)


def widen(q: Tensor, compute_dtype: str = "float32") -> Tensor:
    """Convert float8 values to float32, or to bfloat16.

    Bfloat16 is for a CPU that multiplies in it. It is written in parts, so that
    the float32 values of the whole tensor never exist at once.
    """
    is_small = q.numel() <= _FEW
    to_bfloat16 = compute_dtype == "bfloat16" and q.dtype.itemsize == 1
    if not (to_bfloat16 and _is_on_cpu(q) and backend.multiplies_bfloat16()):
        return q.float() if is_small else _widened(q)
    if is_small:
        return q.to(torch.bfloat16)
    wide = torch.empty_like(q, dtype=torch.bfloat16)
    for codes, part in _in_parts(q, wide):
        part.copy_(_widened(codes))
    return wide


def _widened(q: Tensor) -> Tensor:
    """Convert float8 values to float32, on a CPU by way of float16 if many.

    That is faster, but makes a number of the NaN of e4m3fn.
    """
    name = str(q.dtype).removeprefix("torch.")
    if not _is_on_cpu(q) or name not in HALVES or q.numel() <= _FEW:
        return q.float()
    if _has_nan_of_e4m3fn(q):
        return q.float()
    return stored_products.numbers(q.view(torch.uint8), name)


def _has_nan_of_e4m3fn(q: Tensor) -> bool:
    """Return True if an e4m3fn tensor has a NaN; False for other dtypes."""
    if q.dtype != torch.float8_e4m3fn or q.numel() == 0:
        return False
    # Its codes of NaN are the largest, read with a sign (0x7F) and without
    # (0xFF). To read bytes takes less than a tenth of the time of widening.
    signed, unsigned = q.view(torch.int8).amax(), q.view(torch.uint8).amax()
    return int(signed) == 0x7F or int(unsigned) == 0xFF


_FEW = 1 << 12
"""Up to this many elements PyTorch's own cast is faster."""

_PART = 1 << 18
"""The number of elements of a part, which fits a cache in float32."""


def _in_parts(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of two tensors of one shape; both whole if one has gaps."""
    if x.numel() <= _PART or not (x.is_contiguous() and y.is_contiguous()):
        return iter([(x, y)])
    return zip(x.view(-1).split(_PART), y.view(-1).split(_PART), strict=True)


def _is_on_cpu(x: Tensor) -> bool:
    """Return True if a tensor has data, and a CPU has it in memory."""
    return x.device.type == "cpu" and is_real(x)


def _is_castable(dtype: str, device: torch.device) -> bool:
    """Return True if PyTorch casts to this format on a device, and back."""
    has_casts = device.type == "cpu" or backend.casts_to_float8(device)
    return has_casts and dtype in HALVES


def _clipped(x: Tensor, scale: Tensor, dtype: str, is_factor: bool) -> Tensor:
    """Divide by a scale, or multiply if `is_factor`; clip to the format."""
    limit = casting.format_of(dtype).max
    wide = x.float()
    wide = wide * scale if is_factor else wide / scale
    return wide.clamp_(-limit, limit)


def _rounded(x: Tensor, scale: Tensor, dtype: str, is_factor: bool) -> Tensor:
    """Quantize a tensor; return the float8 values in float32."""
    values = _clipped(x, scale, dtype, is_factor)
    if _is_castable(dtype, x.device):
        return widen(values.to(getattr(torch, dtype)))
    return _signed_like(x, _round_to_format(values, dtype), dtype)


def _signed_like(x: Tensor, rounded: Tensor, dtype: str) -> Tensor:
    """Give rounded values the signs of `x`, if the format has -0."""
    if not casting.format_of(dtype).has_negative_zero:
        return rounded
    if backend.is_exporting():  # Nothing is changed in place.
        return rounded.copysign(x)
    return rounded.copysign_(x)


@torch.library.custom_op("keras_policy_ext::rounded", mutates_args=())
def _rounded_in_graph(
    x: torch.Tensor, scale: torch.Tensor, dtype: str, is_factor: bool
) -> torch.Tensor:
    """Call `_rounded` as one operation that compilers do not look into."""
    return _rounded(x, scale, dtype, is_factor)


@_rounded_in_graph.register_fake
def _(x: Tensor, scale: Tensor, dtype: str, is_factor: bool) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _round_to_format(x: Tensor, dtype: str) -> Tensor:
    """Do as `casting.round_to_format` in place; zeros may lose their signs."""
    # To allocate a new tensor would take most of the time.
    lowest, shift = casting.grid_constants(dtype)
    bits = x.view(torch.int32) & casting.EXPONENT_BITS
    anchor = bits.clamp_min_(lowest).add_(shift).view(torch.float32)
    return x.add_(anchor).sub_(anchor)


# Builds of PyTorch for CUDA bring Triton along, others do not.
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from keras_policy_ext.backends.torch import triton_casts


class TritonCasts(BothLayouts):
    """Triton kernels that quantize a matrix and write its transpose too.

    Args:
        interpreted: Whether to run in Triton's interpreter, on any device.
    """

    sums_columns = True

    def __init__(self, interpreted: bool = False):
        self.interpreted = interpreted

    @override
    def supports(
        self, like: Tensor, dtype: str, format_name: str
    ) -> str | None:
        """Return why an operand cannot be quantized; None if it can."""
        if format_name not in FAMILIES["ocp"]:
            return f"Triton's casts do not write {format_name}"
        if dtype not in ("bfloat16", "float16", "float32"):
            return f"Triton's casts do not read {dtype}"
        return refusal(like, self.interpreted)

    @override
    def quantize(
        self,
        matrix: Tensor,
        quantization: Quantization,
        hint: ScaleHint,
        wanted: Wanted,
    ) -> Both:
        """Quantize a matrix and its transpose; empty ones in a trace."""
        if is_real(matrix):
            return triton_casts.quantize_both_ways(
                matrix, quantization, hint, wanted, self.interpreted
            )
        # The compiler asks for shapes: nothing is computed.
        dtype, wide = getattr(torch, quantization.format), torch.float32
        m, k = matrix.shape
        tiles = (triton_casts.number_of_tiles(m, k),)
        amaxes = () if hint.scale is None else tiles  # See `Both`.
        return Both(
            matrix.new_empty((m, k), dtype=dtype),
            matrix.new_empty((k, m), dtype=dtype),
            matrix.new_empty((), dtype=wide),
            matrix.new_empty(amaxes, dtype=wide) if wanted.amax else None,
            matrix.new_empty(k, dtype=wide) if wanted.column_sums else None,
        )


def refusal(x: Tensor, interpreted: bool) -> str | None:
    """Return why Triton cannot run on the device of a tensor, or None."""
    if interpreted:
        return None
    if x.device.type != "cuda":
        return "Triton's kernels are for CUDA"
    return lacking()


@functools.cache
def lacking() -> str | None:
    """Return why Triton's casts cannot be used here, or None.

    They are tested once per process, with real data. So a missing compiler, or
    one that rounds differently, is found before its first use.
    """
    if not HAS_TRITON:
        return "Triton is not installed"
    try:
        with real_tensors():
            if _gives_our_codes():
                return None
    # On an untried device a compiler may raise anything. Users see it.
    except Exception as error:
        return f"Triton fails here: {type(error).__name__}: {error}"
    return "Triton does not cast here as PyTorch does"


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context that makes real tensors, even while fake ones trace."""
    # Not public (torch 2.11 to 2.13). Without it, Triton is not used if its
    # first use is traced.
    try:
        from torch._subclasses.fake_tensor import unset_fake_temporarily
    except ImportError:
        return contextlib.nullcontext()
    return unset_fake_temporarily()


def _gives_our_codes() -> bool:
    """Return True if a cast of every bfloat16 gives the codes of PyTorch."""
    all_bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    x = all_bits.view(torch.bfloat16).reshape(256, 256)
    x = torch.where(torch.isnan(x), 0.0, x)
    for name in FAMILIES["ocp"]:
        # For a scale as small as the second the kernel divides in another way.
        for scale in (torch.tensor(s, device="cuda") for s in (0.37, 1e-30)):
            expected = narrow_cast(x, scale, name).view(torch.uint8)
            hint = ScaleHint(scale, None, ScaleRule(by_multiplier=True))
            both = triton_casts.quantize_both_ways(
                x, Quantization(format=name), hint, Wanted(amax=True)
            )
            codes, across = (
                each.view(torch.uint8) for each in (both.values, both.across)
            )
            is_right = torch.equal(codes, expected)
            if not (is_right and torch.equal(across.t(), codes)):
                return False
    return True
