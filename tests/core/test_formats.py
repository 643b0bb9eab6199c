import dataclasses
import inspect

import ml_dtypes
import numpy as np
import pytest

import formats_page
from keras_policy_ext import formats, reference

pytestmark = pytest.mark.any_backend

# OCP 8-bit Floating Point Specification (OFP8) 1.0, table 1, for the two
# float8 formats; OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and
# 5.4.1, for e2m1 and e8m0; "8-bit Numerical Formats for Deep Neural Networks"
# (arXiv 2206.02915) for the fnuz formats.
TABLES = {
    "float8_e4m3fn": (8, 448.0, 2.0**-6, 2.0**-9, False, 3),
    "float8_e5m2": (8, 57344.0, 2.0**-14, 2.0**-16, True, 2),
    "float8_e8m0fnu": (8, 2.0**127, 2.0**-127, 2.0**-127, False, 0),
    "float4_e2m1fn": (4, 6.0, 1.0, 0.5, False, 1),
    "float8_e4m3fnuz": (8, 240.0, 2.0**-7, 2.0**-10, False, 3),
    "float8_e5m2fnuz": (8, 57344.0, 2.0**-15, 2.0**-17, False, 2),
}
NAMES = list(TABLES)


def all_values(name):
    codes = np.arange(2 ** TABLES[name][0], dtype=np.uint8)
    return codes.view(formats.get(name).dtype).astype(np.float64)


def test_names_are_the_exact_ml_dtypes_names():
    assert list(formats.names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_derived_constants_are_those_of_the_tables(name):
    f = formats.get(name)
    assert (
        f.bits,
        f.max,
        f.smallest_normal,
        f.smallest_subnormal,
        f.has_inf,
        f.mantissa_bits,
    ) == TABLES[name]
    assert f.name == name
    assert f.dtype == np.dtype(getattr(ml_dtypes, name))


@pytest.mark.parametrize("name", NAMES)
def test_all_codes_agree_with_the_constants(name):
    f, values = formats.get(name), all_values(name)
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    assert finite.max() == f.max
    assert positive.min() == f.smallest_subnormal
    assert np.isinf(values).any() == f.has_inf


@pytest.mark.parametrize(
    ("name", "exponent_bits", "bias", "nans", "infs", "zeros"),
    [
        ("float8_e4m3fn", 4, 7, [0x7F, 0xFF], 0, 2),
        ("float8_e5m2", 5, 15, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], 2, 2),
        ("float8_e8m0fnu", 8, 127, [0xFF], 0, 0),
        ("float4_e2m1fn", 2, 1, [], 0, 2),
        ("float8_e4m3fnuz", 4, 8, [0x80], 0, 1),
        ("float8_e5m2fnuz", 5, 16, [0x80], 0, 1),
    ],
)
def test_codes_are_those_of_the_tables(
    name, exponent_bits, bias, nans, infs, zeros
):
    f, values = formats.get(name), all_values(name)
    assert (f.exponent_bits, f.exponent_bias) == (exponent_bits, bias)
    assert list(f.nan_codes) == nans
    assert np.flatnonzero(np.isnan(values)).tolist() == nans
    assert int(np.isinf(values).sum()) == infs
    assert f.has_negative_zero == (zeros == 2)
    assert int((values == 0).sum()) == zeros
    assert f.finite_count == values.size - len(nans) - infs - (zeros == 2)


@pytest.mark.parametrize("name", NAMES)
def test_all_codes_are_what_sign_exponent_and_significand_say(name):
    f = formats.get(name)
    assert f.has_sign + f.exponent_bits + f.mantissa_bits == f.bits
    for code, value in enumerate(all_values(name)):
        if np.isfinite(value):
            assert value == number(f, code)


