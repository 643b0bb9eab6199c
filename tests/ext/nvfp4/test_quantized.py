"""Transforms, random bits and random rounding are those of NumPy."""

import keras
import numpy as np
import pytest

from keras_policy_ext import reference
from keras_policy_ext.ext.nvfp4.quantized import hadamard
from keras_policy_ext.ext.stochastic.rounding import key_of_matmul, random_bits
from keras_policy_ext.recipes import Quantization, Tile
from quantized_matrices import SCALES, check, normal, numpy, tensor


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
