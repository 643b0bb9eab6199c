"""Public functions read arrays, lists and numbers as they read tensors."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

from keras_policy_ext import numerics, reference
from steps import numpy

F8 = "float8_e4m3fn"
X = np.array([[0.1, -1000.0], [3.0, 0.0]], "float32")
SCALES = np.array([[2.0, 3.0], [4.0, 0.5]], "float32")
WHOLE = np.array([[2, 8], [5, 64]], "int32")

CALLS = {
    "amax": lambda of: numerics.amax(of(X)),
    "amax of rows": lambda of: numerics.amax(of(X), axis=-1),
    "amax of each": lambda of: numerics.amax(of(X), axis=()),
    "cast": lambda of: numerics.cast(of(X), F8),
    "quantize": lambda of: numerics.quantize(of(X), of(SCALES), F8),
    "quantize by a factor": lambda of: numerics.quantize(
        of(X), of(SCALES), F8, is_factor=True
    ),
    "dequantize": lambda of: numerics.dequantize(of(SCALES), of(SCALES)),
    "quantize_dequantize": lambda of: numerics.quantize_dequantize(
        of(X), of(SCALES), F8
    ),
    "scale_from_amax": lambda of: numerics.scale_from_amax(
        of(np.abs(X)), F8, previous=of(SCALES)
    ),
    "round_up_to_power_of_two": lambda of: numerics.round_up_to_power_of_two(
        of(SCALES)
    ),
    "sqnr_db": lambda of: numerics.sqnr_db(of(X), of(X + SCALES)),
    "underflow_fraction": lambda of: numerics.underflow_fraction(
        of(X), of(1e3 * SCALES), F8
    ),
    "stochastic_round": lambda of: numerics.stochastic_round(of(X), seed=3),
    "key_of_use": lambda of: numerics.key_of_use(
        of(WHOLE), 5, of(WHOLE), of(WHOLE)
    ),
    "encode_scales": lambda of: numerics.encode_scales(
        of(np.array([2.0, 4.0], "float32")), "float8_e8m0fnu"
    ),
    "encode_scales to e4m3": lambda of: numerics.encode_scales(of(SCALES), F8),
    "decode_scales": lambda of: numerics.decode_scales(
        of(WHOLE), "float8_e8m0fnu"
    ),
    "decode_scales of e4m3": lambda of: numerics.decode_scales(of(WHOLE), F8),
    "view": lambda of: numerics.view(of(X), "int32"),
}

FORMS = {
    "a NumPy array": lambda x: x,
    "a NumPy array of 64 bits": lambda x: x.astype(
        "int64" if x.dtype == "int32" else "float64"
    ),
    "a list": lambda x: x.tolist(),
    "a number": lambda x: x.flat[0].item(),
    "a variable": lambda x: keras.Variable(
        x, dtype=x.dtype.name, trainable=False
    ),
}


def test_all_public_functions_are_here():
    named = {name.split()[0] for name in CALLS}
    assert named == set(numerics.__all__) - {"ROUNDABLE"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_read_as_the_tensor_is(name, form):
    if name == "amax of rows" and form == "a number":
        return  # It has no rows.

    def tensor(x):
        first = x.flat[0] if form == "a number" else x
        return ops.convert_to_tensor(np.asarray(first, x.dtype))

    expected, result = CALLS[name](tensor), CALLS[name](FORMS[form])
    assert result.dtype == expected.dtype
    if name == "stochastic_round":  # NumPy reads no scalar of bfloat16.
        result, expected = (ops.cast(x, "float32") for x in (result, expected))
    np.testing.assert_array_equal(numpy(result), numpy(expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["amax", "cast", "quantize", "sqnr_db"])
def test_an_array_of_16_bits_is_read_as_its_numbers(name, dtype):
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    result = CALLS[name](lambda x: x.astype(narrow))
    wide = CALLS[name](lambda x: x.astype(narrow).astype("float32"))
    np.testing.assert_array_equal(numpy(result), numpy(wide))


def test_a_bfloat16_array_is_rounded_as_its_numbers():
    x = X.astype(ml_dtypes.bfloat16)
    result = numpy(ops.cast(numerics.stochastic_round(x, seed=1), "float32"))
    np.testing.assert_array_equal(result, x.astype("float32"))
    scale = numerics.scale_from_amax(np.abs(x), F8, power_of_two=True)
    wide = np.abs(x).astype("float32")
    expected = numerics.scale_from_amax(wide, F8, power_of_two=True)
    np.testing.assert_array_equal(numpy(scale), numpy(expected))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_codes_of_the_reference_are_dequantized(dtype):
    codes = reference.quantize(X, 4.0, dtype)
    found = numpy(numerics.dequantize(codes, 4.0))
    expected = reference.dequantize(codes, 4.0)
    np.testing.assert_array_equal(found, expected)
