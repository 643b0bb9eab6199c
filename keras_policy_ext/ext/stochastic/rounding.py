"""Stochastic rounding, and the random bits that it uses."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Size, Tensor
from keras_policy_ext.numerics import primitives
from keras_policy_ext.numerics.casting import (
    EXPONENT_BITS,
    MAGNITUDE_BITS,
    SIGN_BIT,
    grid_constants,
    shifted_right,
    tensor_of,
    view,
)


def mix(x: Tensor) -> Tensor:
    """Return the hash lowbias32 of int32 values; overflow wraps."""
    # Source: Chris Wellons, "Prospecting for Hash Functions" (2018).
    x = ops.bitwise_xor(x, shifted_right(x, 16)) * _wrapped(0x7FEB352D)
    x = ops.bitwise_xor(x, shifted_right(x, 15)) * _wrapped(0x846CA68B)
    return ops.bitwise_xor(x, shifted_right(x, 16))


def random_bits(
    shape: Sequence[Size], key: Tensor, across: bool = False
) -> Tensor:
    """Return sixteen random bits per element of a matrix (b, m, k), int32.

    They depend on the index of an element in the matrix that a matmul reads,
    row by row; `across` says that it reads the transpose. Equal keys, int32
    scalars, give equal bits.
    """
    _, m, k = shape
    strides = (m * k, 1, m) if across else (m * k, k, 1)
    index: Tensor | int = 0
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        offsets = ops.arange(size, dtype="int32") * stride
        along_axis = [-1 if i == axis else 1 for i in range(3)]
        index = index + ops.reshape(offsets, along_axis)
    # The key enters twice, since other keys with other indices have equal sums.
    # The factor is 2^32 divided by the golden ratio.
    second = key * _wrapped(0x9E3779B9)
    return shifted_right(mix(ops.bitwise_xor(mix(index + key), second)), 16)


def key_of_use(
    step: Tensor, seed: int, slot: Tensor | int, kernel: Tensor | int = 0
) -> Tensor:
    """Return the random key for one use of a kernel in one step.

    Two kernels with the same outputs gradient get different bits, by their
    numbers. All arguments are ints or int32 scalars; the seed is below 2^31.
    """
    given = (
        ops.cast(tensor_of(x), "int32") for x in (step, seed, slot, kernel)
    )
    step, seed, slot, kernel = given
    return mix(ops.bitwise_xor(mix(step + seed), mix(kernel)) + slot)


def key_of_matmul(key: Tensor, amax: Tensor, number: int) -> Tensor:
    """Return the random key for rounding an operand of one matmul.

    It depends on the amax of the operand before any transform, a float32
    scalar, since micro-batches, replicas and the steps of a scan share the key
    of their step. Matmuls have the numbers 0 to 2, in the order of `MATMULS`.
    """
    salt = mix(view(amax, "int32"))
    return mix(ops.bitwise_xor(key, salt) + number)


def _wrapped(constant: int) -> int:
    """Convert an unsigned constant to the int32 with the same bits."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant


ROUNDABLE = ("bfloat16", "float16")
"""The formats that `stochastic_round` supports."""

RANDOM_BITS = 16
"""The number of random bits per element, from 0 to 2^16 - 1 as an integer."""

_SIGN = 0x8000

_FLOAT16_NORMAL = 0x38800000
"""The float32 bits of 2^-14, the smallest normal float16."""

# Codes without sign: largest finite number, infinity, a quiet NaN.
_SPECIAL = {
    "bfloat16": (0x7F7F, 0x7F80, 0x7FC0),
    "float16": (0x7BFF, 0x7C00, 0x7E00),
}


def stochastic_round(
    x: Tensor,
    dtype: str = "bfloat16",
    seed: int | keras.random.SeedGenerator | None = None,
) -> Tensor:
    """Round each value up or down at random, unbiased, to a 16-bit dtype.

    A value between two neighbours of the format becomes the one farther from 0
    with a probability equal to its position between them, and the other one
    otherwise. So the expected result is `x`. The probability is exact for
    bfloat16, and for float16 down to its smallest normal number; below that,
    it is exact to 2^-16. Values of the format never change, nor do infinities
    and NaN. Finite values beyond the format's largest become that one.

    It is not differentiable.

    Args:
        x: Tensor of any shape and real dtype; read as float32.
        dtype: `"bfloat16"` or `"float16"`.
        seed: As for `keras.random`: an integer gives the same bits at each
            call, a `keras.random.SeedGenerator` others at each call, None uses
            the global generator, which no compiled JAX function can use.

    Returns:
        Tensor of the shape of `x` and of dtype `dtype`.

    Raises:
        ValueError: If `dtype` is another dtype.
    """
    check_roundable(dtype)
    x = ops.cast(tensor_of(x, "float32"), "float32")
    bits = keras.random.randint(
        ops.shape(x), 0, 2**RANDOM_BITS, dtype="int32", seed=seed
    )
    (rounded,) = primitives.current.by_rows(
        lambda _, x, bits: (round_with_bits(x, bits, dtype),), x, bits
    )
    return rounded


