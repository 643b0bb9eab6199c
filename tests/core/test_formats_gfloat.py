"""A second opinion on formats and rounding: gfloat, another package."""

import numpy as np
import pytest

from keras_policy_ext import formats, reference

gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
known = pytest.importorskip("gfloat.formats", reason="gfloat is not installed")

pytestmark = pytest.mark.any_backend


def fnuz(name, precision, bias):
    """gfloat has the parts of these formats, and not the formats."""
    return gfloat.FormatInfo(
        name=name,
        k=8,
        precision=precision,
        bias=bias,
        is_signed=True,
        domain=gfloat.Domain.Finite,
        has_nz=False,
        num_high_nans=0,
        has_subnormals=True,
        is_twos_complement=False,
    )


FORMATS = {
    "float8_e4m3fn": known.format_info_ocp_e4m3,
    "float8_e5m2": known.format_info_ocp_e5m2,
    "float8_e8m0fnu": known.format_info_ocp_e8m0,
    "float4_e2m1fn": known.format_info_ocp_e2m1,
    "float8_e4m3fnuz": fnuz("e4m3fnuz", 4, 8),
    "float8_e5m2fnuz": fnuz("e5m2fnuz", 3, 16),
}
SIGNED = [name for name, info in FORMATS.items() if info.is_signed]


BLOCKS = {
    "float8_e4m3fn": known.format_info_mxfp8_e4m3,
    "float8_e5m2": known.format_info_mxfp8_e5m2,
    "float4_e2m1fn": known.format_info_mxfp4_e2m1,
}


def test_it_knows_all_formats():
    assert set(FORMATS) == set(formats.names())


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_means_the_same(name):
    f, info = formats.get(name), FORMATS[name]
    values = np.arange(2**f.bits, dtype=np.uint8).view(f.dtype)
    for code, value in enumerate(values.astype(np.float64)):
        expected = gfloat.decode_float(info, code).fval
        np.testing.assert_array_equal(value, expected)
        assert np.signbit(value) == np.signbit(expected) or np.isnan(value)


@pytest.mark.parametrize("name", FORMATS)
def test_every_constant_is_the_same(name):
    f, info = formats.get(name), FORMATS[name]
    assert f.bits == info.bits
    assert f.max == info.max
    assert f.smallest_subnormal == info.smallest
    assert f.smallest_normal == info.smallest_normal
    assert f.mantissa_bits == info.tSignificandBits
    assert f.exponent_bits == info.expBits
    assert f.exponent_bias == info.bias
    assert f.has_sign == info.is_signed
    assert f.has_negative_zero == info.has_nz
    assert len(f.nan_codes) == info.num_nans


@pytest.mark.parametrize("name", SIGNED)
def test_every_bfloat16_number_is_rounded_the_same(name):
    x = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    x = x[~np.isnan(x)].astype(np.float64)
    found = reference.cast(x, name).astype(np.float64)
    expected = gfloat.round_ndarray(FORMATS[name], x, sat=True)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", SIGNED)
def test_random_bits_round_the_same(name):
    rng = np.random.default_rng(0)
    top = np.log2(formats.get(name).max)
    x = np.float32(rng.normal(size=2000) * 2.0 ** rng.uniform(-12, top, 2000))
    bits = rng.integers(0, 2**16, x.size)
    found = reference.stochastic_cast(x, bits, name).astype(np.float64)
    for value, random, number in zip(x, bits, found, strict=True):
        expected = gfloat.round_float(
            FORMATS[name],
            float(value),
            gfloat.RoundMode.StochasticFastest,
            sat=True,
            srbits=int(random),
            srnumbits=16,
        )
        assert number == expected


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_mx_have_the_same_scales_and_values(name):
    """OCP MX 1.0; what is beyond the largest number it does not saturate."""
    x = np.float32(np.random.default_rng(0).normal(size=(60, 32)))
    x *= 2.0 ** np.arange(-30, 30)[:, None]
    found = reference.quantize_mx(x, name, rounding="floor")
    scales = found.scales.astype(np.float64)
    values = found.codes.astype(np.float64) * scales
    top, beyond = formats.get(name).max, 0
    for row, scale, ours in zip(x, scales[:, 0], values, strict=True):
        wide = row.astype(np.float64)
        emax = BLOCKS[name].etype.emax
        assert scale == gfloat.compute_scale_amax(emax, wide)
        clipped = np.clip(wide, -top * scale, top * scale)
        beyond += np.any(wide != clipped)
        theirs = gfloat.quantize_block(
            BLOCKS[name], clipped, lambda _, __, s=scale: s
        )
        np.testing.assert_array_equal(ours, theirs)
    assert beyond > 5
