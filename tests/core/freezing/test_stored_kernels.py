"""Codes and scales, against a computation that takes group by group."""

import ml_dtypes
import numpy as np
import pytest

from frozen_models import (
    BITS,
    GRANULARITIES,
    dequantized,
    groups_of,
    numbers_of,
    rounded,
)
from keras_policy_ext import stored_kernels
from keras_policy_ext.stored_kernels import Axes, scale_shape
from steps import normal

pytestmark = pytest.mark.any_backend

KERNELS = {
    "a matrix": ((5, 3), Axes((0,), (1,))),
    "its transpose": ((5, 3), Axes((1,), (0,))),
    "more than a block": ((130, 257), Axes((0,), (1,))),
    "two axes summed": ((4, 6, 5), Axes((0, 1), (2,))),
    "summed in another order": ((13, 20, 5), Axes((1, 0), (2,))),
    "kept in another order": ((5, 20, 13), Axes((0,), (2, 1))),
    "with a batch": ((3, 40, 8), Axes((1,), (0, 2))),
    "nothing summed": ((4, 6), Axes((), (0, 1))),
}


def kernel_of(shape):
    """Numbers of many sizes, and an output without any."""
    kernel = normal(*shape) * np.exp2(np.round(8 * normal(*shape, seed=1)))
    kernel[..., -1] = 0
    return kernel


@pytest.mark.parametrize("weights", stored_kernels.WEIGHTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KERNELS)
def test_codes_and_scales_are_those_of_the_definition(
    kind, granularity, weights
):
    shape, axes = KERNELS[kind]
    kernel = kernel_of(shape)
    stored = stored_kernels.quantize(kernel, axes, granularity, weights)
    codes, scales = rounded(kernel, tuple(axes), granularity, weights)
    np.testing.assert_array_equal(stored.codes, codes)
    np.testing.assert_array_equal(
        stored.dequantized(),
        numbers_of(codes, weights) * scales,
    )
    shape_of_scales = scale_shape(shape, axes, granularity)
    assert stored.scale.shape == shape_of_scales
    groups = groups_of(shape, *axes, granularity)
    assert stored.scale.size == np.unique(groups).size
    size = -(-kernel.size * BITS.get(weights, 8) // 8)
    assert stored.nbytes == size + 4 * stored.scale.size
    packed = stored_kernels.pack(codes, weights)
    assert packed.nbytes == size
    unpacked = stored_kernels.unpack(packed, shape, weights)
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", KERNELS)
def test_the_matrix_is_outputs_by_inputs(kind, granularity):
    shape, axes = KERNELS[kind]
    stored = stored_kernels.quantize(kernel_of(shape), axes, granularity)
    matrix = stored.matrix.view(ml_dtypes.float8_e4m3fn).astype("float32")
    scale = stored.matrix_scale
    if granularity == "block":
        scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)
        scale = scale[: matrix.shape[0], : matrix.shape[1]]
    elif granularity == "group32":
        scale = np.repeat(scale, 32, 1)[:, : matrix.shape[1]]
    else:
        assert scale.shape in ((matrix.shape[0], 1), (1, 1))
    turned = stored.dequantized().transpose(axes.free + axes.summed)
    np.testing.assert_array_equal(matrix * scale, turned.reshape(matrix.shape))
    assert stored.matrix.flags.c_contiguous
    assert axes.sizes(shape) == matrix.shape[::-1]


def test_rounding_is_to_nearest_with_ties_to_even():
    kernel = np.array([[448, 17, 19, -17, 0.001, 2.0**-10, 1.5 * 2**-9]])
    stored = stored_kernels.quantize(kernel, Axes((1,), (0,)))
    expected = [448, 16, 20, -16, 2.0**-9 * 1, 0, 2 * 2.0**-9]
    expected[4] = 2.0**-9  # 0.001 is more than half of it
    np.testing.assert_array_equal(stored.dequantized(), [expected])


def test_a_given_scale_is_kept_and_bounds_what_is_larger():
    kernel = np.array([[1.0, -1000.0, 1000.0]], "float32")
    stored = stored_kernels.quantize(
        kernel, Axes((0,), (1,)), "tensor", scale=2.0
    )
    np.testing.assert_array_equal(stored.scale, [[2.0]])
    np.testing.assert_array_equal(stored.dequantized(), [[1.0, -896, 896]])


def test_numbers_too_small_for_a_scale_keep_a_normal_one():
    kernel = np.full((2, 2), 1e-44, "float32")
    stored = stored_kernels.quantize(kernel, Axes((0,), (1,)))
    assert np.all(stored.scale == np.finfo("float32").smallest_normal)
    assert np.all(np.isfinite(stored.dequantized()))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_is_stored_is_stored_again_as_the_same_bytes(granularity):
    axes = Axes((0,), (1,))
    once = stored_kernels.quantize(normal(130, 140), axes, granularity)
    again = stored_kernels.quantize(once.dequantized(), axes, granularity)
    np.testing.assert_array_equal(again.codes, once.codes)
    # The largest number is 448 times the scale, rounded once.
    np.testing.assert_allclose(again.scale, once.scale, rtol=2.0**-23)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(value):
    kernel = normal(3, 2)
    kernel[1, 1] = value
    with pytest.raises(ValueError, match="Received: 1 of its values") as error:
        stored_kernels.quantize(kernel, Axes((0,), (1,)))
    assert "Allowed: finite" in str(error.value)


@pytest.mark.parametrize(
    "argument", [{"granularity": "row"}, {"weights": "int5"}]
)
def test_unknown_words_are_refused(argument):
    with pytest.raises(ValueError) as error:
        stored_kernels.quantize(normal(3, 2), Axes((0,), (1,)), **argument)
    ((name, value),) = argument.items()
    assert f"Received: {name}={value!r}" in str(error.value)
    assert "Allowed: 'channel'" in str(error.value) or "e5m2" in str(
        error.value
    )


def test_a_bfloat16_kernel_is_rounded_from_what_it_holds():
    kernel = normal(6, 4).astype(ml_dtypes.bfloat16)
    stored = stored_kernels.quantize(kernel, Axes((0,), (1,)))
    expected = dequantized(kernel.astype("float32"), (0,))
    np.testing.assert_array_equal(stored.dequantized(), expected)
