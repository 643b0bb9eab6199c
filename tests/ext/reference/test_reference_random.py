"""Rounding at random: bits that are a hash, and keys, in NumPy."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_policy_ext import formats, reference
from keras_policy_ext.recipes import (
    MATMULS,
    CurrentScaling,
    NVFP4Scaling,
    Quantization,
    Tile,
)

pytestmark = pytest.mark.any_backend

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
narrow = pytest.mark.parametrize("dtype", [E4M3, E5M2, E2M1])

ALL_BITS = np.arange(2**16)
keys = st.integers(-(2**31), 2**31 - 1)


def finite_values(dtype):
    f = formats.get(dtype)
    codes = np.arange(2**f.bits, dtype=np.uint8).view(f.dtype)
    values = codes.astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def mix(x):
    """lowbias32, in integers of Python."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def hashed(i, key):
    key %= 2**32
    inner = mix((i + key) % 2**32)
    return mix(inner ^ key * 0x9E3779B9 % 2**32) >> 16


# Bits


@given(key=keys)
def test_bits_are_the_hash_of_index_and_key(key):
    expected = [hashed(i, key) for i in range(12)]
    assert reference.random_bits((3, 4), key).ravel().tolist() == expected


def test_a_key_may_be_written_without_a_sign():
    signed = reference.random_bits(50, -7)
    assert signed.tolist() == reference.random_bits(50, 2**32 - 7).tolist()
    assert signed.dtype == np.int32


def test_bits_of_an_empty_shape_are_empty():
    assert reference.random_bits((0, 3), 1).shape == (0, 3)


