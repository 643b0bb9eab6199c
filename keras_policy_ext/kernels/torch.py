"""PyTorch: `scaled_mm` where it pays, otherwise 16 or 32 bits."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from keras_policy_ext.frameworks.torch import is_known
from keras_policy_ext.kernels import (
    torch_casts,
    torch_devices,
    torch_fused,
)
from keras_policy_ext.kernels.contract import Engine, Request
from keras_policy_ext.kernels.scaled_products import (
    Emulated,
    Plain,
    product_scale,
    unscaled,
)
from keras_policy_ext.kernels.torch_convolutions import TorchConvolutions
from keras_policy_ext.kernels.torch_cpu_states import CpuStates
from keras_policy_ext.numerics.quantized import Quantized

Tensor = Any

ALIGNMENT = 16
"""`scaled_mm` on CUDA wants sizes that are multiples of this."""


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(b, m, k) and (b, n, k) to (b, m, n)."""
    if a.shape[0] == 1:
        return torch.matmul(a.squeeze(0), b.squeeze(0).t()).unsqueeze(0)
    return torch.matmul(a, b.mT)


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """The same, of narrower operands accumulated in float32."""
    return _product(a.float(), b.float())


class ScaledMM:
    """`scaled_mm` of two float8 matrices."""

    native = True

    def supports(self, request: Request) -> str | None:
        """On CUDA with float8 hardware; on a CPU only if asked for."""
        refusal = _refusal(request)
        if refusal or torch.cuda.is_available() or request.prefer == "native":
            return refusal
        # 256x512x2048, 2 cores, torch 2.13: 4.8 ms against 2.8 ms.
        return "scaled_mm is slower than float32 on a CPU"

    def reason(self, request: Request) -> str:
        """See `MatmulKernel.reason`."""
        if torch.cuda.is_available():
            lacking = torch_fused.lacking()
            by = "Triton" if lacking is None else f"PyTorch: {lacking}"
            return f"scaled_mm on CUDA, of operands cast by {by}"
        return "scaled_mm on a CPU, asked for"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`."""
        scales = a.scale.reshape(()), b.scale.reshape(())
        out = getattr(torch, dtype)
        x, y = a.values.squeeze(0), b.values.squeeze(0).t()
        return _scaled_mm(x, y, *scales, out, fast).unsqueeze(0)


class Float32Matmul(Emulated):
    """float32, or bfloat16 where that gives the same and is faster."""

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`."""
        if _fits_bfloat16(a, b, dtype):
            return _bfloat16_product(a, b)
        product = self.product(unscaled(a), unscaled(b))
        return product.mul_(product_scale(a, b)).to(getattr(torch, dtype))


ENGINE = Engine(
    name="torch",
    matmuls=(ScaledMM(), Float32Matmul(_product)),
    plain=Plain(_float32_product),
    convolutions=TorchConvolutions("torch has no float8 convolution"),
    cast=torch_casts.cast,
    narrow_cast=torch_casts.narrow_cast,
    widen=torch_casts.widen,
    both_layouts=torch_fused.TritonCasts(),
    states=(torch_fused.TritonStates(), CpuStates()),
)


def _refusal(request: Request) -> str | None:
    """Why a matmul cannot be native, or None."""
    if request.prefer == "emulated":
        return "asked for by kernels.prefer"
    if not request.of_whole_tensors:
        return "scaled_mm is called here with one scale for a tensor"
    if request.batched:
        return "torch has no batched float8 matmul"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm"
    return torch_devices.lacking()


def _fits_bfloat16(a: Quantized, b: Quantized, dtype: str) -> bool:
    """Whether a matmul in bfloat16 gives the same and is the faster one.

    Numbers of every float8 format are numbers of bfloat16. 256x512x2048 on a
    core with AVX512-BF16: 2.5 ms against 5.6 ms in float32 (torch 2.13).
    """
    return (
        dtype == "bfloat16"
        and a.values.dtype == torch.float32
        and all(_in_one_scale(each) for each in (a, b))
        and is_known(a.scale)
        and _multiplies_bfloat16()
    )


def _in_one_scale(operand: Quantized) -> bool:
    asked = operand.quantization
    return asked is not None and asked.keeps_axes


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, as far as torch can tell."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    checks = [getattr(torch.cpu, name, None) for name in names]
    return any(check is not None and check() for check in checks)


def _bfloat16_product(a: Quantized, b: Quantized) -> Tensor:
    """Like `MatmulKernel.multiply`, with a result in bfloat16.

    `alpha` multiplies what was accumulated in float32, before it is rounded:
    a product in bfloat16 that is scaled afterwards is rounded twice.
    """
    scale = float(a.scale * b.scale)
    x, y = a.values.bfloat16(), b.values.bfloat16().mT
    if x.shape[0] == 1:
        zero, x, y = x.new_zeros((1, 1)), x.squeeze(0), y.squeeze(0)
        return torch.addmm(zero, x, y, beta=0, alpha=scale).unsqueeze(0)
    return torch.baddbmm(x.new_zeros((1, 1, 1)), x, y, beta=0, alpha=scale)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """`a @ b * scale_a * scale_b` of two float8 matrices, padded to 16.

    CUDA wants the first operand row-major and the second column-major, both
    contiguous along the contracted axis.
    """
    rows, columns = a.shape[0], b.shape[1]
    if a.device.type == "cuda":
        a, b = _padded(a), _padded(b)
    product = F.scaled_mm(
        _contiguous(a),
        _contiguous(b.t()).t(),
        scale_a,
        F.ScalingType.TensorWise,
        scale_b,
        F.ScalingType.TensorWise,
        output_dtype=dtype,
        use_fast_accum=fast and a.device.type == "cuda",
    )
    return product.narrow(0, 0, rows).narrow(1, 0, columns)


def _contiguous(x: Tensor) -> Tensor:
    # `contiguous` and slices want the device itself; a clone and `narrow` can
    # be checked on fake CUDA tensors without CUDA (torch 2.13).
    if x.is_contiguous():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor) -> Tensor:
    """Zeros appended so that both sizes are multiples of `ALIGNMENT`."""
    rows, columns = (-size % ALIGNMENT for size in x.shape)
    if not rows and not columns:
        return x
    return F.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(x.dtype)
