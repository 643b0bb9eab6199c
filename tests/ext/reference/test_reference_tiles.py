"""The truth of tiles: transform, amaxes, scales, and what is not finite."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_policy_ext import formats, reference
from keras_policy_ext.recipes import Quantization, Tile

pytestmark = pytest.mark.any_backend

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
EIGHT = {"format": E4M3, "scale_format": E4M3}
NVFP4 = {"format": E2M1, "scale_format": E4M3}
UP = {"format": E4M3, "scale_rounding": "up"}
# What a scale can be, other than what a tile of it is.
SCALES = [
    {"format": E4M3},
    {"format": E5M2, "scale_rounding": "up"},
    {"format": E4M3, "scale_rounding": "floor"},
    {
        "format": E4M3,
        "scale_format": "float8_e8m0fnu",
        "scale_rounding": "up",
    },
    {
        "format": E5M2,
        "scale_format": "float8_e8m0fnu",
        "scale_rounding": "floor",
    },
    {"format": E2M1, "scale_format": "float8_e4m3fn"},
    {
        "format": E2M1,
        "scale_format": "float8_e4m3fn",
        "four_over_six": True,
    },
]
scales = pytest.mark.parametrize("options", SCALES, ids=repr)

normal = st.just(0.0) | st.floats(2.0**-40, 2.0**40, width=32)
moderate = st.floats(-(2.0**40), 2.0**40, width=32)
matrices = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=3, max_dims=3), elements=moderate
)
tiles = st.tuples(
    st.none() | st.integers(1, 5), st.none() | st.integers(1, 5)
).filter(lambda t: t != (None, None))


def asked(x, key=None, **options):
    """The quantization of one matrix, without a batch."""
    return reference.quantize_matrices(
        np.float32(x)[None], Quantization(**options), key
    )


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# The transform


def test_the_transform_is_that_of_sylvester_with_fixed_signs():
    parity = [[(i & j).bit_count() % 2 for j in range(16)] for i in range(16)]
    matrix = reference.hadamard(np.eye(16))
    same(matrix / matrix[:, :1], 1 - 2.0 * np.array(parity))
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    same(matrix[:, 0] * 4, signs)
    same(matrix @ matrix.T, np.eye(16))


def test_its_stages_go_from_near_to_far_in_float32():
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    found = reference.hadamard(x)
    for row, transformed in zip(x, found, strict=True):
        values = list(row * reference.hadamard(np.eye(16))[:, 0] * 4)
        for distance in (1, 2, 4, 8):
            for i in range(16):
                if not i & distance:
                    a, b = values[i], values[i + distance]
                    values[i], values[i + distance] = a + b, a - b
        same(transformed, np.float32(values) * np.float32(0.25))


def test_the_transform_pads_with_zeros_that_take_part():
    x = np.ones((3, 33), np.float32)
    found = reference.hadamard(x)
    assert found.shape == (3, 48)
    assert np.all(found[:, 32:] == 0.25)
    same(found[:, :32], reference.hadamard(x[:, :32]))
    assert reference.hadamard(np.zeros((2, 0))).shape == (2, 0)


@given(
    hnp.arrays(np.int16, (2, 37), elements=st.integers(-500, 500)),
    hnp.arrays(np.int16, (4, 37), elements=st.integers(-500, 500)),
)
def test_a_product_of_two_transformed_operands_is_what_it_was(a, b):
    left, right = (np.float64(reference.hadamard(m)) for m in (a, b))
    same(left @ right.T, np.float64(a) @ np.float64(b).T)


def test_the_amax_of_a_transformed_operand_is_that_after_it():
    x = np.full((1, 16), 3.0)
    found = asked(x, tile=Tile(1, 16), hadamard=16, **NVFP4)
    after = np.abs(reference.hadamard(x)).max()
    assert found.tensor_scale == after / np.float32(2688)


def test_other_sizes_of_the_transform_are_refused():
    with pytest.raises(ValueError, match="hadamard=32"):
        asked(np.ones((1, 32)), format=E4M3, tile=Tile(1, 32), hadamard=32)


# Tiles


@given(x=matrices, tile=tiles)
def test_the_amax_of_a_tile_is_that_of_its_numbers(x, tile):
    size = [t or n for t, n in zip(tile, x.shape[1:], strict=True)]
    found = asked_batch(x, tile)
    for b, r, c in np.ndindex(*found.finite.shape):
        rows = slice(r * size[0], (r + 1) * size[0])
        columns = slice(c * size[1], (c + 1) * size[1])
        part = x[b, rows, columns]
        alone = reference.quantize_block(part, E4M3, part.shape)
        same(found.scales[b, r, c], alone.scales[0, 0])
        same(found.codes[b, rows, columns], alone.codes)


def asked_batch(x, tile, **options):
    options = options or UP
    return reference.quantize_matrices(
        x, Quantization(tile=Tile(*tile), **options)
    )


@scales
@given(x=matrices, tile=tiles, more=st.tuples(*[st.integers(0, 6)] * 2))
def test_zeros_that_are_appended_change_no_scale(options, x, tile, more):
    padded = np.pad(x, [(0, 0), *((0, n) for n in more)])
    # A tile of all of an axis would be a longer one.
    tile = tuple(t or n for t, n in zip(tile, padded.shape[1:], strict=True))
    plain = asked_batch(x, tile, **options)
    found = asked_batch(padded, tile, **options)
    _, rows, columns = plain.scales.shape
    same(found.scales[:, :rows, :columns], plain.scales)
    same(found.codes[:, : x.shape[1], : x.shape[2]], plain.codes)


@given(x=matrices, tile=tiles)
def test_the_transpose_is_that_of_the_transposed_tile(x, tile):
    found = asked_batch(x, tile).transposed
    turned = asked_batch(x.swapaxes(1, 2), tile[::-1])
    for field in ("codes", "scales", "finite", "nan", "tile"):
        same(getattr(found, field), getattr(turned, field))
    same(found.dequantize(), turned.dequantize())


def test_the_scale_of_a_whole_tensor_is_that_of_the_batch():
    x = np.float32([[[1.0]], [[896.0]]])
    assert asked_batch(x, (None, None)).scales.tolist() == [[[2.0]]]
    assert asked_batch(x, (1, None)).scales[:, 0, 0].tolist() == [2**-8, 2.0]


positive = st.floats(2.0**-100, 2.0**100, width=32)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E2M1])
@pytest.mark.parametrize("scale_format", ["float32", "float8_e8m0fnu"])
@given(amax=positive)
def test_a_scale_rounded_up_is_the_next_power_of_two(dtype, scale_format, amax):
    options = {"format": dtype, "tile": Tile(1, 4), "scale_rounding": "up"}
    found = asked([[amax]], scale_format=scale_format, **options)
    scale, exact = float(found.scales[0, 0, 0]), amax / formats.get(dtype).max
    assert math.frexp(scale)[0] == 0.5
    # amax / max is rounded in float32 before it is rounded up.
    assert exact * (1 - 2.0**-24) <= scale < 2 * exact * (1 + 2.0**-22)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E2M1])
@pytest.mark.parametrize("scale_format", ["float32", "float8_e8m0fnu"])
@given(amax=positive)
def test_a_floor_scale_has_the_exponent_of_the_amax(dtype, scale_format, amax):
    options = {"format": dtype, "tile": Tile(1, 4), "scale_rounding": "floor"}
    found = asked([[amax]], scale_format=scale_format, **options)
    scaled = amax / float(found.scales[0, 0, 0])
    largest = 2.0 ** math.floor(math.log2(formats.get(dtype).max))
    assert largest <= scaled < 2 * largest


@pytest.mark.parametrize("tile", [Tile(), Tile(free=1), Tile(free=3)])
@given(amax=positive)
def test_scales_that_leave_the_sum_are_divided_once(tile, amax):
    found = asked([[amax]], format=E4M3, tile=tile)
    same(found.scales[0, 0, 0], np.float32(amax) / np.float32(448))


@given(amax=positive)
def test_scales_of_blocks_invert_the_multiplier(amax):
    found = asked([[amax]], format=E4M3, tile=Tile(1, 2))
    inverted = np.float32(1) / (np.float32(448) / np.float32(amax))
    same(found.scales[0, 0, 0], inverted)


@scales
def test_tiles_of_zeros_are_zero_and_finite(options):
    found = asked_batch(np.zeros((2, 5, 7)), (2, 4), **options)
    assert found.finite.all()
    same(found.dequantize(), np.zeros((2, 5, 7)))
    same(found.marked.dequantize(), np.zeros((2, 5, 7)))
    if found.scales.dtype == np.float32:
        assert np.all(found.scales == 1)


@scales
@given(x=hnp.arrays(np.float32, (2, 3, 5), elements=normal), tile=tiles)
def test_what_is_dequantized_is_near_what_there_was(options, x, tile):
    found = asked_batch(x, tile, **options)
    f = formats.get(options["format"])
    scale = found.scales.astype(np.float64) * float(found.tensor_scale or 1)
    wide = np.repeat(scale, tile[0] or x.shape[1], axis=1)
    wide = np.repeat(wide, tile[1] or x.shape[2], axis=2)
    wide = wide[:, : x.shape[1], : x.shape[2]]
    # Half a spacing at the amax at most; or what saturates: under "floor" up
    # to twice the largest power of two, or because e4m3fn scales round.
    power = 2.0 ** math.floor(math.log2(f.max))
    half = power * 2.0 ** -(f.mantissa_bits + 1)
    over = f.max / 2 if found.tensor_scale else 2 * power - f.max
    room = max(half, over) * 1.001
    known = wide > 0  # An e4m3fn scale can round to 0.
    error = np.abs(found.dequantize() - x)
    assert np.all(error[known] <= room * wide[known])


# Two levels


@pytest.mark.parametrize(
    ("tensor", "block", "scale"),
    [
        (2.8309741020202637, 1.3649338483810425, 208.0),
        (5.615790843963623, 0.10654961317777634, 8.0),
        (7.517950057983398, 4.564469814300537, 256.0),
    ],
)
def test_the_scale_of_a_block_is_its_amax_times_a_quotient(
    tensor, block, scale
):
    """Where another order of the same operations has another scale."""
    found = asked([[tensor, block]], tile=Tile(1, 1), **NVFP4)
    assert found.scales[0, 0].astype(np.float32).tolist() == [448.0, scale]


def test_a_block_whose_scale_rounds_to_zero_has_codes_of_one_size():
    x = [[2688.0, 0.0, 1e-3, -1e-3]]
    found = asked(x, tile=Tile(1, 2), **NVFP4)
    assert found.scales[0, 0].astype(np.float32).tolist() == [448.0, 0.0]
    assert found.codes[0, 0].view(np.uint8).tolist() == [7, 0, 7, 15]
    same(found.dequantize()[0, 0], [2688.0, 0.0, 0.0, 0.0])
    # 0 times an infinity would be NaN.
    found = asked([[448.0**2, 1.0, 0.0, 1e-3]], tile=Tile(1, 2), **EIGHT)
    same(found.codes[0, 0, 2:].astype(np.float32), [0.0, 448.0])


# Not finite


def test_only_the_tile_that_is_not_finite_is_marked():
    x = np.ones((4, 8), np.float32)
    x[1, 2] = np.inf
    for options in SCALES[:-1]:
        found = asked_batch(x[None], (2, 4), **options).marked
        bad = np.isnan(found.dequantize()[0])
        assert bad[:2, :4].all()
        assert bad.sum() == 8


def test_under_two_levels_the_scale_of_the_tensor_is_that_of_zeros():
    x = np.ones((1, 4, 8), np.float32)
    x[0, 1, 2] = np.inf
    found = asked_batch(x, (2, 4), **SCALES[-1])
    assert found.tensor_scale == 1
    assert float(found.scales[0, 0, 0]) == 0
    assert np.isfinite(found.dequantize()).all()
    bad = np.isnan(found.marked.dequantize()[0])
    assert bad[:2, :4].all()
    assert bad.sum() == 8


@scales
def test_nan_stays_nan_and_infinity_saturates(options):
    x = np.float32([[[1.0, np.nan, -np.inf, np.inf]]])
    found = asked_batch(x, (1, 4), **options)
    values = found.dequantize()[0, 0]
    assert np.isnan(values).tolist() == [False, True, False, False]
    assert values[3] == -values[2]
    top = formats.get(options["format"]).max
    assert found.codes[0, 0, 2:].astype(np.float32).tolist() == [-top, top]
