"""Casting and quantizing: the bits of the NumPy reference, in every way."""

import itertools
import math

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import formats, reference
from keras_policy_ext.numerics import casting
from ways import COMPILERS, WAYS, array, compiled, run, same_bits

DTYPES = [name for names in formats.FAMILIES.values() for name in names]
both = pytest.mark.parametrize("dtype", DTYPES)

AWKWARD_SCALES = np.array(
    [7.0, 0.1, 1 / 3, 3e-5, 1.1754944e-38, 1e30, 175.0, 0.99999994, 2.0**-64],
    "float32",
)
"""Divisors whose reciprocal is rounded, and the smallest and some large."""


def codes(dtype):
    return np.arange(256, dtype=np.uint8).view(formats.get(dtype).dtype)


def numbers(dtype):
    """All finite values, ascending, float32."""
    values = np.unique(codes(dtype).astype("float32"))
    return values[np.isfinite(values)]


def midpoints(dtype):
    """Between all neighbours, zero and the smallest subnormal included."""
    values = numbers(dtype)
    return (values[:-1] + values[1:]) / 2  # exact in float32


def beside(x):
    """`x` and the float32 below and above each value."""
    x = np.asarray(x, "float32")
    below = np.nextafter(x, np.float32(-np.inf))
    above = np.nextafter(x, np.float32(np.inf))
    return np.concatenate([below, x, above])


def ties(dtype, scale):
    """Values that, divided by `scale`, are at or beside a midpoint.

    No subnormal ones: JAX and TensorFlow compute with them as if they were 0.
    """
    with np.errstate(over="ignore", under="ignore"):
        x = beside(midpoints(dtype) * np.float32(scale))
    return np.where(np.isfinite(x) & (np.abs(x) > 2.0**-126), x, 0)


def cast(dtype):
    return lambda x: kpe.numerics.cast(x, dtype)


def no_subnormals(x):
    """Zero where JAX and TensorFlow on a CPU would read zero."""
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


# Casting


def every_code(dtype):
    return codes(dtype).astype("float32")


def beyond_the_largest(dtype):
    x = [448, 449, 464, 465, 479, 480, 481, 1e4, 57344, 61439, 61440, 65536]
    x = np.array([*x, 3e38, np.inf], "float32")
    return np.concatenate([beside(x[:-2]), x, -x, [np.nan, -np.nan]])


def subnormals(dtype):
    smallest = formats.get(dtype).smallest_subnormal
    multiples = np.arange(0, 2 * formats.get(dtype).mantissa_bits + 2)
    tiny = np.array([0, 1e-45, 1e-38, 2e-38, 1e-20, smallest * 0.49], "float32")
    x = np.concatenate([tiny, multiples * np.float32(smallest)])
    return np.concatenate([x, -x])


def random_bits(dtype):
    random = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint64)
    return random.astype(np.uint32).view("float32")


INPUTS = {
    "every code": every_code,
    "ties, and beside them": lambda dtype: beside(midpoints(dtype)),
    "beyond the largest number": beyond_the_largest,
    "NaN of both signs": lambda dtype: np.float32([np.nan, -np.nan, 1, -1]),
    "subnormals and zeros of both signs": subnormals,
    "any bits": random_bits,
}


@both
@WAYS
def test_a_cast_has_the_bits_of_the_reference(dtype, way):
    inputs = [np.asarray(x(dtype), "float32") for x in INPUTS.values()]
    found = array(run(cast(dtype), way, np.concatenate(inputs)))
    ends = np.cumsum([len(x) for x in inputs])[:-1]
    for name, x, got in zip(INPUTS, inputs, np.split(found, ends), strict=True):
        expected = reference.cast(x, dtype).view("uint8")
        np.testing.assert_array_equal(got.view("uint8"), expected, name)


@both
@pytest.mark.any_backend
def test_the_reference_saturates_and_rounds_ties_to_even(dtype):
    every = every_code(dtype)
    finite = np.isfinite(every)
    same_bits(reference.cast(every[finite], dtype), codes(dtype)[finite])
    at_ties = reference.cast(midpoints(dtype), dtype).view("uint8")
    assert np.all(at_ties % 2 == 0)
    x = beyond_the_largest(dtype).astype("float32")
    values = reference.cast(x, dtype).astype("float32")
    largest = formats.get(dtype).max
    assert np.nanmax(values) == largest and np.nanmin(values) == -largest
    assert np.isnan(values).tolist() == np.isnan(x).tolist()
    signs = reference.cast(np.float32([np.nan, -np.nan]), dtype).view("uint8")
    assert (signs[0] != signs[1]) == (formats.get(dtype).nan_code != 0x80)
    zeros = reference.cast(np.float32([-0.0, -1e-45]), dtype)
    same_bits(zeros, np.array([-0.0, -0.0]).astype(formats.get(dtype).dtype))


