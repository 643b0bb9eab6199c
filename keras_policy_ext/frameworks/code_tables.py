"""What codes of eight bits are to NumPy: numbers, and cuts of float16."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from keras_policy_ext import formats

HALVES = {"float8_e4m3fn": (7, 256.0), "float8_e5m2": (8, 1.0)}
"""By how many bits a code is shifted to be that of a float16 number, and by
what that is multiplied to be the number of the code. Not NaN of e4m3fn, which
stored kernels do not have."""


@functools.cache
def numbers_of_codes(format_name: str) -> np.ndarray[Any, Any]:
    """Float32 (256,): the number of each code of a format."""
    codes = np.arange(256, dtype="uint8")
    return codes.view(formats.get(format_name).dtype).astype("float32")
