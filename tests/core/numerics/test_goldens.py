"""Codes and scales of Transformer Engine, on every backend."""

import pathlib

import numpy as np
import pytest
from keras import ops

from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import Quantization, Tile

E4M3, E2M1, E8M0 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
GOLDEN = np.load(
    pathlib.Path(__file__).parents[2] / "goldens" / "block_quantizers_te.npz"
)


def found(x, asked):
    """Codes and scales as they are kept."""
    matrix = ops.convert_to_tensor(np.ascontiguousarray(x)[np.newaxis])
    narrow = quantize(matrix, asked)[0].encoded("uint8")
    values = np.asarray(ops.convert_to_numpy(narrow.values))
    return values[0], np.asarray(ops.convert_to_numpy(narrow.scale))[0]


@pytest.mark.parametrize("tile", [(1, 128), (128, 128)])
@pytest.mark.parametrize(("rounding", "number"), [("up", 1), ("nearest", 0)])
def test_blocks(tile, rounding, number):
    asked = Quantization(format=E4M3, tile=Tile(*tile), scale_rounding=rounding)
    codes, scales = found(GOLDEN["x_256x384"], asked)
    key = f"blk_256x384_{E4M3}_{tile[0]}x{tile[1]}_p{number}"
    np.testing.assert_array_equal(codes, GOLDEN[f"{key}_q"])
    np.testing.assert_array_equal(scales, GOLDEN[f"{key}_sinv"])


@pytest.mark.parametrize(
    ("rounding", "key"), [("up", "mx"), ("floor", "mxfloor")]
)
def test_mx(rounding, key):
    asked = Quantization(
        format=E4M3,
        tile=Tile(1, 32),
        scale_format=E8M0,
        scale_rounding=rounding,
    )
    codes, scales = found(GOLDEN["x_256x384"], asked)
    np.testing.assert_array_equal(codes, GOLDEN[f"{key}_q"])
    np.testing.assert_array_equal(scales, GOLDEN[f"{key}_s"])


def numbers(codes):
    dtype = np.dtype("float4_e2m1fn")
    return codes.view(dtype).astype("float32")


@pytest.mark.parametrize("free", [1, 16])
def test_nvfp4(free):
    asked = Quantization(format=E2M1, tile=Tile(free, 16), scale_format=E4M3)
    codes, scales = found(GOLDEN["x_nv"], asked)
    np.testing.assert_array_equal(numbers(codes), GOLDEN[f"nv_{free}_val"])
    np.testing.assert_array_equal(
        scales.repeat(free, 0), GOLDEN[f"nv_{free}_sf"]
    )


def test_nvfp4_of_transformed_numbers():
    asked = Quantization(
        format=E2M1, tile=Tile(1, 16), scale_format=E4M3, hadamard=16
    )
    codes, scales = found(GOLDEN["x_nv"].T, asked)
    np.testing.assert_array_equal(numbers(codes), GOLDEN["nv_rht_col_val"])
    np.testing.assert_array_equal(scales, GOLDEN["nv_rht_col_sf"])
