"""The codes and scales of `keras.ops` are those of NumPy, to the bit."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_policy_ext import reference
from keras_policy_ext.numerics.quantized import hadamard, quantize
from keras_policy_ext.numerics.stochastic import key_of_matmul, random_bits
from keras_policy_ext.recipes import Quantization, Tile

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
E8M0 = "float8_e8m0fnu"
TILES = [(1, 32), (128, 128), (1, None), (3, 5), (None, 7), (16, 16)]
SCALES = [
    {"format": E4M3},
    {"format": E5M2},
    {"format": E4M3, "scale_rounding": "up"},
    {"format": E2M1, "scale_rounding": "floor"},
    {"format": E4M3, "scale_format": E8M0, "scale_rounding": "up"},
    {"format": E5M2, "scale_format": E8M0, "scale_rounding": "floor"},
    {"format": E2M1, "scale_format": E4M3},
    {"format": E4M3, "scale_format": E4M3},
]
QUANTIZATIONS = [Quantization(format=E4M3), Quantization(format=E5M2)] + [
    Quantization(tile=Tile(*tile), **options)
    for tile in TILES
    for options in SCALES
]
each = pytest.mark.parametrize("asked", QUANTIZATIONS, ids=str)


def numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(x), np.float32)


def tensor(x):
    return keras.ops.convert_to_tensor(np.asarray(x, np.float32))


def check(x, asked, key=None):
    """Values, scales and the scale of the tensor are equal."""
    number = None if key is None else keras.ops.convert_to_tensor(key, "int32")
    found, _ = quantize(tensor(x), asked, key=number)
    expected = reference.quantize_matrices(x, asked, key)
    np.testing.assert_array_equal(
        numpy(found.scale), expected.scales.astype(np.float32)
    )
    if expected.tensor_scale is not None:
        whole = numpy(found.tensor_scale).reshape(())
        np.testing.assert_array_equal(whole, expected.tensor_scale)
    codes = np.where(expected.nan, np.nan, expected.codes.astype(np.float32))
    np.testing.assert_array_equal(numpy(found.values), codes)


def normal(shape, seed=0, spread=0):
    rng = np.random.default_rng(seed)
    powers = 2.0 ** rng.integers(-spread, spread + 1, shape)
    return np.float32(rng.normal(size=shape) * powers)


@each
@pytest.mark.parametrize("spread", [0, 12])
def test_matrices_are_quantized_the_same(asked, spread):
    check(normal((2, 37, 70), spread=spread), asked)


@each
def test_tiles_of_zeros_are_the_same(asked):
    x = normal((2, 20, 40))
    x[0] = 0
    x[1, :17, :33] = 0
    check(x, asked)
    check(np.zeros_like(x), asked)


@each
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_is_the_same(asked, value):
    x = normal((2, 20, 40))
    x[1, 3, 5] = value
    check(x, asked)


@pytest.mark.full
@pytest.mark.parametrize("options", SCALES, ids=str)
@given(
    x=hnp.arrays(
        np.float32,
        (1, 2, 6),
        elements=st.just(0.0) | st.floats(2.0**-60, 2.0**60, width=32),
    )
)
def test_any_numbers_are_quantized_the_same(options, x):
    check(x, Quantization(tile=Tile(1, 4), **options))


@pytest.mark.parametrize("columns", [16, 33, 64])
@pytest.mark.parametrize("options", SCALES, ids=str)
def test_transformed_matrices_are_the_same(options, columns):
    x = normal((2, 5, columns), spread=6)
    np.testing.assert_array_equal(
        numpy(hadamard(tensor(x))) if columns % 16 == 0 else 0,
        reference.hadamard(x) if columns % 16 == 0 else 0,
    )
    check(x, Quantization(tile=Tile(1, 16), hadamard=16, **options))


@pytest.mark.parametrize("key", [0, 7, -5, 2**31 - 1])
def test_random_bits_and_keys_are_the_same(key):
    number = keras.ops.convert_to_tensor(key, "int32")
    found = random_bits((2, 3, 50), number)
    np.testing.assert_array_equal(
        numpy(found), reference.random_bits((2, 3, 50), key)
    )
    for i, matmul in enumerate(("forward", "inputs_grad", "kernel_grad")):
        mixed = key_of_matmul(number, tensor(3.25), i)
        assert int(mixed) == reference.matmul_key(key, 3.25, matmul)


@pytest.mark.parametrize("transform", [None, 16])
@pytest.mark.parametrize("options", SCALES, ids=str)
def test_what_is_rounded_at_random_is_the_same(options, transform):
    asked = Quantization(
        tile=Tile(1, 16), rounding="stochastic", hadamard=transform, **options
    )
    check(normal((2, 9, 37), spread=4), asked, key=11)
    x = normal((1, 9, 37))
    x[0, 1, 2] = np.inf
    check(x, asked, key=11)