def number(f, code):
    """What the code of a finite number means."""
    exponent = code >> f.mantissa_bits & 2**f.exponent_bits - 1
    fraction = (code & 2**f.mantissa_bits - 1) / 2**f.mantissa_bits
    subnormal = exponent == 0 and f.mantissa_bits > 0
    significand = fraction if subnormal else 1 + fraction
    power = 2.0 ** (max(exponent, int(subnormal)) - f.exponent_bias)
    sign = -1 if f.has_sign and code >> f.bits - 1 else 1
    return sign * significand * power


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("float8_e4m3fn", 0x7F),
        ("float8_e5m2", 0x7E),
        ("float8_e8m0fnu", 0xFF),
        ("float4_e2m1fn", None),
        ("float8_e4m3fnuz", 0x80),
        ("float8_e5m2fnuz", 0x80),
    ],
)
def test_a_cast_makes_one_code_of_nan(name, code):
    assert formats.get(name).nan_code == code
    if code is not None and name != "float8_e8m0fnu":
        assert int(reference.cast(np.nan, name).view(np.uint8)) == code


def test_e2m1_has_exactly_the_values_of_the_mx_table():
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = positive + [-v for v in positive]
    assert all_values("float4_e2m1fn").tolist() == expected


@pytest.mark.parametrize("name", NAMES)
def test_name_dtype_scalar_type_and_format_mean_the_same(name):
    scalar_type = getattr(ml_dtypes, name)
    f = formats.get(name)
    assert formats.get(scalar_type) is f
    assert formats.get(np.dtype(scalar_type)) is f
    assert formats.get(f) is f


@pytest.mark.parametrize(
    "wrong", ["e4m3", "e5m2", "float8_e4m3", "float32", "", 8, None, object()]
)
def test_other_formats_and_aliases_are_refused_with_the_names(wrong):
    with pytest.raises(ValueError, match="float8_e4m3fn, float8_e5m2"):
        formats.get(wrong)


def test_a_refused_alias_names_the_exact_name():
    with pytest.raises(ValueError, match="Write 'float8_e4m3fn'"):
        formats.get("e4m3")


def test_formats_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        formats.get("float8_e5m2").max = 1.0


# Storage


@pytest.mark.parametrize("name", NAMES)
def test_float8_dtypes_are_stored_as_such_and_others_as_bytes(name):
    f = formats.get(name)
    own = name if name.startswith(("float8_e4m3", "float8_e5m2")) else "uint8"
    assert f.storage == {"jax": own, "torch": own, "tensorflow": "uint8"}
    assert f.numbers_per_byte == (2 if name == "float4_e2m1fn" else 1)


def test_two_numbers_of_four_bits_are_in_a_byte_the_first_in_the_low_bits():
    codes = reference.cast([[1.0, -6.0, 0.5]], "float4_e2m1fn")
    packed = reference.pack(codes)
    assert packed.tolist() == [[0xF2, 0x01]]
    back = reference.unpack(packed, "float4_e2m1fn", 3)
    np.testing.assert_array_equal(back, codes)
    longer = reference.unpack(packed, "float4_e2m1fn")
    assert longer.astype(float).tolist() == [[1.0, -6.0, 0.5, 0.0]]


@pytest.mark.parametrize("name", NAMES)
def test_packed_codes_come_back(name):
    codes = np.arange(2 ** formats.get(name).bits, dtype=np.uint8)
    codes = np.stack([codes, codes[::-1]]).view(formats.get(name).dtype)
    packed = reference.pack(codes)
    assert packed.dtype == np.uint8
    assert packed.size * formats.get(name).numbers_per_byte == codes.size
    back = reference.unpack(packed, name)
    np.testing.assert_array_equal(back.view(np.uint8), codes.view(np.uint8))
    assert back.dtype == codes.dtype


# The page


def test_the_page_is_that_of_the_formats():
    found = formats_page.PAGE.read_text("utf-8")
    assert found == formats_page.page(), "run python tests/formats_page.py"


def test_the_page_tells_every_fact():
    """So that a new attribute of formats finds its line."""
    source = inspect.getsource(formats_page)
    told = {f.name for f in dataclasses.fields(formats.Format)}
    missing = {name for name in told - {"name", "dtype"} if name not in source}
    assert missing == set()


@pytest.mark.parametrize(
    ("x", "text"),
    [(448.0, "448"), (2.0**-9, "2⁻⁹"), (2.0**127, "2¹²⁷"), (0.5, "0.5")],
)
def test_powers_of_two_are_written_as_such(x, text):
    assert formats_page.number(x) == text
