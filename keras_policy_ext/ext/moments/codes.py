"""Quantize the moments of an optimizer to one byte a number.

The bits are those of `reference`. Of a second moment, the square root
is stored: it has the dynamic range of a first moment. It has no sign, so that
its codes have one more bit of the mantissa.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.moments import moment_kernels
from keras_policy_ext.numerics import (
    decode_scales,
    encode_scales,
    round_up_to_power_of_two,
    view,
)

#: Numbers with one scale, by the name of the form.
BLOCKS = {"float8": 256, "mx": 32}

#: 2^32 divided by the golden ratio, an odd number.
GOLDEN = 0x9E3779B1

#: Magnitudes that count as infinite, and NaN, are taken for these in scales, so
#: that the numbers of the largest codes are finite, also when they are squared.
LARGEST = {"first": 2.0**120, "second": 2.0**60}

#: The smallest scale: denormals, which some backends take for 0, become 0.
SMALLEST = 2.0**-100

#: The smallest normal float32. A second moment below it counts as 0.
SMALLEST_NORMAL = 2.0**-126

#: What is added to a magnitude. Its exponent field is 128, of which the lower
#: four bits are 0.
OFFSET = 2.0


class Kind(NamedTuple):
    """The code of one kind of moments.

    A code has the lower four bits of the exponent and the upper bits of the
    mantissa of `OFFSET + magnitude / scale` in float32, and maybe a sign. So
    numbers below `OFFSET` are evenly spaced, and larger ones are less and less
    dense, as in a float.

    Attributes:
        mantissa_bits: How many bits of the mantissa it has.
        signed: Whether the eighth bit is a sign.
    """

    mantissa_bits: int
    signed: bool

    @property
    def dropped(self) -> int:
        """The number of bits of a float32 that a code leaves out."""
        return 23 - self.mantissa_bits

    @property
    def largest(self) -> float:
        """The float32 of the largest code, without sign."""
        return 2.0**17 - 2.0 ** (16 - self.mantissa_bits)


#: Of a second moment the square root is stored, without a sign and with one
#: more bit of the mantissa.
KINDS = {"first": Kind(3, True), "second": Kind(4, False)}

_SCALE_FORMAT = "float8_e8m0fnu"
_LANES = 16
_MAGNITUDE = 0x7FFFFFFF
_GOLDEN_INT32 = int(np.uint32(GOLDEN).view(np.int32))


def blocks_of(shape: Any, form: str) -> int:
    """Return how many scales a moment of a shape has."""
    return -(-math.prod(shape) // BLOCKS[form])


def quantize_moments(
    x: Tensor,
    kind: str,
    form: str,
    key: Tensor | None = None,
    first: Tensor | int = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize a moment to codes of one byte, with a scale for each block.

    Args:
        x: Float32 tensor of a known shape.
        kind: `"first"`, or `"second"` for a moment that is never negative.
        form: `"float8"`: a float32 scale for 256 numbers; `"mx"`: a power of
            two, one byte, for 32.
        key: Int32 scalar for stochastic rounding; None rounds to nearest.
        first: How many numbers of the moment are before `x`: whole blocks.

    Returns:
        Uint8 codes of the shape of `x`, and scales (blocks,), float32 or
        uint8. See `reference.quantize_moments`.
    """
    shape, count = tuple(x.shape), math.prod(x.shape)
    rows = _in_blocks(ops.cast(x, "float32"), count, BLOCKS[form])

    def quantized(before: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        here = key
        if here is not None:
            # The place of a number counts in the whole moment.
            place = first + before
            if isinstance(place, int):
                bits = np.uint32(place * GOLDEN & 0xFFFFFFFF)
                turn = int(bits.view(np.int32))
                here = here + turn if turn else here
            else:
                here = here + ops.cast(place, "int32") * _GOLDEN_INT32
        found = moment_kernels.current.quantize_blocks(rows, kind, form, here)
        return found or _quantized(rows, kind, form, here)

    codes, scale = backends.current.by_rows(quantized, rows)
    codes = ops.reshape(codes, (-1,))[:count]
    return ops.reshape(codes, shape), scale


def _quantized(
    rows: Tensor, kind: str, form: str, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantize blocks, the rows of a matrix."""
    stored = KINDS[kind]
    scale = _scales(_largest(rows), kind, form)
    # The `where` hides from compilers that the dividend is a constant.
    one = ops.where(scale > 0.0, 1.0, scale)
    factor = ops.expand_dims(ops.divide(one, scale), 1)
    # No compiler makes one operation of a product and the sum below: it is
    # not the product that is added.
    if stored.signed:
        q = ops.abs(ops.multiply(rows, factor))
    else:
        magnitude = ops.abs(rows)
        q = ops.multiply(backends.current.sqrt(magnitude), factor)
        q = ops.maximum(q, OFFSET * 2.0**-stored.mantissa_bits)
        q = ops.where(magnitude < SMALLEST_NORMAL, 0.0, q)
    bits = ops.minimum(view(q + OFFSET, "int32"), bits_of(stored.largest))
    bits = bits + _bits(rows.shape, key, stored.dropped)
    code = ops.right_shift(bits, stored.dropped)
    if stored.signed:
        sign = ops.right_shift(view(rows, "int32"), 24)
        code = ops.bitwise_or(code, ops.bitwise_and(sign, 0x80))
    if form == "mx":
        scale = encode_scales(scale, _SCALE_FORMAT)
    # A cast keeps the lower bits; the upper ones are those of OFFSET.
    return ops.cast(code, "uint8"), scale


def _largest(rows: Tensor) -> Tensor:
    """Return the bits of the largest magnitude in each row, int32 (rows,)."""
    # Integers are compared, which no compiler does in another way. It reduces
    # halves: XLA for a CPU takes twice as long for the whole axis (JAX 0.10).
    bits = view(rows, "int32")
    parts = [bits]
    while parts[0].shape[1] > _LANES:
        half = parts[0].shape[1] // 2
        parts = [y for x in parts for y in (x[:, :half], x[:, half:])]
    parts = [ops.bitwise_and(x, _MAGNITUDE) for x in parts]
    return ops.max(functools.reduce(ops.maximum, parts), axis=1)


def _scales(largest: Tensor, kind: str, form: str) -> Tensor:
    """Return the float32 scales of blocks, of the bits of their amaxes."""
    stored = KINDS[kind]
    limit = LARGEST[kind]
    known = largest >= bits_of(SMALLEST_NORMAL)
    if stored.signed:
        amax = view(ops.minimum(largest, bits_of(limit)), "float32")
    else:
        square = view(ops.minimum(largest, bits_of(limit**2)), "float32")
        amax = backends.current.sqrt(square)
    scale = amax * float(np.float32(1 / (stored.largest - OFFSET)))
    if form == "mx":
        scale = round_up_to_power_of_two(scale)
    return ops.where(known, ops.maximum(scale, SMALLEST), 1.0)


def bits_of(number: float) -> int:
    """Return the bits of a float32 as an int32."""
    return int(np.float32(number).view(np.int32))


def dequantize_moments(
    codes: Tensor, scale: Tensor, kind: str, form: str
) -> Tensor:
    """Return the float32 numbers of the codes of `quantize_moments`."""
    shape, count = tuple(codes.shape), math.prod(codes.shape)
    rows = _in_blocks(codes, count, BLOCKS[form])

    def numbers(_: int, rows: Tensor, scale: Tensor) -> tuple[Tensor]:
        found = moment_kernels.current.dequantize_blocks(
            rows, scale, kind, form
        )
        if found is None:
            found = _numbers(rows, scale, kind, form)
        return (found,)

    (found,) = backends.current.by_rows(numbers, rows, scale)
    return ops.reshape(ops.reshape(found, (-1,))[:count], shape)


def numbers_in_file(
    codes: np.ndarray[Any, Any],
    scale: np.ndarray[Any, Any],
    kind: str,
    form: str,
) -> np.ndarray[Any, Any]:
    """Return what `dequantize_moments` does, in NumPy and without a device."""
    stored = KINDS[kind]
    if form == "mx":
        scale = (scale.astype(np.uint32) << 23).view(np.float32)
    code = np.arange(256, dtype=np.int32)
    bits = (code & 127 if stored.signed else code) << stored.dropped
    value = (bits | bits_of(OFFSET)).view(np.float32) - np.float32(OFFSET)
    if stored.signed:
        value = np.where(code & 128, -value, value)
    blocks = np.repeat(scale, BLOCKS[form])[: codes.size]
    numbers = value[codes.ravel()] * blocks
    if not stored.signed:
        numbers = np.square(numbers)
    return numbers.reshape(codes.shape)


def _numbers(rows: Tensor, scale: Tensor, kind: str, form: str) -> Tensor:
    if form == "mx":
        scale = decode_scales(scale, _SCALE_FORMAT)
    scale = ops.expand_dims(scale, 1)
    stored = KINDS[kind]
    code = ops.cast(rows, "int32")
    magnitude = ops.bitwise_and(code, 0x7F) if stored.signed else code
    bits = ops.left_shift(magnitude, stored.dropped)
    numbers = view(ops.bitwise_or(bits, bits_of(OFFSET)), "float32") - OFFSET
    numbers = numbers * scale
    if not stored.signed:
        return ops.square(numbers)
    sign = ops.left_shift(ops.bitwise_and(code, 0x80), 24)
    return view(ops.bitwise_or(view(numbers, "int32"), sign), "float32")


def _in_blocks(x: Tensor, count: int, size: int) -> Tensor:
    """Return a tensor as a matrix of blocks, padded with zeros."""
    x = ops.reshape(x, (-1,))
    if count % size:
        x = ops.pad(x, [[0, -count % size]])
    return ops.reshape(x, (-1, size))


def _bits(shape: Any, key: Tensor | None, count: int) -> Tensor:
    """Return so many bits per number; see `ext.reference.moments`."""
    if key is None:
        return ops.full((1, 1), 1 << (count - 1), "int32")
    # In this form XLA for a CPU takes a quarter of the time (JAX 0.10).
    index = ops.arange(math.prod(shape), dtype="int32")
    index = ops.reshape(index, shape)
    index = index * _GOLDEN_INT32 + key
    # A shift repeats the sign, which the mask takes out.
    return ops.bitwise_and(ops.right_shift(index, 32 - count), (1 << count) - 1)
