"""TensorFlow: codes read by integer operations, and products by parts of them.

XLA fuses the decoding of a part; TensorFlow's own operations would take three
to four times as long. So XLA compiles that in other graphs and in eager calls
too. The product is compiled with it for a few rows. For more, oneDNN's matmul
takes 0.8 of the time of XLA's, and parts are larger (TF 2.21, CPU).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends import parts
from keras_policy_ext.backends.parts import Parts, StoredMatrix
from keras_policy_ext.numerics.primitives import DECODED

PARTS = Parts(one_row=16)
"""For one row XLA makes no matmul of a part so small, but fuses its sum."""

OUTSIDE_XLA = Parts(numbers=1 << 21, depth=512)
"""The parts that oneDNN multiplies, for more than a few rows."""

_MANY = 512
"""For more rows than this, oneDNN multiplies by the whole kernel at once."""


def halves(codes: Tensor, format_name: str) -> Tensor:
    """Return codes as float16: their values divided by the factor of `DECODED`.

    There are no codes of NaN among them. Numbers in float16 are unchanged.
    """
    if codes.dtype == tf.half:
        return codes
    shift, _ = DECODED[format_name]
    # A conversion from int8 repeats the sign bit in all higher bits, so that
    # the sign of the shifted code is where float16 has it. The bit below is
    # cleared: a shift by 7 makes it equal to the sign.
    bits = tf.cast(tf.bitcast(codes, tf.int8), tf.int16)
    bits = tf.bitwise.left_shift(bits, tf.constant(shift, tf.int16))
    if shift == 7:
        bits = tf.bitwise.bitwise_and(bits, tf.constant(~0x4000, tf.int16))
    return tf.bitcast(bits, tf.half)


def product_by_parts(
    x: Tensor,
    codes: Tensor,
    matrix: StoredMatrix,
    blocks: Tensor | None,
    in_xla: bool,
) -> Tensor:
    """Multiply on a CPU by parts; see `Arithmetic.product_by_parts`.

    `in_xla` says that XLA compiles the whole graph.
    """
    in_shape = tf.reshape(codes, matrix.shape)
    given = [x, in_shape] if blocks is None else [x, in_shape, blocks]

    def for_rows(rows: int) -> Callable[[], Tensor]:
        """Return a function that multiplies as is best for so many rows."""
        whole = in_xla or rows <= PARTS.few
        in_blocks = blocks is not None
        size = (PARTS if whole else OUTSIDE_XLA).size(
            rows, matrix, _threads(), in_blocks
        )
        if rows > _MANY and not (whole or in_blocks):
            _, size, _ = matrix.shape
        if in_xla or not whole:
            options = matrix, size, in_xla
            return lambda: _product(*options, *given)
        specs = [tf.TensorSpec([x.shape[0], None, x.shape[2]])]
        specs += [tf.TensorSpec(each.shape, each.dtype) for each in given[1:]]
        options = matrix, size, True
        return lambda: _compiled(_product, options, tuple(specs))(*given)

    if x.shape[1] is None:
        # XLA knows the number when it compiles, and drops other branches.
        rows, known = tf.shape(x)[1], (1, PARTS.few, _MANY)
        branches = [(rows <= most, for_rows(most)) for most in known]
        y = tf.case(branches, default=for_rows(_MANY + 1))
    else:
        y = for_rows(x.shape[1])()
    _, m, n = matrix.shape
    y.set_shape([matrix.shape[0], x.shape[1], n if matrix.sums else m])
    return y if codes.dtype == tf.half else y * DECODED[matrix.format][1]


def _product(
    matrix: StoredMatrix,
    size: int,
    in_xla: bool,
    x: Tensor,
    codes: Tensor,
    blocks: Tensor | None = None,
) -> Tensor:
    """Multiply in loops over parts of this size."""

    def decode(codes: Tensor, start: Any, count: int) -> Tensor:
        options = matrix.format, count
        if in_xla:
            return _decoded(*options, codes, start)
        specs = (
            tf.TensorSpec(codes.shape, codes.dtype),
            tf.TensorSpec((), "int32"),
        )
        return _compiled(_decoded, options, specs)(codes, start)

    return parts.in_loops(x, codes, matrix, size, blocks, decode, _loop)


def _loop(
    first: int, end: int, function: Callable[..., Tensor], start: Tensor
) -> Tensor:
    """Return the last result of a function of a number and its last result."""
    # For a gradient XLA has to know how often it runs at most.
    _, result = tf.while_loop(
        lambda i, _: i < end,
        lambda i, x: (i + 1, function(i, x)),
        (first, start),
        maximum_iterations=end - first,
        parallel_iterations=1,
    )
    return result


def _decoded(format_name: str, count: int, codes: Tensor, start: Any) -> Tensor:
    """Return rows of a matrix as float32, without the factor of `DECODED`."""
    some = tf.slice(codes, [start, 0], [count, codes.shape[1]])
    return tf.cast(halves(some, format_name), tf.float32)


@functools.lru_cache(maxsize=1024)
def _compiled(
    function: Callable[..., Tensor],
    options: tuple[Any, ...],
    specs: tuple[tf.TensorSpec, ...],
) -> Callable[..., Tensor]:
    """Return `function(*options, *tensors)` of these specs, by XLA."""
    return tf.function(
        functools.partial(function, *options),
        jit_compile=True,
        autograph=False,
        input_signature=specs,
    )


@functools.cache
def _threads() -> int:
    """Return how many threads TensorFlow has for one operation."""
    given = tf.config.threading.get_intra_op_parallelism_threads()
    return given or parts.cores()
