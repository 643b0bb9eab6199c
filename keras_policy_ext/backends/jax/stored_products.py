"""JAX: products with stored kernels."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends import parts
from keras_policy_ext.backends.parts import StoredMatrix


def product_with_cast(x: Tensor, kernel: StoredMatrix, dtype: str) -> Tensor:
    """Multiply on a GPU; see `Arithmetic.product_by_parts`.

    A cast from float8, with no scale behind it, is part of XLA's matmul on a
    GPU that has float8, and one from float16 on any (JAX 0.10). Integer
    operations never are.
    """
    values = kernel.codes.reshape(kernel.shape)
    if values.dtype != jnp.float16:
        values = lax.bitcast_convert_type(values, jnp.dtype(kernel.format))
    x = jnp.broadcast_to(x, (len(values), *x.shape[1:]))
    equation = "brm,bmn->brn" if kernel.sums else "brn,bmn->brm"
    operands = x.astype(dtype), values.astype(dtype)
    return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def product_by_parts(x: Tensor, kernel: StoredMatrix) -> Tensor | None:
    """Multiply on a CPU by parts; see `Arithmetic.product_by_parts`."""
    if not isinstance(x.shape[1], int):
        return None  # Symbolic, in an export with open sizes.
    size = kernel.size(x.shape[1], parts.cores())
    return parts.in_loops(x, kernel, size, lax.fori_loop) * kernel.factor
