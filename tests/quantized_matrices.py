"""What becomes of a matrix, and the same by NumPy."""

import keras
import numpy as np

from keras_policy_ext import reference
from keras_policy_ext.numerics.quantized import quantize

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
E8M0 = "float8_e8m0fnu"
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
