"""JAX: codes read by integer operations, and products by parts of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends import parts
from keras_policy_ext.backends.parts import Parts, StoredMatrix
from keras_policy_ext.numerics.primitives import DECODED

PARTS = Parts()


def halves(codes: Tensor, format_name: str) -> Tensor:
    """Return codes as float16: their values divided by the factor of `DECODED`.

    There are no codes of NaN among them. Numbers in float16 are unchanged.
    """
    if codes.dtype == jnp.float16:
        return codes
    shift, _ = DECODED[format_name]
    # A conversion from int8 repeats the sign bit in all higher bits, so that
    # the sign of the shifted code is where float16 has it. The bit below is
    # cleared: a shift by 7 makes it equal to the sign.
    signed = lax.bitcast_convert_type(codes, jnp.int8)
    bits = signed.astype(jnp.int16) << shift
    if shift == 7:
        bits = bits & ~0x4000
    return lax.bitcast_convert_type(bits, jnp.float16)


def product_with_cast(
    x: Tensor,
    codes: Tensor,
    matrix: StoredMatrix,
    blocks: Tensor | None,
    dtype: str,
) -> Tensor | None:
    """Multiply on a GPU; see `Arithmetic.product_by_parts`.

    A cast from float8, with no scale behind it, is part of XLA's matmul on a
    GPU that has float8, and one from float16 on any (JAX 0.10). Integer
    operations never are.
    """
    if blocks is not None:
        return None
    kernel = codes.reshape(matrix.shape)
    if codes.dtype != jnp.float16:
        kernel = lax.bitcast_convert_type(kernel, jnp.dtype(matrix.format))
    equation = "brm,bmn->brn" if matrix.sums else "brn,bmn->brm"
    if len(x) < matrix.shape[0]:
        x = jnp.broadcast_to(x, (matrix.shape[0], *x.shape[1:]))
    operands = x.astype(dtype), kernel.astype(dtype)
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def product_by_parts(
    x: Tensor, codes: Tensor, matrix: StoredMatrix, blocks: Tensor | None
) -> Tensor | None:
    """Multiply on a CPU by parts; see `Arithmetic.product_by_parts`."""
    if not isinstance(x.shape[1], int):
        return None  # Symbolic, in an export with open sizes.
    given = x.shape[1], matrix, parts.cores()
    size = PARTS.size(*given, in_blocks=blocks is not None)

    def decode(codes: Tensor, start: Any, count: int) -> Tensor:
        some = lax.dynamic_slice_in_dim(codes, start, count)
        return halves(some, matrix.format).astype(jnp.float32)

    in_shape = codes.reshape(matrix.shape)
    y = parts.in_loops(x, in_shape, matrix, size, blocks, decode, lax.fori_loop)
    return y if codes.dtype == jnp.float16 else y * DECODED[matrix.format][1]