@both
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
@WAYS
def test_every_bfloat16_and_float16_number_is_cast_alike(dtype, source, way):
    source_dtype = np.dtype(getattr(ml_dtypes, source, source))
    halves = np.arange(2**16, dtype=np.uint16).view(source_dtype)
    x = halves.astype("float32")

    def function(x):
        half = ops.cast(x, source)
        assert keras.backend.standardize_dtype(half.dtype) == source
        return kpe.numerics.cast(half, dtype)

    same_bits(run(function, way, x), reference.cast(halves, dtype))


@both
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (100, 5, 100)])
@pytest.mark.parametrize("source", ["float32", "int32"])
def test_a_cast_keeps_the_shape(dtype, source, shape):
    x = np.resize(np.array([-1000, -3, 0, 17, 449, 465], source), shape)
    result = kpe.numerics.cast(ops.convert_to_tensor(x), dtype)
    assert tuple(result.shape) == shape
    same_bits(result, reference.cast(x, dtype))


@pytest.mark.parametrize(
    "dtype",
    ["e4m3", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn", "float32", 8],
)
@pytest.mark.parametrize(
    "function", ["cast", "quantize", "quantize_dequantize"]
)
def test_another_dtype_is_refused_with_what_is_allowed(dtype, function):
    arguments = (ops.ones(2), dtype)
    if function != "cast":
        arguments = (ops.ones(2), 1.0, dtype)
    with pytest.raises(ValueError) as error:
        getattr(kpe.numerics, function)(*arguments)
    message = str(error.value)
    assert repr(dtype) in message
    assert all(allowed in message for allowed in casting.CASTABLE)


# Quantizing


def scales_can_tell(dtype):
    """Whether the sample shows a multiplication by the reciprocal."""
    different = 0
    for scale in AWKWARD_SCALES:
        x = ties(dtype, scale)
        with np.errstate(over="ignore", under="ignore"):
            wrong = reference.cast(x * (np.float32(1) / scale), dtype)
        right = reference.quantize(x, scale, dtype)
        different += np.sum(wrong.view("uint8") != right.view("uint8"))
    return different > 20


@both
@WAYS
def test_quantize_divides_and_does_not_multiply_by_the_reciprocal(dtype, way):
    assert scales_can_tell(dtype)
    quantize = compiled(
        lambda x, scale: kpe.numerics.quantize(x, scale, dtype), way
    )
    for scale in AWKWARD_SCALES:
        x = ties(dtype, scale)
        result = quantize(*map(ops.convert_to_tensor, (x, scale)))
        same_bits(result, reference.quantize(x, scale, dtype))


@both
@WAYS
@pytest.mark.parametrize("scale", [7.0, 0.1, 3e-5])
def test_a_constant_scale_gives_the_codes_of_a_variable_one(dtype, way, scale):
    x = ties(dtype, scale)

    def function(x):
        return kpe.numerics.quantize(x, np.float32(scale), dtype)

    same_bits(run(function, way, x), reference.quantize(x, scale, dtype))


@both
@WAYS
def test_one_scale_per_row_is_broadcast(dtype, way):
    scales = AWKWARD_SCALES[:, None]
    x = np.stack([ties(dtype, scale) for scale in AWKWARD_SCALES])

    def function(x, scale):
        return kpe.numerics.quantize(x, scale, dtype)

    same_bits(
        run(function, way, x, scales), reference.quantize(x, scales, dtype)
    )


@both
@WAYS
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_half_precision_is_divided_in_float32(dtype, source, way):
    source_dtype = getattr(ml_dtypes, source, source)
    halves = np.arange(2**16, dtype=np.uint16).view(source_dtype)

    def function(x, scale):
        return kpe.numerics.quantize(ops.cast(x, source), scale, dtype)

    x = halves.astype("float32")
    for scale in (np.float32(0.1), np.float32(3e-5)):
        expected = reference.quantize(halves, scale, dtype)
        same_bits(run(function, way, x, scale), expected)


@both
@WAYS
def test_not_a_number_and_infinity_are_quantized_as_they_are_cast(dtype, way):
    x = np.array([np.nan, np.inf, -np.inf, 1.0, -0.0], "float32")

    def function(x, scale):
        return kpe.numerics.quantize(x, scale, dtype)

    for scale in (np.float32(0.1), np.float32(1e30)):
        same_bits(
            run(function, way, x, scale), reference.quantize(x, scale, dtype)
        )


@both
@WAYS
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_dequantize_multiplies_in_float32_then_casts(dtype, way, out):
    values = numbers(dtype)
    numpy_out = getattr(ml_dtypes, out, out)

    def function(x, scale):
        q = kpe.numerics.cast(x, dtype)
        return kpe.numerics.dequantize(q, scale, out)

    for scale in (np.float32(0.1), np.float32(4e-9)):
        q = reference.cast(values, dtype)
        expected = reference.dequantize(q, scale, numpy_out)
        result = run(function, way, values, scale)
        assert keras.backend.standardize_dtype(result.dtype) == out
        same_bits(ops.cast(result, "float32"), expected.astype("float32"))


@both
@WAYS
def test_quantize_dequantize_survives_compilation(dtype, way):
    """XLA may not drop the round trip as a pair of casts."""
    x = ties(dtype, 0.1)

    def function(x, scale):
        return kpe.numerics.quantize_dequantize(x, scale, dtype)

    expected = reference.quantize_dequantize(x, 0.1, dtype)
    same_bits(run(function, way, x, np.float32(0.1)), expected)
    assert np.any(expected != x)


@both
@WAYS
def test_numbers_held_in_float32_are_those_of_the_float8_codes(dtype, way):
    random = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint64)
    random = no_subnormals(random.astype(np.uint32).view("float32"))
    values = codes(dtype).astype("float32")
    special = np.float32([0.0, -0.0, np.inf, -np.inf, 449, 465, 1e4])
    x = np.concatenate([random, values, beside(midpoints(dtype)), special])

    def function(x, scale):
        return casting.quantize_float32(x, scale, dtype)

    for scale in (np.float32(1), np.float32(0.1)):
        expected = reference.quantize(x, scale, dtype).astype("float32")
        same_bits(run(function, way, x, scale), expected)


