import dataclasses

import ml_dtypes
import numpy as np
import pytest

from keras_policy_ext import formats

pytestmark = pytest.mark.any_backend

# OCP 8-bit Floating Point Specification (OFP8) 1.0, table 1, for the two
# float8 formats; OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and
# 5.4.1, for e2m1 and e8m0.
OCP = {
    "float8_e4m3fn": (8, 448.0, 2.0**-6, 2.0**-9, False, 3),
    "float8_e5m2": (8, 57344.0, 2.0**-14, 2.0**-16, True, 2),
    "float8_e8m0fnu": (8, 2.0**127, 2.0**-127, 2.0**-127, False, 0),
    "float4_e2m1fn": (4, 6.0, 1.0, 0.5, False, 1),
}
NAMES = list(OCP)


def all_values(name):
    codes = np.arange(2 ** OCP[name][0], dtype=np.uint8)
    return codes.view(formats.get(name).dtype).astype(np.float64)


def test_names_are_the_four_exact_ml_dtypes_names():
    assert list(formats.names()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_derived_constants_are_those_of_the_ocp_tables(name):
    f = formats.get(name)
    assert (
        f.bits,
        f.max,
        f.smallest_normal,
        f.smallest_subnormal,
        f.has_inf,
        f.mantissa_bits,
    ) == OCP[name]
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
    ("name", "nans", "infs"),
    [
        ("float8_e4m3fn", 2, 0),
        ("float8_e5m2", 6, 2),
        ("float8_e8m0fnu", 1, 0),
        ("float4_e2m1fn", 0, 0),
    ],
)
def test_special_codes_are_as_many_as_ocp_says(name, nans, infs):
    values = all_values(name)
    assert int(np.isnan(values).sum()) == nans
    assert int(np.isinf(values).sum()) == infs


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