@pytest.mark.parametrize("key", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_bits_are_evenly_spread_and_independent_of_their_neighbours(key):
    n = 2**16
    bits = reference.random_bits(n, key)
    assert bits.min() >= 0
    assert bits.max() < 2**16
    # Means of n uniform numbers: 5 standard errors.
    assert abs(bits.mean() / 2**16 - 0.5) < 5 / np.sqrt(12 * n)
    centred = bits / 2**16 - 0.5
    for apart in (1, 2, 16, 128):
        product = np.mean(centred[:-apart] * centred[apart:]) * 12
        assert abs(product) < 5 / np.sqrt(n)


def test_other_keys_have_other_bits():
    found = [reference.random_bits(64, key) for key in range(20)]
    for a, b in itertools.combinations(found, 2):
        assert np.mean(a == b) < 0.1


# Keys


@given(
    key=keys, amax=st.floats(0, width=32), matmul=st.sampled_from([*MATMULS])
)
def test_a_key_is_the_hash_of_step_amax_and_matmul(key, amax, matmul):
    number = list(MATMULS).index(matmul)
    bits = int(np.float32(amax).view(np.uint32))
    expected = mix((key % 2**32 ^ mix(bits)) + number & 0xFFFFFFFF)
    found = reference.matmul_key(key, amax, matmul)
    assert found % 2**32 == expected
    assert -(2**31) <= found < 2**31


def test_an_operand_of_a_matmul_is_rounded_by_its_own_key():
    rng = np.random.default_rng(0)
    x, kernel, g = (
        rng.normal(size=s).astype(np.float32)
        for s in [(20, 33), (33, 24), (20, 24)]
    )
    result = reference.linear(x, kernel, g, NVFP4Scaling(), key=11)
    for matmul, matrix in (("inputs_grad", g), ("kernel_grad", g.T)):
        own = reference.matmul_key(11, np.abs(g).max(), matmul)
        asked = NVFP4Scaling().quantization("outputs_grad", matmul)
        found = reference.quantize_matrices(matrix[None], asked, own)
        there = result.matrices["outputs_grad", matmul]
        np.testing.assert_array_equal(there.codes, found.codes)
    again = reference.linear(x, kernel, g, NVFP4Scaling(), key=12)
    np.testing.assert_array_equal(again.y, result.y)
    assert np.any(again.inputs_grad != result.inputs_grad)
    assert np.any(again.kernel_grad != result.kernel_grad)


def test_rounding_at_random_needs_a_key():
    ones = np.ones((2, 2))
    with pytest.raises(ValueError, match="Pass the key of the step"):
        reference.linear(ones, ones, ones, NVFP4Scaling())
    reference.linear(ones, ones, ones, CurrentScaling())


def test_the_index_runs_over_the_transformed_and_padded_matrices():
    x = np.random.default_rng(1).normal(size=(2, 3, 17)).astype(np.float32)
    options = {"format": E2M1, "scale_format": E4M3, "tile": Tile(1, 16)}
    asked = Quantization(rounding="stochastic", hadamard=16, **options)
    found = reference.quantize_matrices(x, asked, 5)
    padded = reference.hadamard(x)
    assert padded.shape == (2, 3, 32)
    plain = Quantization(rounding="stochastic", **options)
    same = reference.quantize_matrices(padded, plain, 5)
    np.testing.assert_array_equal(found.codes, same.codes)
    bits = reference.random_bits((2, 3, 32), 5)
    nearest = reference.quantize_matrices(padded, Quantization(**options), None)
    np.testing.assert_array_equal(found.scales, nearest.scales)
    amax = np.abs(padded).max()
    top = np.float32(2688) / amax
    sf = found.scales.astype(np.float32).repeat(16, axis=2)
    scaled = padded * (1 / (sf * (1 / top)))
    expected = reference.stochastic_cast(scaled, bits, E2M1)
    np.testing.assert_array_equal(found.codes, expected)


# Rounding


@pytest.mark.full_except("float4_e2m1fn", "float8_e5m2")
@narrow
@given(data=st.data())
def test_over_all_bits_the_mean_is_the_number(dtype, data):
    top = formats.get(dtype).max
    x = np.float32(data.draw(st.floats(-top, top, width=32)))
    found = reference.stochastic_cast(x, ALL_BITS, dtype).astype(np.float64)
    values = finite_values(dtype)
    low, high = values[values <= x].max(), values[values >= x].min()
    assert set(found) <= {low, high}
    # What is below 2^-16 of the way is lost, and the sum rounds in float32.
    gap = float(high) - float(low)
    assert abs(found.mean() - x) <= gap * 2.0**-16 * 1.01


@pytest.mark.full_except("float8_e5m2")
@narrow
def test_numbers_of_the_format_stay_as_they_are(dtype):
    values = finite_values(dtype)
    found = reference.stochastic_cast(values[:, None], ALL_BITS[None], dtype)
    expected = values[:, None] + np.zeros(2**16)
    np.testing.assert_array_equal(found.astype(np.float32), expected)


@narrow
@given(x=st.floats(width=32, allow_nan=False), bits=st.integers(0, 2**16 - 1))
def test_rounding_at_random_is_symmetric_and_saturates(dtype, x, bits):
    found = reference.stochastic_cast(np.float32([x, -x]), bits, dtype)
    up, down = found.astype(np.float64)
    assert up == -down
    assert np.signbit(up) != np.signbit(down)
    top = formats.get(dtype).max
    assert abs(up) <= top
    if abs(x) >= top:
        assert abs(up) == top


@narrow
@given(x=st.floats(-1e6, 1e6, width=32), bits=st.integers(0, 2**16 - 1))
def test_more_bits_never_round_nearer_to_zero(dtype, x, bits):
    found = reference.stochastic_cast(x, [0, bits, 2**16 - 1], dtype)
    low, between, high = np.abs(found.astype(np.float64))
    assert low <= between <= high
    assert low <= abs(float(reference.cast(x, dtype))) <= high or (
        low == high == formats.get(dtype).max
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nan_stays_nan(dtype):
    found = reference.stochastic_cast(np.nan, [0, 2**16 - 1], dtype)
    assert np.isnan(found.astype(np.float32)).all()


def test_it_agrees_with_the_rounding_of_stored_weights():
    # e5m2 is the one format that both take; infinities apart.
    rng = np.random.default_rng(2)
    x = np.float32(
        rng.normal(size=50_000) * 2.0 ** rng.integers(-14, 14, 50_000)
    )
    bits = rng.integers(0, 2**16, x.size)
    np.testing.assert_array_equal(
        reference.stochastic_cast(x, bits, E5M2),
        reference.stochastic_round(x, bits, E5M2),
    )


def test_the_mean_of_a_tensor_is_kept_where_rounding_to_nearest_loses_it():
    x = np.full((64, 1024), 0.1, np.float32)
    x[:, 0] = 6.0  # So that a block has scale 1 and 0.1 lies below 0.25.
    asked = {"format": E2M1, "tile": Tile(1, 1024), "scale_rounding": "up"}
    for rounding, mean in (("nearest", 0.0), ("stochastic", 0.1)):
        q = Quantization(rounding=rounding, **asked)
        found = reference.quantize_matrices(x[None], q, 3).dequantize()
        # Standard deviation sqrt(0.1 * 0.4) of each: 5 standard errors.
        error = 5 * 0.2 / np.sqrt(x[:, 1:].size)
        assert abs(found[0, :, 1:].mean() - mean) < error


@narrow
def test_exponents_alone_are_refused(dtype):
    with pytest.raises(ValueError, match="quantize_mx"):
        reference.stochastic_cast(1.0, 0, "float8_e8m0fnu")
