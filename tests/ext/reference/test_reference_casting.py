"""The reference casts, quantizes and dequantizes as the formats say."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keras_policy_ext import formats, reference
from reference_numbers import (
    FLOAT8,
    FNUZ,
    finite,
    finite_values,
    float32s,
    same,
    signed,
)

pytestmark = pytest.mark.any_backend


def casted(x, dtype):
    return float(reference.cast(np.float32(x), dtype).astype(np.float64))


# Casting


@signed
def test_cast_keeps_every_number_of_the_format(dtype):
    f = formats.get(dtype)
    for code in np.arange(2**f.bits, dtype=np.uint8).view(f.dtype):
        x = float(code)
        expected = math.copysign(f.max, x) if math.isinf(x) else x
        assert same(casted(x, dtype), expected)
        assert same(reference.round_scalar(x, dtype), expected)


@signed
def test_cast_and_exact_rounding_agree_around_every_midpoint(dtype):
    values = finite_values(dtype)
    for low, high in itertools.pairwise(values):
        middle = np.float32((low + high) / 2)
        around = [
            np.nextafter(middle, np.float32(-np.inf)),
            middle,
            np.nextafter(middle, np.float32(np.inf)),
        ]
        for x in around:
            rounded = reference.round_scalar(float(x), dtype)
            assert same(casted(x, dtype), rounded)
        assert reference.round_scalar(float(around[0]), dtype) == low
        assert reference.round_scalar(float(around[2]), dtype) == high


@signed
def test_ties_go_to_the_even_code(dtype):
    f = formats.get(dtype)
    for low, high in itertools.pairwise(finite_values(dtype)):
        code = reference.cast((low + high) / 2, dtype)
        bits = int(code.view(np.uint8))
        assert bits % 2 == 0
        assert float(code) in (low, high)
        assert code.dtype == f.dtype


@signed
@given(x=float32s)
@example(x=math.nan)
def test_cast_and_exact_rounding_agree_on_any_float(dtype, x):
    exact = reference.round_scalar(x, dtype)
    if math.isnan(exact) and not formats.get(dtype).nan_codes:
        assert casted(x, dtype) == 0
    else:
        assert same(casted(x, dtype), exact)


@signed
@given(x=finite)
def test_exact_rounding_finds_a_nearest_number(dtype, x):
    values = finite_values(dtype)
    nearest = np.min(np.abs(values - x))
    assert abs(reference.round_scalar(x, dtype) - x) == nearest


@pytest.mark.parametrize("dtype", FLOAT8)
def test_cast_and_exact_rounding_agree_on_random_floats(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint64)
    x = bits.astype(np.uint32).view(np.float32)
    cast = reference.cast(x, dtype).astype(np.float64)
    exact = [reference.round_scalar(float(v), dtype) for v in x]
    np.testing.assert_array_equal(cast, exact)


@pytest.mark.full_except("float8_e4m3fnuz", "float8_e5m2fnuz")
@signed
def test_every_bfloat16_number_is_rounded_exactly(dtype):
    x = np.arange(2**16, dtype=np.uint32) << 16
    x = x.astype(np.uint32).view(np.float32)
    if not formats.get(dtype).nan_codes:
        x = x[~np.isnan(x)]
    found = reference.cast(x, dtype).astype(np.float64)
    exact = np.array([reference.round_scalar(float(v), dtype) for v in x])
    np.testing.assert_array_equal(found, exact)
    signs = np.signbit(found) == np.signbit(exact)
    assert np.all(signs | np.isnan(exact))


@pytest.mark.parametrize("dtype", FNUZ)
def test_formats_with_one_zero_and_one_nan_have_no_other(dtype):
    x = np.float32([np.nan, -np.nan, -0.0, -1e-30, 0.0])
    codes = [0x80, 0x80, 0, 0, 0]
    assert reference.cast(x, dtype).view(np.uint8).tolist() == codes
    bits = 2**16 - 1
    found = reference.stochastic_cast(x, bits, dtype).view(np.uint8)
    assert found[[0, 1, 2, 4]].tolist() == [0x80, 0x80, 0, 0]
    below = reference.stochastic_cast(x, 0, dtype).view(np.uint8)
    assert below.tolist() == codes


@signed
def test_cast_saturates_and_keeps_nan(dtype):
    top = formats.get(dtype).max
    x = np.array([np.inf, -np.inf, 3e38, -3e38, top * 1.04], np.float32)
    expected = [top, -top, top, -top, top]
    assert reference.cast(x, dtype).astype(np.float64).tolist() == expected
    if dtype != "float4_e2m1fn":  # Which has no NaN.
        assert np.isnan(reference.cast(np.nan, dtype).astype(np.float32))


def test_465_becomes_448():
    assert float(reference.cast(465.0, "float8_e4m3fn")) == 448.0


def test_cast_reads_any_dtype_and_shape():
    x = np.ones((2, 0, 3), ml_dtypes.bfloat16)
    assert reference.cast(x, "float8_e5m2").shape == (2, 0, 3)
    assert float(reference.cast(3, "float8_e5m2")) == 3.0


@pytest.mark.parametrize("function", [reference.cast, reference.round_scalar])
def test_exponent_only_format_is_refused(function):
    with pytest.raises(ValueError, match="quantize_mx"):
        function(1.0, "float8_e8m0fnu")


# Quantizing


@given(x=finite, scale=st.floats(2.0**-100, 2.0**100, width=32))
def test_quantize_divides_in_float32_then_casts(x, scale):
    with np.errstate(over="ignore", under="ignore"):
        divided = np.float32(x) / np.float32(scale)
    for dtype in FLOAT8:
        code = reference.quantize(x, scale, dtype)
        assert same(float(code), casted(divided, dtype))


@pytest.mark.parametrize(
    ("dtype", "bits"), [(d, b) for d, b in zip(FLOAT8, (3, 2), strict=True)]
)
@given(data=st.data())
def test_quantization_error_is_at_most_half_a_unit(dtype, bits, data):
    x = np.float32(data.draw(st.floats(-(2.0**100), 2.0**100, width=32)))
    amax = np.float32(
        max(abs(x), data.draw(st.floats(2.0**-66, 2.0**100, width=32)))
    )
    scale = reference.scale_from_amax(amax, dtype)
    error = abs(
        float(reference.quantize_dequantize(x, scale, dtype)) - float(x)
    )
    f = formats.get(dtype)
    # Half the spacing at x: relative 2^-(bits+1) of a normal number, half a
    # subnormal below; and three float32 roundings (scale, division, product).
    relative = 2.0 ** -(bits + 1) + 4 * 2.0**-24
    absolute = 0.5 * f.smallest_subnormal * float(scale)
    assert error <= max(relative * abs(float(x)), absolute * (1 + 2.0**-22))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_quantizing_a_dequantized_code_changes_nothing(dtype):
    f = formats.get(dtype)
    codes = np.arange(256, dtype=np.uint8).view(f.dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    for scale in (1.0, 0.037, 2.0**-20, 12345.678):
        again = reference.quantize(
            reference.dequantize(codes, scale), scale, dtype
        )
        np.testing.assert_array_equal(
            again.view(np.uint8), codes.view(np.uint8)
        )


def test_dequantize_multiplies_in_float32_before_the_cast():
    q = reference.cast([448.0, -1.5], "float8_e4m3fn")
    scale = np.float32(4e-9)  # Zero in float16: must not be cast first.
    result = reference.dequantize(q, scale, "float16")
    expected = (q.astype(np.float32) * scale).astype(np.float16)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float16
    assert reference.dequantize(q, scale, ml_dtypes.bfloat16).dtype == (
        np.dtype(ml_dtypes.bfloat16)
    )


def test_quantize_divides_rather_than_multiplies_by_the_reciprocal():
    # 175 / 7 = 25 is a tie and goes to 24; 175 * float32(1 / 7) is above it.
    assert float(reference.quantize(175.0, 7.0, "float8_e4m3fn")) == 24.0


def test_scales_broadcast():
    x = np.array([[1.0, 2.0], [4.0, 8.0]])
    q = reference.quantize(x, np.array([[1.0], [4.0]]), "float8_e4m3fn")
    assert q.astype(np.float32).tolist() == [[1.0, 2.0], [1.0, 2.0]]
