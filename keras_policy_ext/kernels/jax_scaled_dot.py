"""JAX: a product with the scales of MX blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_policy_ext.kernels import jax_devices
from keras_policy_ext.kernels.contract import OTHER_SCALES, Request
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import Tile

Tensor = Any

MX_BLOCK = 32
"""Numbers of a block of the OCP MX formats."""

TERMS = 128
"""Sums are over a multiple of this: of 32 XLA fails to compile (JAX 0.10)."""


class ScaledDot:
    """`lax.scaled_dot`, of which XLA makes a matmul that takes the scales.

    Not run in this release: no Blackwell was there. What XLA compiles for a
    B200 was looked at, and has the instructions of tensor cores that scale
    blocks; `integration/lowering` looks again.
    """

    native = True

    def supports(self, request: Request) -> str | None:
        """See `MatmulKernel.supports`: on a data center's Blackwell."""
        if request.tiles != (Tile(1, MX_BLOCK),) * 2:
            return OTHER_SCALES
        if request.prefer == "emulated":
            return "asked for by kernels.prefer"
        if "nearest" in (request.a.scale_rounding, request.b.scale_rounding):
            return "the scales of MX blocks are powers of two"
        if not hasattr(lax, "scaled_dot"):
            return f"jax {jax.__version__} has no scaled_dot"
        lacking = jax_devices.lacking_triton()
        if lacking or request.prefer == "native":
            return lacking
        return jax_devices.lacking_mx()

    def reason(self, request: Request) -> str:
        """See `MatmulKernel.reason`."""
        if jax_devices.lacking_mx() is None:
            return "lax.scaled_dot on float8 operands"
        return "lax.scaled_dot, converted by XLA"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`; there is one way to accumulate."""
        first, second = (_padded(x.values, TERMS) for x in (a, b))
        scales = [
            _padded(exponent_bytes(x.scale), TERMS // MX_BLOCK) for x in (a, b)
        ]

        def product(written: Any) -> Tensor:
            return lax.scaled_dot(
                first,
                second,
                lhs_scale=_as_exponents(scales[0]),
                rhs_scale=_as_exponents(scales[1]),
                dimension_numbers=(((2,), (2,)), ((0,), (0,))),
                preferred_element_type=written,
            ).astype(dtype)

        if dtype != "bfloat16":
            return product(jnp.float32)
        return lax.platform_dependent(
            cuda=lambda: product(jnp.bfloat16),
            default=lambda: product(jnp.float32),
        )


def exponent_bytes(scale: Tensor) -> Tensor:
    """Powers of two as codes of `float8_e8m0fnu`, in uint8; NaN is 255.

    A cast to that dtype would round, and frameworks disagree about its 0.
    """
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return ((bits >> 23) & 0xFF).astype(jnp.uint8)


def _as_exponents(codes: Tensor) -> Tensor:
    return lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Zeros appended along the last axis."""
    over = -x.shape[2] % multiple
    return jnp.pad(x, ((0, 0), (0, 0), (0, over)))
