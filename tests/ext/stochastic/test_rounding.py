"""Stochastic rounding: which neighbour, how often, and the bits of both."""

import math
from fractions import Fraction

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import reference
from keras_policy_ext.ext.stochastic.rounding import round_with_bits
from ways import COMPILERS, WAYS, run, same_bits

both = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])

ALL_BITS = np.arange(2**16, dtype="int32")


def numpy_dtype(dtype):
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def every_number(dtype):
    return np.arange(2**16, dtype=np.uint16).view(numpy_dtype(dtype))


def rounding(dtype):
    return lambda x, bits: round_with_bits(x, bits, dtype)


def neighbours(x, dtype):
    """The numbers of the format around a finite x, towards and off 0."""
    with np.errstate(invalid="ignore"):  # of NaN
        finite = every_number(dtype)[: 2**15].astype("float64")
    finite = finite[np.isfinite(finite)]
    place = np.searchsorted(finite, abs(float(x)), side="right") - 1
    towards, off = finite[place], finite[min(place + 1, len(finite) - 1)]
    return math.copysign(towards, x), math.copysign(off, x)


def position(x, dtype):
    """How far x is from one neighbour to the other: an exact fraction."""
    towards, off = neighbours(x, dtype)
    if towards == off:  # beyond the largest number
        return Fraction(0)
    part = Fraction(float(x)) - Fraction(towards)
    return part / (Fraction(off) - Fraction(towards))


BETWEEN = {
    "bfloat16": [1.0009, -0.9990, 3.3e38, -1e-20, 1.2e-38, 3e-41, -1e-44],
    "float16": [1.0003, -0.9999, 65503.7, -1e-3, 6.105e-5, 2.9e-7, -3e-8],
}
"""Float32 numbers between two of the format: normal and subnormal ones, some
in the last binade, some below the smallest subnormal."""


@both
@WAYS
def test_each_neighbour_is_taken_for_its_share_of_all_random_bits(dtype, way):
    x = np.array(BETWEEN[dtype], "float32")
    grid = [a.ravel() for a in np.meshgrid(x, ALL_BITS, indexing="ij")]

    expected = reference.stochastic_round(*grid, dtype)

    same_bits(run(rounding(dtype), way, *grid), expected)
    rows = expected.astype("float64").reshape(len(x), -1)
    for number, row in zip(x, rows, strict=True):
        towards, off = neighbours(number, dtype)
        assert set(row) == {towards, off}
        share = Fraction(int(np.sum(row == off)), 2**16)
        assert share == Fraction(int(position(number, dtype) * 2**16), 2**16)


@both
@WAYS
def test_numbers_of_the_format_infinity_and_nan_stay(dtype, way):
    numbers = every_number(dtype)
    x = numbers.astype("float32")
    some = np.random.default_rng(0).integers(0, 2**16, len(x), "int32")
    for bits in (np.zeros_like(some), some, np.full_like(some, 2**16 - 1)):
        same_bits(run(rounding(dtype), way, x, bits), numbers)


def any_float32(size=30_000):
    """Random bits, subnormals, and the range in which float16 is fine."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 2**32, size, np.uint64).astype(np.uint32)
    exponents = random.uniform(-27, 17, size)
    signs = random.choice(np.float32([-1, 1]), size)
    return np.concatenate(
        [
            bits.view("float32"),
            (bits & np.uint32(0x807FFFFF)).view("float32"),
            np.exp2(exponents).astype("float32") * signs,
            np.float32([0.0, -0.0, np.inf, -np.inf, 3.4028235e38, -3.4e38]),
            np.float32([65504, 65505, 65520, -65536, 2.0**-24, 2.0**-25]),
            # NaN whose payload is in the bits that are cut off
            np.uint32([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF]).view("float32"),
        ]
    )


@both
@pytest.mark.parametrize("way", ["eager", *COMPILERS.args[1]])
def test_any_float32_is_rounded_as_the_reference_rounds_it(dtype, way):
    x = any_float32()
    bits = np.random.default_rng(2).integers(0, 2**16, len(x), "int32")
    expected = reference.stochastic_round(x, bits, dtype)
    same_bits(run(rounding(dtype), way, x, bits), expected)
    assert np.array_equal(np.isnan(expected), np.isnan(x))
    assert np.array_equal(np.isinf(expected), np.isinf(x))


@both
def test_the_reference_takes_the_neighbour_that_the_fraction_asks_for(dtype):
    random = np.random.default_rng(3)
    x = any_float32()
    x = random.choice(x[np.isfinite(x)], 300)
    bits = random.integers(0, 2**16, len(x))
    for number, drawn in zip(x, bits, strict=True):
        towards, off = neighbours(number, dtype)
        reached = int(position(number, dtype) * 2**16) + int(drawn) >= 2**16
        result = reference.stochastic_round(number, drawn, dtype)
        assert float(result) == (off if reached else towards)


def test_the_mean_of_many_draws_is_the_number():
    dtype, x, draws = "bfloat16", np.float32(1.0003), 2**16

    result = kpe.numerics.stochastic_round(ops.full((draws,), x), seed=5)

    assert keras.backend.standardize_dtype(result.dtype) == dtype
    values = ops.convert_to_numpy(ops.cast(result, "float32"))
    towards, off = neighbours(x, dtype)
    share = float(position(x, dtype))
    standard_error = (off - towards) * math.sqrt(share * (1 - share) / draws)
    assert abs(values.mean(dtype="float64") - x) < 5 * standard_error


def test_an_integer_seed_repeats_and_a_generator_goes_on():
    x = ops.full((64,), 1.003)

    def draw(seed):
        y = kpe.numerics.stochastic_round(x, seed=seed)
        return ops.convert_to_numpy(ops.cast(y, "float32"))

    generator = keras.random.SeedGenerator(1)
    first, second = draw(generator), draw(generator)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(draw(keras.random.SeedGenerator(1)), first)
    np.testing.assert_array_equal(draw(7), draw(7))
    assert not np.array_equal(draw(None), draw(None))


@pytest.mark.parametrize("shape", [(), (2, 0, 3)])
def test_scalars_and_empty_tensors_are_rounded(shape):
    result = kpe.numerics.stochastic_round(ops.full(shape, 0.5), seed=1)
    same_bits(result, np.full(shape, 0.5, numpy_dtype("bfloat16")))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "half", None])
def test_another_dtype_is_refused_with_what_is_allowed(dtype):
    with pytest.raises(ValueError) as error:
        kpe.numerics.stochastic_round(ops.ones(2), dtype, seed=1)
    message = str(error.value)
    assert repr(dtype) in message
    assert "bfloat16, float16" in message
