"""PyTorch: `scaled_mm` where it pays, otherwise 16 or 32 bits."""

from __future__ import annotations

import torch

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.matmuls import Engine
from keras_policy_ext.backends.scaled_products import (
    LARGEST,
    SMALLEST,
    Emulated,
    Plain,
    are_powers_of_two,
    exact_in,
    times_scales,
    unscaled,
)
from keras_policy_ext.backends.torch import casts, devices, fused
from keras_policy_ext.backends.torch.backend import is_known, is_real
from keras_policy_ext.backends.torch.convolutions import TorchConvolutions
from keras_policy_ext.backends.torch.cpu_states import CpuStates
from keras_policy_ext.backends.torch.scaled_mm import (
    ScaledMM,
    ScaledMMOfBlocks,
    ScaledMMOfMX,
    ScaledMMOfRows,
)
from keras_policy_ext.numerics.quantized import Quantized


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(b, m, k) and (b, n, k) to (b, m, n)."""
    if a.shape[0] == 1:
        return torch.matmul(a.squeeze(0), b.squeeze(0).t()).unsqueeze(0)
    return torch.matmul(a, b.mT)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`_product`, of operands narrower than float32 in float32."""
    if a.dtype == torch.float64:
        return _product(a, b)
    return _product(a.float(), b.float())


class Float32Matmul(Emulated):
    """float32, or bfloat16 where that gives the same and is faster."""

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`."""
        if _fits_bfloat16(a, b, dtype):
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
        """The scaled product in bfloat16, where all scales are powers of two.

        What is multiplied are then numbers of bfloat16, and those scales that
        come after the sum do not change how it is rounded.
        """
        product = self.product(*(unscaled(x).bfloat16() for x in (a, b)))
        product = product.float()
        return times_scales(product, a, b, torch.Tensor.mul_).bfloat16()


ENGINE = Engine(
    name="torch",
    device=devices.here,
    matmuls=(
        ScaledMM(),
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
    both_layouts=fused.TritonCasts(),
    states=(fused.TritonStates(), CpuStates()),
)


def _fits_bfloat16(a: Quantized, b: Quantized, dtype: str) -> bool:
    """Return True if a matmul in bfloat16 gives the same and is the faster one.

    Numbers of every float8 format are numbers of bfloat16, also times a power
    of two. 256x512x2048 on a core with AVX512-BF16: 2.5 ms against 5.6 ms in
    float32; with scales of 128 blocks 1.7 ms against 10 ms (torch 2.13).
    """
    return (
        dtype == "bfloat16"
        and a.values.dtype in (torch.float32, torch.bfloat16)
        and (_in_one_scale(a, b) or are_powers_of_two(a, b))
        and is_known(a.scale)
        and devices.multiplies_bfloat16()
    )


def _on_tensor_cores(a: Quantized, b: Quantized) -> bool:
    """True if a GPU multiplies 16 bits faster, exactly, and adds in float32.

    Not asked of tensors without data, of which nothing is computed.
    """
    narrow = devices.here().multiplies_in
    return (
        _is_cuda(a.values)
        and exact_in(narrow, a, b)
        and is_real(a.values)
        and devices.sums_in_float32(narrow)
    )


def _is_cuda(x: Tensor) -> bool:
    return bool(x.device.type == "cuda")


def _float32_sums(a: Quantized, b: Quantized) -> Tensor:
    """The product of the values in 16 bits, summed and left in float32."""
    narrow = getattr(torch, devices.here().multiplies_in)
    x, y = unscaled(a).to(narrow), unscaled(b).to(narrow).mT
    if x.shape[0] > 1:
        return torch.bmm(x, y, out_dtype=torch.float32)
    sums = torch.mm(x.squeeze(0), y.squeeze(0), out_dtype=torch.float32)
    return sums.unsqueeze(0)


def _in_one_scale(*operands: Quantized) -> bool:
    asked = [each.quantization for each in operands]
    return all(each is not None and each.keeps_axes for each in asked)


def _bfloat16_product(a: Quantized, b: Quantized, scale: float) -> Tensor:
    """Like `MatmulKernel.multiply`, with a result in bfloat16.

    `alpha` multiplies what was accumulated in float32, before it is rounded:
    a product in bfloat16 that is scaled afterwards is rounded twice.
    """
    x, y = a.values.bfloat16(), b.values.bfloat16().mT
    if x.shape[0] == 1:
        zero, x, y = x.new_zeros((1, 1)), x.squeeze(0), y.squeeze(0)
        return torch.addmm(zero, x, y, beta=0, alpha=scale).unsqueeze(0)
    return torch.baddbmm(x.new_zeros((1, 1, 1)), x, y, beta=0, alpha=scale)
