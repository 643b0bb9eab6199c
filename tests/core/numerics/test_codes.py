"""Codes by integer arithmetic are those of ml_dtypes, in every format."""

import numpy as np
import pytest
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext.numerics import casting

SIGNED = [name for name in formats.names() if formats.get(name).has_sign]
each = pytest.mark.parametrize("name", SIGNED)


def numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


def numbers_of(name):
    """All codes of a format, and their numbers."""
    fmt = formats.get(name)
    every = np.arange(2**fmt.bits, dtype=np.uint8)
    return every, every.view(fmt.dtype).astype(np.float32)


@each
def test_every_code_has_its_number(name):
    every, numbers = numbers_of(name)
    found = numpy(casting.decode(ops.convert_to_tensor(every), name))
    is_nan = np.isnan(numbers)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(
        found[~is_nan].view("int32"), numbers[~is_nan].view("int32")
    )


@each
def test_every_number_has_its_code(name):
    every, numbers = numbers_of(name)
    found = numpy(casting.encode(ops.convert_to_tensor(numbers), name))
    known = ~np.isnan(numbers)
    np.testing.assert_array_equal(found[known], every[known])
    fmt = formats.get(name)
    if fmt.nan_code is not None:
        # NaN has one code, with either sign where the format has both.
        assert set(found[~known] & 0x7F) <= {fmt.nan_code & 0x7F}


@each
def test_an_infinity_has_its_code_or_that_of_the_largest(name):
    fmt = formats.get(name)
    largest = np.float32([fmt.max, -fmt.max])
    infinite = np.float32([np.inf, -np.inf])
    found, wanted = (
        numpy(casting.encode(ops.convert_to_tensor(each), name))
        for each in (infinite, infinite if fmt.has_inf else largest)
    )
    np.testing.assert_array_equal(found, wanted)
    if fmt.has_inf:
        assert np.isinf(found.view(fmt.dtype).astype(np.float32)).all()


def test_a_negative_zero_is_zero_where_there_is_none():
    zero = ops.convert_to_tensor(np.float32([-0.0]))
    for name in SIGNED:
        code = int(numpy(casting.encode(zero, name))[0])
        fmt = formats.get(name)
        assert code == (1 << (fmt.bits - 1) if fmt.has_negative_zero else 0)


def test_scales_in_eight_bits_are_exponents():
    every = np.arange(256, dtype=np.uint8)
    found = numpy(
        casting.decode_scales(ops.convert_to_tensor(every), "float8_e8m0fnu")
    )
    assert np.isnan(found[255])
    expected = np.ldexp(1.0, every[1:255].astype(int) - 127)
    np.testing.assert_array_equal(found[1:255], expected)
    # Of a number that some backends read as 0 the bits are looked at.
    assert found[:1].view("int32") == casting.SUBNORMAL_SCALE
    again = casting.encode_scales(
        ops.convert_to_tensor(found[1:]), "float8_e8m0fnu"
    )
    np.testing.assert_array_equal(numpy(again), every[1:])
