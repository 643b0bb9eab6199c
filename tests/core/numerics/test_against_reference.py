"""The codes and scales of `keras.ops` are those of NumPy, to the bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_policy_ext.recipes import Quantization, Tile
from quantized_matrices import E4M3, E5M2, SCALES, check, normal

TILES = [(1, 32), (128, 128), (1, None), (3, 5), (None, 7), (16, 16)]
QUANTIZATIONS = [Quantization(format=E4M3), Quantization(format=E5M2)] + [
    Quantization(tile=Tile(*tile), **options)
    for tile in TILES
    for options in SCALES
]
each = pytest.mark.parametrize("asked", QUANTIZATIONS, ids=str)


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
