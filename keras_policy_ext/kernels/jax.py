"""JAX: `lax.dot_general`, on float8 operands where XLA has a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_policy_ext.kernels.contract import HOPPER_OR_ADA, Engine, Request
from keras_policy_ext.kernels.keras_convolutions import KerasConvolutions
from keras_policy_ext.kernels.scaled_products import (
    Emulated,
    Plain,
    product_scale,
)
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.quantized import Quantized

Tensor = Any


def _product(
    a: Tensor,
    b: Tensor,
    precision: lax.Precision = lax.Precision.DEFAULT,
    dtype: Any = jnp.float32,
) -> Tensor:
    """(b, m, k) and (b, n, k) to (b, m, n), accumulated in float32."""
    single = a.shape[0] == 1 and b.shape[0] == 1
    if single:
        a, b = a[0], b[0]
    axes, batch = ((1, 1), ((), ())) if single else ((2, 2), ((0,), (0,)))
    product = lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), batch),
        precision=precision,
        preferred_element_type=dtype,
    )
    return product[jnp.newaxis] if single else product


class Float8Dot:
    """Float8 operands reach XLA, which has a kernel or converts them."""

    native = True

    def supports(self, request: Request) -> str | None:
        """See `MatmulKernel.supports`."""
        if request.prefer == "emulated":
            return "asked for by kernels.prefer"
        if not request.of_whole_tensors:
            return "XLA's float8 matmul has one scale for a tensor"
        return None if request.prefer == "native" else _lacking()

    def reason(self, request: Request) -> str:
        """See `MatmulKernel.reason`."""
        if _lacking() is None:
            return "lax.dot_general on float8 operands"
        return "lax.dot_general, converted by XLA"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`.

        XLA takes any precision but the highest for leave to accumulate fast,
        in matmuls of float8 on a GPU; as in Flax's `fp8_ops`.
        """
        precision = lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST

        def direct() -> Tensor:
            product = _product(a.values, b.values, precision)
            return (product * product_scale(a, b)).astype(dtype)

        def dequantized() -> Tensor:
            return _dequantized_product(a, b, precision, dtype)

        # XLA makes no matmul of vectors, and writes no float64.
        sizes = (*a.values.shape[1:], *b.values.shape[1:])
        if 1 in sizes or dtype == "float64":
            return direct()
        return lax.platform_dependent(cuda=dequantized, default=direct)


def _dequantized_product(
    a: Quantized, b: Quantized, precision: lax.Precision, dtype: str
) -> Tensor:
    """What XLA for CUDA makes one matmul of.

    It reads the float8 values, multiplies by the float32 scales as they were
    before they were cast here, adds a bias, and writes `dtype`. Of a product
    of float8 values it makes one that writes float32, and kernels after it.
    """
    first, second = (
        each.values.astype(dtype) * each.scale.astype(dtype) for each in (a, b)
    )
    return _product(first, second, precision, jnp.dtype(dtype))


ENGINE = Engine(
    name="jax",
    matmuls=(Float8Dot(), Emulated(_product)),
    plain=Plain(_product),
    convolutions=KerasConvolutions("XLA has no float8 convolution"),
    cast=casting.quantize_float32,
    narrow_cast=casting.quantize,
    widen=casting.widen,
)


def _lacking() -> str | None:
    """Why XLA has no float8 matmul for the device, or None if it has one."""
    if jax.default_backend() == "cpu":
        return "XLA has no float8 matmul for a CPU"
    device = jax.devices()[0]
    # "9.0" on a Hopper; on other makers' devices another text, or nothing.
    capability = str(getattr(device, "compute_capability", "none"))
    numbers = capability.split(".")
    if all(number.isdigit() for number in numbers) and (
        tuple(map(int, numbers)) >= HOPPER_OR_ADA
    ):
        return None
    return (
        f"{device.device_kind} (capability {capability}) has no float8 matmul"
    )
