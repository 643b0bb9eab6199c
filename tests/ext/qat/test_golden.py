"""Codes and values as compressed-tensors has them (tests/goldens/README.md)."""

import pathlib

import numpy as np
import pytest
from keras import ops

from keras_policy_ext import stored_kernels
from keras_policy_ext.ext.export.exported_kernels import Scheme
from keras_policy_ext.ext.export.readers import Reader
from keras_policy_ext.ext.qat import rounding
from keras_policy_ext.stored_kernels import Axes, Grid
from steps import numpy

PATH = pathlib.Path(__file__).parents[2] / "goldens"
AXES = Axes((0,), (1,))
GRIDS = [
    (weights, granularity)
    for weights in ("int8", "int4", "int3", "int2")
    for granularity in ("channel", "group32", "group64", "group128")
]


@pytest.fixture(scope="module")
def golden():
    with np.load(PATH / "integers_compressed_tensors.npz") as file:
        return dict(file)


@pytest.mark.any_backend
@pytest.mark.parametrize(("weights", "granularity"), GRIDS)
def test_what_is_stored_is_the_golden(golden, weights, granularity):
    key = f"{weights}_{granularity}"
    stored = stored_kernels.quantize(
        golden["kernel"], AXES, granularity, weights
    )
    np.testing.assert_array_equal(stored.matrix_scale, golden[f"{key}_scale"])
    np.testing.assert_array_equal(
        stored.matrix.view("int8"), golden[f"{key}_codes"]
    )
    np.testing.assert_array_equal(
        stored.dequantized().T, golden[f"{key}_values"]
    )


@pytest.mark.parametrize(("weights", "granularity"), GRIDS)
def test_what_is_trained_is_the_golden(golden, weights, granularity):
    kernel = ops.convert_to_tensor(golden["kernel"])
    grid = Grid(weights, granularity)
    values, _ = rounding.rounded_kernel(kernel, AXES, grid)
    np.testing.assert_array_equal(
        numpy(values).T, golden[f"{weights}_{granularity}_values"]
    )


@pytest.mark.any_backend
@pytest.mark.parametrize(("weights", "granularity"), GRIDS[:8])
def test_packed_codes_are_the_golden(golden, weights, granularity):
    key = f"{weights}_{granularity}"
    scheme = Scheme(weights=weights, granularity=granularity, activations=None)
    reader = Reader("compressed-tensors", "Llama3Backbone", scheme)
    packed = reader.packed(golden[f"{key}_codes"].view("uint8"))
    np.testing.assert_array_equal(packed, golden[f"{key}_packed"])
    assert packed.shape[1] == reader.packed_columns(128)
    group = reader.config([])["config_groups"]["group_0"]["weights"]
    assert group["num_bits"] == int(weights[3:])
    assert group["type"] == "int"
    assert (
        group.get("group_size")
        == {
            "channel": None,
            "group32": 32,
            "group64": 64,
            "group128": 128,
        }[granularity]
    )


@pytest.fixture(scope="module")
def nvfp4():
    with np.load(PATH / "nvfp4_compressed_tensors.npz") as file:
        return dict(file)


NVFP4 = ("float4_e2m1fn", "group16")


@pytest.mark.any_backend
def test_nvfp4_that_is_stored_is_the_golden(nvfp4):
    granularity, scale_format = NVFP4[1], "float8_e4m3fn"
    stored = stored_kernels.quantize(
        nvfp4["kernel"], AXES, granularity, NVFP4[0], scale_format=scale_format
    )
    np.testing.assert_array_equal(stored.scale_codes, nvfp4["scale"])
    assert 1 / stored.outer_scale == nvfp4["global_scale"]
    codes = stored_kernels.unpack(nvfp4["packed"].ravel(), (24, 64), NVFP4[0])
    # It has no -0 for what is rounded to it.
    is_zero = codes == 0
    assert np.all(stored.matrix[is_zero] & 7 == 0)
    np.testing.assert_array_equal(stored.matrix[~is_zero], codes[~is_zero])
    np.testing.assert_array_equal(stored.dequantized().T, nvfp4["values"])
    packed = stored_kernels.pack(codes, NVFP4[0])
    np.testing.assert_array_equal(packed, nvfp4["packed"].ravel())


def test_nvfp4_that_is_trained_is_the_golden(nvfp4):
    kernel = ops.convert_to_tensor(nvfp4["kernel"])
    grid = Grid(*NVFP4, scale_format="float8_e4m3fn")
    values, _ = rounding.rounded_kernel(kernel, AXES, grid)
    np.testing.assert_array_equal(numpy(values).T, nvfp4["values"])
