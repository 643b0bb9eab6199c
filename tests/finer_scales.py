"""Pairs of operands whose scales are finer than a tensor."""

import numpy as np

from keras_policy_ext.recipes import Quantization, Tile

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def asked(tile, name=E4M3, **fields):
    """What becomes of an operand: scales that are powers of two."""
    return Quantization(
        **{"format": name, "tile": tile, "scale_rounding": "up", **fields}
    )


ROW, WHOLE = asked(Tile(1)), asked(Tile())
ANY_ROW = asked(Tile(1), scale_rounding="nearest")
THIN, SQUARE = asked(Tile(1, 128)), asked(Tile(128, 128))
MX = asked(Tile(1, 32), scale_format="float8_e8m0fnu")

PAIRS = {
    "rows": (ROW, ROW),
    "rows with a tensor": (ROW, WHOLE),
    "rows after a tensor": (WHOLE, ROW),
    "rows, e5m2 first": (asked(Tile(1), E5M2), ROW),
    "rows, e5m2 second": (ROW, asked(Tile(1), E5M2)),
    "rows, any scale": (ANY_ROW, ANY_ROW),
    "blocks with squares": (THIN, SQUARE),
    "blocks": (THIN, THIN),
    "MX": (MX, MX),
}
SIZES = [(32, 48, 64), (5, 7, 3), (1, 1, 1), (17, 260, 33), (130, 1100, 300)]
"""Rows, terms and columns."""

UNIT = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""How far a rounded product may be off, for a number of 1."""


def matrix(rows, terms, seed):
    """(1, rows, terms), rows of different sizes, whose amaxes are no powers."""
    values = np.random.default_rng(seed).normal(size=(1, rows, terms))
    sizes = 1.3 * 2.0 ** (np.arange(rows) % 9 - 4)
    return (values * sizes[:, np.newaxis]).astype("float32")
