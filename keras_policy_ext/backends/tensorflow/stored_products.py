"""TensorFlow: products with stored kernels on a CPU.

XLA fuses the decoding of a part; TensorFlow's own operations would take three
to four times as long. So XLA compiles products by parts in other graphs and in
eager calls too. For many rows oneDNN's matmul takes 0.8 of the time of XLA's:
there XLA decodes the whole kernel alone (TF 2.21).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends import parts
from keras_policy_ext.backends.parts import FEW, StoredMatrix
from keras_policy_ext.numerics.primitives import halves

MANY = 64
"""For more rows than this, outside XLA, the kernel is decoded at once."""


def product_by_parts(x: Tensor, kernel: StoredMatrix, in_xla: bool) -> Tensor:
    """Multiply on a CPU; see `Arithmetic.product_by_parts`.

    `in_xla` says that XLA compiles the whole graph.
    """
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    given = [x, kernel.codes]
    if kernel.blocks is not None:
        given.append(kernel.blocks)

    def for_rows(rows: int) -> Callable[[], Tensor]:
        """Return a function that multiplies as is best for so many rows."""
        if rows > MANY and not in_xla and kernel.blocks is None:
            codes = tf.reshape(kernel.codes, kernel.shape)
            decoded, is_transposed = _decoder_of(kernel.format), not kernel.sums
            return lambda: tf.matmul(x, decoded(codes), False, is_transposed)
        # For one row XLA makes no matmul of a part so small, but fuses its sum.
        size = kernel.size(rows, threads or parts.cores(), one_row=16)
        product = _compiled_product(size, kernel.form)
        function = product.python_function if in_xla else product
        return lambda: function(*given)

    if x.shape[1] is None:
        # XLA knows the number when it compiles, and drops other branches.
        rows = tf.shape(x)[1]
        branches = [(rows <= most, for_rows(most)) for most in (1, FEW, MANY)]
        y = tf.case(branches, default=for_rows(MANY + 1))
    else:
        y = for_rows(x.shape[1])()
    _, m, n = kernel.shape
    y.set_shape([kernel.shape[0], x.shape[1], n if kernel.sums else m])
    return y * kernel.factor


_by_xla = functools.partial(
    tf.function, jit_compile=True, autograph=False, reduce_retracing=True
)


@functools.lru_cache(maxsize=1024)
def _decoder_of(format_name: str) -> Any:
    """Return a function that decodes codes, without their factor."""
    return _by_xla(
        lambda codes: tf.cast(halves(codes, format_name), tf.float32)
    )


@functools.lru_cache(maxsize=1024)
def _compiled_product(size: int, form: tuple[Any, ...]) -> Any:
    """Return a function of inputs, codes and scales of blocks: their product.

    `size` is that of a part. `form` has all fields of a `StoredMatrix` but its
    tensors.
    """

    def product(x: Tensor, codes: Tensor, blocks: Any = None) -> Tensor:
        kernel = StoredMatrix(codes, blocks, *form)
        return parts.in_loops(x, kernel, size, _loop)

    return _by_xla(product)


def _loop(
    first: int, end: int, function: Callable[..., Tensor], start: Tensor
) -> Tensor:
    """Call `function(i, x)` for each i up to `end`; return the last result.

    `x` is the result before, at first `start`.
    """
    # For a gradient XLA has to know how often it runs at most.
    _, result = tf.while_loop(
        lambda i, _: i < end,
        lambda i, x: (i + 1, function(i, x)),
        (first, start),
        maximum_iterations=end - first,
        parallel_iterations=1,
    )
    return result
