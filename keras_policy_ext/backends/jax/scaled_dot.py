"""JAX: a product with the scales of MX blocks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.jax import devices
from keras_policy_ext.backends.matmuls import OTHER_SCALES, Request
from keras_policy_ext.numerics.codes import encode_scales
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.recipes import Tile

E8M0 = "float8_e8m0fnu"

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
        wanted = request.prefer == "native"
        return (None if wanted else devices.lacking_mx()) or failing()

    def reason(self, request: Request) -> str:
        """See `MatmulKernel.reason`."""
        if devices.lacking_mx() is None:
            return "lax.scaled_dot on float8 operands"
        return "lax.scaled_dot, converted by XLA"

    def multiply(
        self, a: Quantized, b: Quantized, dtype: str, fast: bool
    ) -> Tensor:
        """See `MatmulKernel.multiply`; there is one way to accumulate."""
        read = a.values, a.scale, b.values, b.scale
        if dtype != "bfloat16":
            return _product(*read).astype(dtype)
        return lax.platform_dependent(
            cuda=lambda: _product(*read, jnp.bfloat16),
            default=lambda: _product(*read).astype(dtype),
        )


@functools.cache
def failing() -> str | None:
    """Why `lax.scaled_dot` is not to be used on this device, or None.

    Asked once for a process, with numbers: for a GPU XLA compiles it by way of
    Triton alone, which may be left out or not know the device.
    """
    try:
        with jax.ensure_compile_time_eval():
            if _gives_our_numbers():
                return None
    # A compiler may raise anything on a device that nobody has tried. It is
    # the reason that users see.
    except Exception as error:
        told = str(error).partition("\n")[0]
        return f"lax.scaled_dot fails here: {type(error).__name__}: {told}"
    return "lax.scaled_dot does not multiply here as it should"


def _gives_our_numbers() -> bool:
    """True if a product is right in which each block has its own scale."""
    rng = np.random.default_rng(0)
    operands, exact = [], []
    for rows in (136, 72):
        values = rng.integers(-8, 9, (1, rows, 256)).astype("float32")
        scale = 2.0 ** rng.integers(-4, 5, (1, rows, 256 // MX_BLOCK))
        operands += [jnp.asarray(values, "float8_e4m3fn"), jnp.float32(scale)]
        exact.append((values * np.repeat(scale, MX_BLOCK, 2))[0])
    found = np.asarray(jax.jit(_product)(*operands))[0]
    expected = exact[0] @ exact[1].T
    error = np.abs(found - expected).max() / np.abs(expected).max()
    return bool(error < 2.0**-10)


def _product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: Any = jnp.float32,
) -> Tensor:
    """(b, m, k) and (b, n, k) to (b, m, n)."""
    scales = [
        _as_exponents(_padded(encode_scales(each, E8M0), TERMS // MX_BLOCK))
        for each in (a_scale, b_scale)
    ]
    return lax.scaled_dot(
        _padded(a, TERMS),
        _padded(b, TERMS),
        lhs_scale=scales[0],
        rhs_scale=scales[1],
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=dtype,
    )


def _as_exponents(codes: Tensor) -> Tensor:
    return lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Zeros appended along the last axis."""
    over = -x.shape[2] % multiple
    return jnp.pad(x, ((0, 0), (0, 0), (0, over)))
