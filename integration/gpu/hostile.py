"""Numbers that are hard to round to float8."""

import ml_dtypes
import numpy as np

from keras_policy_ext import formats

FORMATS = ("float8_e4m3fn", "float8_e5m2")


def bfloat16_values():
    """All 65,536 numbers of bfloat16, as float32."""
    bits = np.arange(2**16, dtype=np.uint16)
    return bits.view(ml_dtypes.bfloat16).astype("float32")


def float32_values(format):
    """Numbers of float32 around everything that matters to a format.

    Its numbers, the middles between two of them, and the neighbours of both
    in float32; infinities, NaN, the smallest and the largest of float32; and
    random bits. Both signs of each.
    """
    bits = np.arange(2**8, dtype=np.uint8)
    codes = bits.view(formats.get(format).dtype).astype("float32")
    codes = np.unique(np.abs(codes[np.isfinite(codes)]))
    beyond = codes[-1] + (codes[-1] - codes[-2]) * np.arange(1, 4)
    codes = np.concatenate([codes, beyond]).astype("float32")
    middles = (codes[1:] + codes[:-1]) / 2
    exact = np.concatenate([codes, middles]).astype("float32")
    info = np.finfo("float32")
    special = [info.tiny, info.smallest_subnormal, info.max, np.inf, np.nan]
    random = np.random.default_rng(0).integers(0, 2**31, 2**14)
    found = np.concatenate(
        [
            exact,
            np.nextafter(exact, np.float32(np.inf)),
            np.nextafter(exact, np.float32(0)),
            np.array(special, "float32"),
            random.astype(np.uint32).view("float32"),
        ]
    )
    return np.concatenate([found, -found])


def in_rows(values, width=16):
    """A matrix of the finite numbers, filled up with zeros."""
    values = values[np.isfinite(values)]
    values = np.append(values, np.zeros(-len(values) % width, "float32"))
    return values.reshape(-1, width)