def round_with_bits(x: Tensor, bits: Tensor, dtype: str) -> Tensor:
    """Round as `stochastic_round` does, with the random bits given.

    The bits, int32 from 0 to 2^16 - 1, are added below the last bit of the
    format, and all bits below it are dropped. A carry makes the result the
    neighbour farther from 0. It is integer arithmetic, which no compiler rounds
    or flushes, so the result is the same on every backend.
    """
    check_roundable(dtype)
    raw = view(x, "int32")
    magnitude = ops.bitwise_and(raw, MAGNITUDE_BITS)
    # The upper bound keeps the sum with the bits of a NaN from wrapping.
    bounded = ops.minimum(magnitude, EXPONENT_BITS)
    if dtype == "bfloat16":
        code = ops.right_shift(bounded + bits, 16)
    else:
        code = _float16_code(bounded, bits)
    largest, infinity, nan = _SPECIAL[dtype]
    special = ops.where(ops.equal(magnitude, EXPONENT_BITS), infinity, nan)
    code = ops.where(
        ops.less(magnitude, EXPONENT_BITS), ops.minimum(code, largest), special
    )
    # The code of a negative value, as an int16, is less by the sign bit.
    signed = ops.where(ops.less(raw, 0), code - _SIGN, code)
    return view(ops.cast(signed, "int16"), dtype)


def round_to_neighbour(x: Tensor, bits: Tensor, format_name: str) -> Tensor:
    """Round each value up or down to a narrow format, by 16 random bits.

    It rounds away from 0 if the position between the two neighbours plus `bits
    * 2^-16` is at least 1. Values of the format do not change. No value is
    larger than the largest of the format.
    """
    fmt = formats.get(format_name)
    lowest, _ = grid_constants(format_name)
    raw = view(x, "int32")
    magnitude = view(ops.bitwise_and(raw, MAGNITUDE_BITS), "float32")
    exponent = ops.maximum(ops.bitwise_and(raw, EXPONENT_BITS), lowest)
    # The bits of the distance of the neighbours, a power of two. So is the
    # inverse, whose exponent is 254 less this one: nothing is rounded here.
    spacing = exponent - (fmt.mantissa_bits << 23)
    steps = magnitude * view((254 << 23) - spacing, "float32")
    steps = ops.floor(steps + ops.cast(bits, "float32") * 2.0**-RANDOM_BITS)
    rounded = ops.minimum(steps * view(spacing, "float32"), fmt.max)
    rounded = ops.where(ops.isnan(x), x, rounded)
    sign = ops.bitwise_and(raw, SIGN_BIT)
    if not fmt.has_negative_zero:
        sign = ops.where(ops.equal(rounded, 0.0), 0, sign)
    return view(ops.bitwise_or(view(rounded, "int32"), sign), "float32")


def check_roundable(dtype: str) -> None:
    """Raise if `stochastic_round` does not support this dtype."""
    if dtype not in ROUNDABLE:
        raise ValueError(
            f"Cannot round stochastically to this dtype. Received: {dtype!r}. "
            f"Allowed: {', '.join(ROUNDABLE)}. For float8 use `cast`, which "
            "rounds to nearest."
        )


def _float16_code(magnitude: Tensor, bits: Tensor) -> Tensor:
    """Round magnitudes, float32 bits, by 16 random bits to float16 codes."""
    # A float32 has 13 bits more: 13 of the random bits are added below.
    normal = ops.right_shift(magnitude + ops.right_shift(bits, 3), 13)
    small = view(ops.minimum(magnitude, _FLOAT16_NORMAL), "float32")
    # In units of 2^-40, sixteen bits below the spacing of the subnormals. A
    # float32 that a backend flushes to 0 is below one such unit anyway.
    fixed = ops.cast(small * 2.0**40, "int32")
    return ops.where(
        ops.less(magnitude, _FLOAT16_NORMAL),
        ops.right_shift(fixed + bits, 16),
        normal - (112 << 10),  # The exponent's bias: 15 in place of 127.
    )
