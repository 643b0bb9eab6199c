"""Writes the table of formats in docs/numerics.md from the formats themselves.

python tests/formats_page.py
"""

import math
import pathlib

from keras_policy_ext import formats

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "numerics.md"

START = "<!-- Written by tests/formats_page.py: do not edit. -->\n"
END = "<!-- As far as here. -->\n"

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


def table():
    """A column for each format, and a row for each fact."""
    columns = {name: facts(formats.get(name)) for name in formats.names()}
    rows = [
        ["", *(f"`{name}`" for name in columns)],
        ["---"] * (len(columns) + 1),
    ]
    rows += [
        [line, *(each[line] for each in columns.values())]
        for line in next(iter(columns.values()))
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page():
    """The page with this table in it."""
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(START)
    return before + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
