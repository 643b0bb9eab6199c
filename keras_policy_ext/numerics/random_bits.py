"""Random bits from a hash of integers, the same on every backend.

The generators of the frameworks give other bits each, and to draw from them
in a layer fails where JAX or PyTorch runs it again for its gradient.
"""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.casting import view
from keras_policy_ext.numerics.codes import shifted_right


def mix(x: Tensor) -> Tensor:
    """The hash lowbias32 of int32, in arithmetic that wraps.

    Source: Chris Wellons, "Prospecting for Hash Functions" (2018).
    """
    x = ops.bitwise_xor(x, shifted_right(x, 16)) * _wrapped(0x7FEB352D)
    x = ops.bitwise_xor(x, shifted_right(x, 15)) * _wrapped(0x846CA68B)
    return ops.bitwise_xor(x, shifted_right(x, 16))


def random_bits(shape: Any, key: Tensor, across: bool = False) -> Tensor:
    """Sixteen random bits for each number of a matrix.

    They depend on the place of a number, counted in rows of the matrix that
    a matmul reads.

    Args:
        shape: (b, m, k); scalars for sizes that a graph does not know.
        key: Int32 scalar; equal keys give equal bits.
        across: Whether the matmul reads the transpose of these matrices.

    Returns:
        Int32 tensor of that shape, from 0 to 2^16 - 1.
    """
    _, m, k = shape
    steps = (m * k, 1, m) if across else (m * k, k, 1)
    index: Any = 0
    for axis, (size, step) in enumerate(zip(shape, steps, strict=True)):
        places = ops.arange(size, dtype="int32") * step
        index = index + ops.reshape(
            places, [-1 if i == axis else 1 for i in range(3)]
        )
    second = key * _wrapped(0x9E3779B9)
    return shifted_right(mix(ops.bitwise_xor(mix(index + key), second)), 16)


def key_of_use(
    step: Tensor, seed: int, slot: int, kernel: Tensor | int = 0
) -> Tensor:
    """The key of one use of a kernel in one step.

    Args:
        step: Int32 scalar, how many steps there were.
        seed: From 0 to 2^31 - 1.
        slot: Which use in this step this is.
        kernel: Int32 scalar, the number of the kernel: two kernels with one
            output gradient are not to be given the same bits.
    """
    first = mix(step + ops.convert_to_tensor(seed, "int32"))
    of_kernel = mix(ops.convert_to_tensor(kernel, "int32"))
    first = ops.bitwise_xor(first, of_kernel)
    return mix(first + slot)


def key_of_matmul(key: Tensor, amax: Tensor, number: int) -> Tensor:
    """The key of an operand in one matmul.

    The amax of the operand is part of it: micro-batches, replicas and the
    steps of a scan have one key of their step.

    Args:
        key: From `key_of_use`.
        amax: Float32 scalar, of the operand before any transform.
        number: Of the matmul, 0 for `forward`, 1 for `inputs_grad`, 2 for
            `kernel_grad`.
    """
    salt = mix(view(amax, "int32"))
    return mix(ops.bitwise_xor(key, salt) + number)


def _wrapped(constant: int) -> int:
    """An unsigned constant as the int32 of the same bits."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant
