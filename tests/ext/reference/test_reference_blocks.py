"""Scales of blocks in the reference, against Transformer Engine."""

import numpy as np
import pytest

from keras_policy_ext import reference
from keras_policy_ext.ext.reference.scales import (
    four_over_six_scales,
    spread,
    tile_amax,
    two_level_scales,
)
from reference_numbers import GOLDENS, ulps

pytestmark = pytest.mark.any_backend


@pytest.fixture(scope="module")
def te():
    with np.load(GOLDENS / "block_quantizers_te.npz") as file:
        return dict(file)


def bytes_of(codes):
    return codes.view(np.uint8)


@pytest.mark.parametrize("tile", [(1, 128), (128, 128)])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_blocks_agree_with_transformer_engine(te, tile, power_of_two):
    result = reference.quantize_block(
        te["x_256x384"], tile=tile, power_of_two=power_of_two
    )
    key = f"blk_256x384_float8_e4m3fn_{tile[0]}x{tile[1]}_p{power_of_two:d}"
    np.testing.assert_array_equal(bytes_of(result.codes), te[f"{key}_q"])
    # The peer stores 1 / (max / amax): one ulp, none for powers of two.
    assert ulps(result.scales, te[f"{key}_sinv"]) <= (not power_of_two)


@pytest.mark.parametrize(
    ("rounding", "key"), [("round_up", "mx"), ("floor", "mxfloor")]
)
def test_mx_agrees_with_transformer_engine_bit_for_bit(te, rounding, key):
    result = reference.quantize_mx(te["x_256x384"], rounding=rounding)
    np.testing.assert_array_equal(bytes_of(result.codes), te[f"{key}_q"])
    np.testing.assert_array_equal(bytes_of(result.scales), te[f"{key}_s"])


@pytest.mark.parametrize("rows", [1, 16])
def test_nvfp4_agrees_with_transformer_engine_bit_for_bit(te, rows):
    result = reference.quantize_nvfp4(te["x_nv"], (rows, 16))
    values = result.codes.astype(np.float32)
    np.testing.assert_array_equal(values, te[f"nv_{rows}_val"])
    scales = bytes_of(result.scales).repeat(rows, axis=0)
    np.testing.assert_array_equal(scales, te[f"nv_{rows}_sf"])
    assert result.amax == te[f"nv_{rows}_amax"][0]


SIXTEEN = [[8.0, 6.0, 4.0, 3.0, 2.0, 1.0, -8.0, -6.0] + [0.0] * 8]
"""Exact if 8 becomes 4. If it becomes 6, then 6 becomes 4.5, which is none."""


def test_four_over_six_takes_four_where_that_is_exact():
    result = reference.quantize_nvfp4(SIXTEEN, four_over_six=True)
    values = result.codes.astype(np.float32)
    np.testing.assert_array_equal(values * 2, SIXTEEN)
    assert result.scales.astype(np.float32) == 384  # Of the largest block.
    plain = reference.quantize_nvfp4(SIXTEEN)
    assert plain.scales.astype(np.float32) == 448
    assert abs(plain.codes.astype(np.float32)).max() == 6


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
def test_four_over_six_takes_the_smaller_error(tile):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 256)) * 4.0 ** rng.integers(-3, 4, (64, 1))
    x = x.astype(np.float32)
    tensor, found = np.abs(x).max(), tile_amax(x, tile)
    both = [
        two_level_scales(found, tensor, "float4_e2m1fn", reach)
        for reach in (4.0, 6.0)
    ]
    chosen = four_over_six_scales(x, found, tensor, tile)

    def errors(scales, factors):
        factors = spread(factors, tile, x.shape)
        codes = reference.cast(x * factors, "float4_e2m1fn")
        scales = scales.astype(np.float64) * (tensor / np.float64(1536))
        scales = spread(scales, tile, x.shape)
        off = (codes.astype(np.float64) * scales - x) ** 2
        blocks = off.reshape(64 // tile[0], tile[0], -1, tile[1])
        return blocks.sum(axis=(1, 3))

    four, six = (errors(*each) for each in both)
    # It measures in parts of 1 / 1024.
    assert (errors(*chosen) <= 1.02 * np.minimum(four, six)).all()
    took_four = chosen[0] == both[0][0]
    assert 0.1 < np.mean(took_four) < 0.9


def test_four_over_six_of_zeros_and_of_hardly_anything():
    zeros = np.zeros((2, 32), np.float32)
    result = reference.quantize_nvfp4(zeros, four_over_six=True)
    assert not result.codes.astype(np.float32).any()
    x = np.full((2, 32), 2.0**-40, np.float32)
    x[0, 0] = 1.0
    result = reference.quantize_nvfp4(x, four_over_six=True)
    assert result.scales.astype(np.float32)[1].tolist() == [0.0, 0.0]


def test_nvfp4_after_the_hadamard_transform_agrees_too(te):
    columns = te["x_nv"].T
    blocks = columns.reshape(len(columns), -1, 16) @ te["nv_rht_H"]
    result = reference.quantize_nvfp4(blocks.reshape(columns.shape))
    values = result.codes.astype(np.float32)
    np.testing.assert_array_equal(values, te["nv_rht_col_val"])
    np.testing.assert_array_equal(bytes_of(result.scales), te["nv_rht_col_sf"])


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0),
        (np.inf, 254),
        (np.nan, 255),
        (448.0, 127),
        (np.nextafter(np.float32(448), np.float32(1e9)), 128),
        (1e-42, 0),
    ],
)
def test_mx_round_up_bytes_of_special_blocks(amax, byte):
    x = np.full((1, 32), amax, np.float32)
    assert bytes_of(reference.quantize_mx(x).scales).tolist() == [[byte]]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0),
        (np.inf, 254),
        (np.nan, 255),
        (256.0, 127),
        (511.0, 127),
        (2.0**-118, 1),
        (2.0**-120, 0),
        (1e-42, 0),
    ],
)
def test_mx_floor_bytes_of_special_blocks(amax, byte):
    x = np.full((1, 32), amax, np.float32)
    result = reference.quantize_mx(x, rounding="floor")
    assert bytes_of(result.scales).tolist() == [[byte]]


def test_a_smaller_last_tile_has_a_scale_of_its_own_values():
    x = np.ones((3, 130), np.float32)
    x[:, 128:] = 448.0
    result = reference.quantize_block(x, tile=(2, 128), power_of_two=False)
    assert result.scales.shape == (2, 2)
    assert result.scales[:, 1].tolist() == [1.0, 1.0]
    assert np.all(result.codes.astype(np.float32) == 448.0)


def test_blocks_of_zeros_are_zero_and_finite():
    zeros = np.zeros((16, 128), np.float32)
    block = reference.quantize_block(zeros)
    assert np.all(block.scales == 1)
    assert not block.codes.astype(np.float32).any()
    assert not reference.quantize_mx(zeros).codes.astype(np.float32).any()
    nv = reference.quantize_nvfp4(zeros)
    assert nv.amax == 0
    assert not nv.codes.astype(np.float32).any()


def test_blocks_need_a_matrix_and_a_known_rounding():
    with pytest.raises(ValueError, match=r"\(rows, columns\)"):
        reference.quantize_block(np.ones(4))
    with pytest.raises(ValueError, match="'round_up' or 'floor'"):
        reference.quantize_mx(np.ones((1, 32)), rounding="nearest")
