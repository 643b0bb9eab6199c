"""Numbers to quantize, and what other libraries made of theirs."""

import math
import pathlib

import numpy as np
import pytest
from hypothesis import strategies as st

from keras_policy_ext import formats

GOLDENS = pathlib.Path(__file__).parent / "goldens"
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
FNUZ = ["float8_e4m3fnuz", "float8_e5m2fnuz"]
SIGNED = [*FLOAT8, "float4_e2m1fn", *FNUZ]

float32s = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
positive = st.floats(2.0**-126, 2.0**127, width=32)
signed = pytest.mark.parametrize("dtype", SIGNED)


def finite_values(dtype):
    f = formats.get(dtype)
    codes = np.arange(2**f.bits, dtype=np.uint8).view(f.dtype)
    values = codes.astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def same(a, b):
    """Equal, NaN counted as equal to NaN and -0.0 different from 0.0."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1, a) == math.copysign(1, b)


def ulps(a, b):
    return np.max(np.abs(np.float64(a) - b) / np.spacing(np.float32(b)))