@pytest.mark.full
@both
@COMPILERS
def test_the_compiler_gives_the_same_codes(dtype, way):
    x = ties(dtype, 0.1)

    def function(x, scale):
        return kpe.numerics.quantize(x, scale, dtype)

    same_bits(
        run(function, way, x, np.float32(0.1)),
        reference.quantize(x, 0.1, dtype),
    )


# Properties

SIZE = 12  # one shape, so that nothing is compiled twice
vectors = st.lists(
    st.floats(-(2.0**100), 2.0**100, width=32), min_size=SIZE, max_size=SIZE
).map(lambda values: np.array(values, "float32"))
scale_values = st.floats(2.0**-75, 2.0**100, width=32)


def through(x, scale, dtype):
    result = kpe.numerics.quantize_dequantize(
        ops.convert_to_tensor(x), np.float32(scale), dtype
    )
    return ops.convert_to_numpy(result)


@both
@given(x=vectors, headroom=st.floats(1, 2.0**20, width=32))
def test_the_error_is_at_most_half_an_ulp_of_the_format(dtype, x, headroom):
    amax = max(float(np.abs(x).max()) * headroom, 2.0**-66)
    scale = float(reference.scale_from_amax(min(amax, 2.0**120), dtype))
    error = np.abs(through(x, scale, dtype).astype("float64") - x)
    f = formats.get(dtype)
    # Half the spacing at x: 2^-(m+1) of a normal number, half a subnormal
    # below; and three float32 roundings (scale, division, product).
    relative = 2.0 ** -(f.mantissa_bits + 1) + 4 * 2.0**-24
    absolute = 0.5 * f.smallest_subnormal * scale * (1 + 2.0**-22)
    assert np.all(error <= np.maximum(relative * np.abs(x), absolute))


@both
@given(x=vectors, scale=scale_values)
def test_quantizing_keeps_the_order(dtype, x, scale):
    assert np.all(np.diff(through(np.sort(x), scale, dtype)) >= 0)


@both
@given(x=vectors, scale=scale_values)
def test_quantizing_is_symmetric_in_the_sign(dtype, x, scale):
    positive, negative = through(x, scale, dtype), through(-x, scale, dtype)
    np.testing.assert_array_equal(positive, -negative)
    signs = np.signbit(positive) != np.signbit(negative)
    one_zero = not formats.get(dtype).has_negative_zero
    assert np.all(signs | (one_zero & (positive == 0)))


@both
@given(x=vectors, exponent=st.integers(-60, 60))
def test_quantizing_what_was_dequantized_changes_nothing(dtype, x, exponent):
    scale = math.ldexp(1.1, exponent)
    once = through(x, scale, dtype)
    np.testing.assert_array_equal(through(once, scale, dtype), once)


@both
def test_numbers_are_pairwise_distinct_after_a_round_trip(dtype):
    values = numbers(dtype)
    round_trip = through(values * np.float32(0.1), 0.1, dtype)
    assert all(a < b for a, b in itertools.pairwise(round_trip))
