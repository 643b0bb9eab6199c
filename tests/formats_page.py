"""Writes docs/formats.md, every fact of it, from the formats themselves.

python tests/formats_page.py
"""

import math
import pathlib

from keras_policy_ext import formats

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "formats.md"

HEAD = """# Formats

<!-- Written by tests/formats_page.py: do not edit. -->

This page lists the range, precision and special values of each narrow number
format. The figures of the table are computed from `ml_dtypes` and from all bit
patterns (codes) of each format. `kpe.formats.get(name)` returns an object with
the same facts as attributes.

"""

TAIL = """
- A normal number is a power of two times a significand from 1 to 2. The
  exponent of this power is the stored exponent minus the bias. Numbers below
  the smallest normal number all have the exponent of the smallest normal
  number, and a significand between 0 and 1. `float8_e8m0fnu` stores only
  exponents, since this format is for scales.
- Casts [saturate](numerics.md#casting), so a cast never makes an infinity. If
  a value would round to negative zero, and the format has no negative zero,
  the cast returns 0.
- The row "made by casts" shows the code that a cast to the format returns for
  a NaN without a sign. `float4_e2m1fn` has no NaN. If a block of
  `float4_e2m1fn` numbers contains a NaN, the scale of the block is NaN.
- The rows "stored on" name the dtype in which this package stores the numbers
  on each framework: a float8 dtype, or `uint8` for bytes that hold the codes.
  `kpe.reference.pack` puts two four-bit numbers into one byte, with the first
  number in the low four bits.
- Recipes use `float8_e4m3fn`, `float8_e5m2` and `float4_e2m1fn`. Delayed and
  current scaling can also use the formats whose names end in `fnuz`, for
  [AMD's MI300](devices.md#formats-named-fnuz). In the arguments of a recipe,
  `"e4m3"` means `float8_e4m3fn`.
"""

FRAMEWORKS = {"jax": "JAX", "torch": "PyTorch", "tensorflow": "TensorFlow"}


def facts(f):
    """The lines of the column of one format."""
    nans = [f"0x{code:02X}" for code in f.nan_codes]
    return {
        "bits": str(f.bits),
        "of these sign, exponent, significand": (
            f"{f.has_sign:d}, {f.exponent_bits}, {f.mantissa_bits}"
        ),
        "bias of the exponent": str(f.exponent_bias),
        "largest": number(f.max),
        "smallest normal": number(f.smallest_normal),
        "smallest": number(f.smallest_subnormal),
        "numbers, 0 once": str(f.finite_count),
        "infinities": yes(f.has_inf),
        "negative zero": yes(f.has_negative_zero),
        "codes of NaN": ", ".join(nans) or "none",
        "made by casts": "–" if f.nan_code is None else f"0x{f.nan_code:02X}",
        "numbers in a byte": str(f.numbers_per_byte),
        **{
            f"stored on {FRAMEWORKS[name]}": f"`{dtype}`"
            for name, dtype in f.storage.items()
        },
    }


def number(x):
    """A power of two as such, where it is no small integer."""
    power = round(math.log2(x))
    if x != 2.0**power or 0.5 <= x < 2**20:
        return f"{x:g}"
    return f"2{str(power).translate(SUPERSCRIPTS)}"


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def yes(fact):
    return "yes" if fact else "no"


def page():
    """The text of the page."""
    columns = {name: facts(formats.get(name)) for name in formats.names()}
    rows = [
        ["", *(f"`{name}`" for name in columns)],
        ["---"] * (len(columns) + 1),
    ]
    rows += [
        [line, *(each[line] for each in columns.values())]
        for line in next(iter(columns.values()))
    ]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return HEAD + table + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
