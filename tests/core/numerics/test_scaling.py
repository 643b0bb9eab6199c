"""From tensors to amaxes to scales, and what quantization lost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import formats, reference
from keras_policy_ext.numerics import scaling
from ways import COMPILERS, WAYS, run, same_bits

DTYPES = ["float8_e4m3fn", "float8_e5m2"]
both = pytest.mark.parametrize("dtype", DTYPES)
MARGINS = [0, 1, 3, 20, 127, 5000]

SPECIAL = [0.0, 1e-45, 2.0**-127, 1e-38, 2.0**-126, 3e38, np.inf, np.nan]


def sample_of_amaxes():
    """Specials, every binade with its neighbours, and 5000 random values."""
    binades = 2.0 ** np.arange(-126, 128, dtype="float64")
    exact = np.concatenate(
        [binades, *(formats.get(dtype).max * binades for dtype in DTYPES)]
    )
    with np.errstate(over="ignore"):
        exact = exact.astype("float32")
    exact = exact[np.isfinite(exact)]
    beside = [
        np.nextafter(exact, np.float32(0)),
        np.nextafter(exact, np.float32(np.inf)),
    ]
    random = np.random.default_rng(0).integers(1, 0x7F800000, 5000)
    random = random.astype("uint32").view("float32")
    largest = [np.finfo("float32").max]
    parts = [SPECIAL, exact, *beside, random, largest]
    return np.concatenate(parts).astype("float32")


AMAXES = sample_of_amaxes()


# amax


@WAYS
def test_amax_is_the_largest_magnitude(way):
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype("float32")
    x[1, 2, 3] = -9.0
    same_bits(run(scaling.amax, way, x), reference.amax(x))
    for axis, keepdims in ((0, False), ((0, 2), True), (-1, True)):

        def along(x, axis=axis, keepdims=keepdims):
            return scaling.amax(x, axis=axis, keepdims=keepdims)

        expected = np.abs(x).max(axis=axis, keepdims=keepdims)
        same_bits(run(along, way, x), expected)


def test_amax_along_no_axis_is_the_magnitude():
    x = np.array([[-3.0, 2.0], [0.5, -1.0]], "float32")
    for keepdims in (False, True):
        found = scaling.amax(ops.convert_to_tensor(x), (), keepdims)
        np.testing.assert_array_equal(ops.convert_to_numpy(found), np.abs(x))


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@WAYS
def test_nan_anywhere_makes_amax_not_finite(source, way):
    x = np.ones((37, 37), "float32")
    np.fill_diagonal(x, np.nan)

    def rows(x):
        x = ops.cast(x, source)
        return scaling.amax(x, axis=1), scaling.amax(x)

    per_row, total = run(rows, way, x)
    assert not np.any(np.isfinite(ops.convert_to_numpy(per_row)))
    assert not np.isfinite(ops.convert_to_numpy(total))


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@WAYS
def test_infinity_makes_amax_infinite(source, value, way):
    x = np.array([[1.0, value], [-2.0, 1.0]], "float32")
    result = run(lambda x: scaling.amax(ops.cast(x, source)), way, x)
    same_bits(result, np.float32(np.inf))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
@WAYS
def test_an_empty_tensor_has_amax_zero(shape, way):
    x = np.zeros(shape, "float32")
    same_bits(run(scaling.amax, way, x), np.float32(0))


@pytest.mark.parametrize(
    "axis, shape", [(1, (3, 1, 2)), (2, (3, 0, 1)), ((1, 2), (3, 1, 1))]
)
@WAYS
def test_amaxes_of_an_empty_tensor_have_its_other_axes(axis, shape, way):
    x = np.zeros((3, 0, 2), "float32")
    result = run(lambda x: scaling.amax(x, axis, keepdims=True), way, x)
    same_bits(result, np.zeros(shape, "float32"))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "int32"])
@WAYS
def test_amax_is_float32_whatever_is_measured(source, way):
    x = np.array([1.0, -300.0, 100.0], "float32")
    result = run(lambda x: scaling.amax(ops.cast(x, source)), way, x)
    same_bits(result, np.float32(300.0))


# Scales


@both
@pytest.mark.parametrize("power_of_two", [False, True])
@WAYS
def test_scale_from_amax_has_the_bits_of_the_reference(
    dtype, power_of_two, way
):
    def scales(amaxes):
        return [
            kpe.numerics.scale_from_amax(amaxes, dtype, margin, power_of_two)
            for margin in MARGINS
        ]

    results = run(scales, way, AMAXES)
    for margin, result in zip(MARGINS, results, strict=True):
        same_bits(
            result,
            reference.scale_from_amax(AMAXES, dtype, margin, power_of_two),
        )


@both
@WAYS
def test_scale_of_multiplier_has_the_bits_of_the_reference(dtype, way):
    limit = formats.get(dtype).max

    def scales(amaxes):
        return [
            scaling.scale_of_multiplier(amaxes, limit, margin)
            for margin in MARGINS
        ]

    results = run(scales, way, AMAXES)
    for margin, result in zip(MARGINS, results, strict=True):
        expected = reference.scale_of_multiplier(AMAXES, dtype, margin)
        same_bits(result, expected)


@pytest.mark.full
@both
@COMPILERS
def test_the_compiler_leaves_both_divisions_as_they_are(dtype, way):
    limit = formats.get(dtype).max

    def scales(amaxes):
        direct = scaling.scale_from_amax(amaxes, dtype)
        return direct, scaling.scale_of_multiplier(amaxes, limit)

    direct, inverted = run(scales, way, AMAXES)
    same_bits(direct, reference.scale_from_amax(AMAXES, dtype))
    same_bits(inverted, reference.scale_of_multiplier(AMAXES, dtype))


@both
def test_the_sample_tells_the_orders_of_operations_apart(dtype):
    amaxes = AMAXES[np.isfinite(AMAXES) & (AMAXES > 2.0**-100)]
    limit = np.float32(formats.get(dtype).max)
    divided = reference.scale_from_amax(amaxes, dtype)
    inverted = reference.scale_of_multiplier(amaxes, dtype)
    multiplied = amaxes * (np.float32(1) / limit)
    assert np.sum(divided != inverted) > 100
    assert np.sum(divided != multiplied) > 100


@both
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 3, 127])
def test_the_scale_of_one_amax_is_that_of_it_among_others(
    dtype, power_of_two, margin
):
    # PyTorch computes it from a number and not from a tensor.
    amaxes = np.concatenate([AMAXES[: len(SPECIAL)], AMAXES[::97]])

    def scale(amax):
        amax = ops.convert_to_tensor(amax)
        found = scaling.scale_from_amax(amax, dtype, margin, power_of_two, 0.7)
        return ops.convert_to_numpy(found)

    same_bits(np.stack([scale(each) for each in amaxes]), scale(amaxes))


@both
@pytest.mark.parametrize("margin", [0, 3, 127])
def test_the_inverted_scale_of_one_amax_is_that_of_it_among_others(
    dtype, margin
):
    amaxes = np.concatenate([AMAXES[: len(SPECIAL)], AMAXES[::97]])
    limit = formats.get(dtype).max

    def scale(amax):
        amax = ops.convert_to_tensor(amax)
        found = scaling.scale_of_multiplier(amax, limit, margin, 0.7)
        return ops.convert_to_numpy(found)

    same_bits(np.stack([scale(each) for each in amaxes]), scale(amaxes))


@WAYS
def test_a_tensor_of_limits_gives_each_row_its_own(way):
    limits = np.array([448.0, 448.0, 57344.0], "float32")
    amaxes = np.array([3.0, 5.0, 7.0], "float32")

    def scales(amaxes, limits):
        direct = scaling.scale_for_limit(amaxes, limits, 2)
        return direct, scaling.scale_of_multiplier(amaxes, limits, 2)

    direct, inverted = run(scales, way, amaxes, limits)
    same_bits(direct, amaxes / (limits / np.float32(4)))
    expected = np.float32(1) / (limits / np.float32(4) / amaxes)
    same_bits(inverted, expected)


def both_scales(amaxes, previous):
    return (
        kpe.numerics.scale_from_amax(
            amaxes, "float8_e4m3fn", previous=previous
        ),
        scaling.scale_of_multiplier(amaxes, 448.0, previous=previous),
    )


@WAYS
def test_zero_and_not_finite_amaxes_keep_the_previous_scale(way):
    amaxes = np.array([0.0, np.nan, np.inf, -0.0, 448.0], "float32")
    previous = np.array([0.3, 1e-20, 7.0, 2.0, 5.0], "float32")
    expected = np.append(previous[:4], np.float32(1.0))
    for result in run(both_scales, way, amaxes, previous):
        same_bits(result, expected)


@WAYS
def test_every_scale_has_a_finite_reciprocal(way):
    for scales in run(both_scales, way, AMAXES, np.float32(1)):
        reciprocal = ops.convert_to_numpy(1.0 / scales)
        assert np.all(np.isfinite(reciprocal))
        assert np.all(reciprocal > 0)


@WAYS
def test_rounding_up_keeps_powers_of_two_and_lifts_the_next_number(way):
    powers = (2.0 ** np.arange(-126, 128)).astype("float32")
    above = np.nextafter(powers[:-1], np.float32(np.inf))
    below = np.nextafter(powers[1:], np.float32(0))
    round_up = scaling.round_up_to_power_of_two
    same_bits(run(round_up, way, powers), powers)
    same_bits(run(round_up, way, above), powers[1:])
    same_bits(run(round_up, way, below), powers[1:])


SIZE = 12  # one shape, so that nothing is compiled twice
amaxes_lists = st.lists(
    st.floats(0, float(np.finfo("float32").max), width=32),
    min_size=SIZE,
    max_size=SIZE,
).map(lambda values: np.array(values, "float32"))


@both
@given(amaxes=amaxes_lists, margin=st.sampled_from([0, 1, 7]))
def test_a_larger_amax_never_has_a_smaller_scale(dtype, amaxes, margin):
    amaxes = np.sort(amaxes[amaxes > 0])
    amaxes = np.pad(amaxes, (SIZE - len(amaxes), 0), constant_values=1e-45)
    tensor, limit = ops.convert_to_tensor(amaxes), formats.get(dtype).max
    for scales in (
        kpe.numerics.scale_from_amax(amaxes, dtype, margin),
        kpe.numerics.scale_from_amax(amaxes, dtype, margin, True),
        scaling.scale_of_multiplier(tensor, limit, margin),
    ):
        assert np.all(np.diff(ops.convert_to_numpy(scales)) >= 0)


@both
@given(amaxes=amaxes_lists)
def test_a_power_of_two_is_between_the_scale_and_its_double(dtype, amaxes):
    exact = kpe.numerics.scale_from_amax(amaxes, dtype)
    power = kpe.numerics.scale_from_amax(amaxes, dtype, power_of_two=True)
    exact, power = ops.convert_to_numpy(exact), ops.convert_to_numpy(power)
    assert np.all(exact <= power)
    assert np.all(power < 2 * exact)
    assert np.all(np.frexp(power)[0] == 0.5)


@both
@given(amaxes=amaxes_lists)
def test_no_finite_value_saturates_under_its_own_scale(dtype, amaxes):
    amaxes = np.maximum(amaxes, np.float32(1e-30))
    scales = kpe.numerics.scale_from_amax(amaxes, dtype)
    ratio = amaxes.astype("float64") / ops.convert_to_numpy(scales)
    assert np.all(ratio <= formats.get(dtype).max * (1 + 2.0**-22))


# What was lost


def _pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 11)).astype("float32")
    noisy = x + rng.normal(size=x.shape).astype("float32") * np.float32(1e-3)
    yield "noise", x, noisy
    yield "scaled up", x * np.float32(1e25), noisy * np.float32(1e25)
    yield "scaled down", x * np.float32(1e-25), noisy * np.float32(1e-25)
    yield "opposite", x, -x
    yield "gone", x, x * 0


PAIRS = list(_pairs())


@pytest.mark.parametrize(
    ("x", "y"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS]
)
@WAYS
def test_sqnr_is_that_of_the_reference(x, y, way):
    result = ops.convert_to_numpy(run(kpe.numerics.sqnr_db, way, x, y))
    assert result.dtype == np.float32
    # The float32 sums of about 100 squares and two logarithms.
    assert result == pytest.approx(reference.sqnr_db(x, y), abs=1e-4)


@WAYS
def test_sqnr_of_equals_is_infinite_and_of_noise_alone_minus_infinite(way):
    def db(x, y):
        return float(run(kpe.numerics.sqnr_db, way, x, y))

    x, zero = np.ones(3, "float32"), np.zeros(3, "float32")
    for a, b in ((x, x), (zero, zero), (zero, x)):
        assert db(a, b) == reference.sqnr_db(a, b)
    assert db(x, x) == math.inf
    assert db(zero, x) == -math.inf


@both
@WAYS
def test_underflow_is_counted_as_in_the_reference(dtype, way):
    exponents = np.random.default_rng(0).uniform(-30, 3, size=(30, 30))
    x = (2.0**exponents).astype("float32")
    x[::7] = 0

    def fraction(x, scale):
        return kpe.numerics.underflow_fraction(x, scale, dtype)

    for scale in (np.float32(1), np.float32(0.013)):
        result = ops.convert_to_numpy(run(fraction, way, x, scale))
        expected = reference.underflow_fraction(x, scale, dtype)
        assert 0 < expected < 1
        assert result == pytest.approx(expected, abs=1e-6)


@both
def test_nothing_underflows_where_there_is_nothing(dtype):
    for x in (np.zeros(4, "float32"), np.zeros(0, "float32")):
        x = ops.convert_to_tensor(x)
        assert float(kpe.numerics.underflow_fraction(x, 1.0, dtype)) == 0


@pytest.mark.parametrize("axis", [None, 1, (0, 1)])
def test_one_nan_among_many_numbers_is_not_lost(axis):
    """XLA leaves it out of a maximum of 4096 numbers and more."""
    x = np.ones((2, 5000), "float32")
    x[1, 4321] = np.nan
    found = scaling.amax(ops.convert_to_tensor(x), axis=axis)
    assert not np.isfinite(ops.convert_to_numpy(found)).all()
