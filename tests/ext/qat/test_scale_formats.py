"""Scales in bfloat16 and powers of two, beside those in float32."""

import json
import math

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import stored_kernels
from keras_policy_ext.numerics import scaling
from keras_policy_ext.stored_kernels import Axes
from steps import normal, numpy

SHORT = ("bfloat16", "float8_e8m0fnu")
E4M3 = "float8_e4m3fn"
BYTES = {"float32": 4, "bfloat16": 2, "float8_e8m0fnu": 1, E4M3: 1}


def rounded(scale, scale_format):
    """A scale as one number of Python rounds."""
    if scale_format == "bfloat16":
        return float(ml_dtypes.bfloat16(scale))
    return 2.0 ** math.ceil(math.log2(scale))


@pytest.mark.any_backend
@pytest.mark.parametrize("scale_format", SHORT)
def test_scales_are_those_of_float32_rounded(scale_format):
    kernel, axes = normal(64, 5), Axes((0,), (1,))
    exact = stored_kernels.quantize(kernel, axes, "group32", "int4")
    how = dict(weights="int4", scale_format=scale_format)
    stored = stored_kernels.quantize(kernel, axes, "group32", **how)
    expected = [rounded(each, scale_format) for each in exact.scale.flat]
    np.testing.assert_array_equal(stored.scale.flat, expected)
    columns = kernel.reshape(2, 32, 5) / stored.scale.T[:, None]
    numbers = np.clip(np.rint(columns), -7, 7).reshape(64, 5)
    np.testing.assert_array_equal(stored.codes.view("int8"), numbers)
    assert stored.nbytes == 32 * 5 + 10 * BYTES[scale_format]


def in_e4m3(scales):
    """Scales in e4m3fn as Python rounds them, and their power of two."""
    largest = max(map(float, scales))
    outer = 2.0 ** (math.ceil(math.log2(largest)) - 8)
    numbers = [float(ml_dtypes.float8_e4m3fn(x / outer)) for x in scales]
    return [max(x, 2.0**-9) * outer for x in numbers], outer


@pytest.mark.any_backend
def test_scales_in_e4m3_are_times_one_power_of_two_of_the_kernel():
    kernel, axes = normal(64, 5), Axes((0,), (1,))
    kernel[:16, 1] *= 1e-3
    kernel[:16, 2] *= 1e-9
    weights = "float4_e2m1fn"
    exact = stored_kernels.quantize(kernel, axes, "group16", weights)
    stored = stored_kernels.quantize(
        kernel, axes, "group16", weights, scale_format=E4M3
    )
    expected, outer = in_e4m3(exact.scale.ravel())
    np.testing.assert_array_equal(stored.scale.flat, expected)
    assert stored.outer_scale == outer
    assert 128 <= stored.scale.max() / outer <= 256
    codes = stored.scale_codes.view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes.astype("float32") * outer, stored.scale)
    in_bfloat16 = stored.scale.astype(ml_dtypes.bfloat16).astype("float32")
    np.testing.assert_array_equal(in_bfloat16, stored.scale)
    assert stored.nbytes == 32 * 5 + 20 + 4
    # Zeros have the least scale, so that those of others stay exact.
    kernel[16:32] = 0
    other = stored_kernels.quantize(
        kernel, axes, "group16", weights, scale_format=E4M3
    )
    assert other.outer_scale == outer
    np.testing.assert_array_equal(other.scale[:, 1], [outer * 2.0**-9] * 5)
    nothing = stored_kernels.quantize(
        0 * kernel, axes, "group16", weights, scale_format=E4M3
    )
    assert np.all(nothing.scale >= np.finfo("float32").smallest_normal)


@pytest.mark.any_backend
def test_scales_that_are_rounded_are_rounded_to_themselves():
    rng = np.random.default_rng(0)
    for scale_format in (*SHORT, E4M3):
        for spread in (0.1, 1, 8, 60):
            for _ in range(50):
                exponents = rng.normal(size=20) * spread
                scales = np.exp2(exponents.clip(-126, 127)).astype("float32")
                once = stored_kernels.rounded_scales(scales, scale_format)
                again = stored_kernels.rounded_scales(once, scale_format)
                np.testing.assert_array_equal(again, once)


@pytest.mark.parametrize("scale_format", [*SHORT, E4M3])
def test_every_scale_is_rounded_alike_in_numpy_and_by_the_framework(
    scale_format,
):
    # All exponents, and significands around ties and powers of two.
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF], "int32")
    exponents = np.arange(1, 254, dtype="int32") << 23
    scales = (exponents[:, None] + ends).view("float32")
    scales = np.append(scales, np.float32(2.0**127))
    for some in (scales, scales[:900], scales[400:600], scales[:9]):
        expected = stored_kernels.rounded_scales(some, scale_format)
        got = scaling.round_scale(ops.convert_to_tensor(some), scale_format)
        np.testing.assert_array_equal(numpy(got), expected)


def model_of():
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(24, name="dense")
    return keras.Sequential([keras.Input((96,)), layer], name="m")


X = normal(8, 96)


@pytest.mark.parametrize("scale_format", [*SHORT, E4M3])
def test_what_is_trained_is_what_is_frozen_and_in_the_file(
    scale_format, tmp_path
):
    model = model_of()
    weights = "float4_e2m1fn" if scale_format == E4M3 else "int4"
    kpe.convert(model, f"{weights}(group=32,scale_format={scale_format!r})")
    model.compile("adam", "mse", jit_compile=keras.backend.backend() == "jax")
    model.fit(X, normal(8, 24), epochs=2, verbose=0)
    trained = numpy(model(X))
    report = kpe.freeze(model)
    scales = BYTES[scale_format] * 3 * 24 + 4 * (scale_format == E4M3)
    assert report.bytes_after == 96 * 24 // 2 + scales
    outputs = numpy(model(X))
    np.testing.assert_allclose(outputs, trained, rtol=1e-5, atol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].float8_policy == model.layers[0].float8_policy
    np.testing.assert_array_equal(numpy(loaded(X)), outputs)


def test_freeze_takes_a_format_of_scales():
    model = model_of()
    kpe.convert(model, "int4(scale_format='bfloat16')")
    kpe.freeze(model, scale_format="float32")
    assert model.layers[0].kernel.recipe.scale_format == "float32"
    errors = {}
    for scales in ("amax", "least_squares"):
        model = model_of()
        how = dict(weights="int4", scale_format="float8_e8m0fnu")
        report = kpe.freeze(model, scales=scales, **how)
        scale = model.layers[0].kernel.stored.scale
        np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
        errors[scales] = report.stored[0].sqnr_db
    # A smaller power of two may be better than that of the amax.
    assert errors["least_squares"] > errors["amax"]
    with pytest.raises(ValueError, match="scale_format") as error:
        kpe.freeze(model_of(), scale_format="float16")
    assert "Allowed: 'float32', 'bfloat16'" in str(error.value)


def test_scales_of_another_format_are_refused():
    model = model_of()
    kpe.freeze(model, weights="int4", scale_format="bfloat16")
    layer = model.layers[0]
    other = layer.get_weights()
    (place,) = (n for n, w in enumerate(layer.weights) if "scale" in w.path)
    other[1] = layer.kernel.stored.codes
    scale = other[place]
    other[place] = scale * np.float32(1.001)
    with pytest.raises(ValueError, match="> 0 in bfloat16"):
        layer.set_weights(other)
    other[place] = scale * np.float32(2)
    layer.set_weights(other)


@pytest.mark.parametrize("scales", ["amax", "least_squares"])
def test_weights_of_nvfp4_are_set_and_files_reverted(scales, tmp_path):
    model = model_of()
    how = dict(weights="float4_e2m1fn", granularity="group16")
    report = kpe.freeze(model, scales=scales, scale_format=E4M3, **how)
    assert report.stored[0].sqnr_db > 19
    layer, outputs = model.layers[0], numpy(model(X))
    layer.set_weights(layer.get_weights())
    np.testing.assert_array_equal(numpy(model(X)), outputs)
    with pytest.raises(ValueError, match="codes out of range"):
        layer.kernel.assign(np.full((96, 24), 16, "uint8"))
    model.save_weights(tmp_path / "model.weights.h5")
    kpe.thaw(model)
    np.testing.assert_allclose(numpy(model(X)), outputs, rtol=0, atol=1e-5)
    other = model_of()
    kpe.load_weights(other, tmp_path / "model.weights.h5", dequantize=True)
    np.testing.assert_array_equal(numpy(other(X)), numpy(model(X)))


def damaged_scale(group):
    codes = group["kernel.scale_codes"][()]
    del group["kernel.scale_codes"]
    group["kernel.scale_codes"] = codes.astype("uint32")


def damaged_number(group):
    group["kernel.scale_codes"][0, 0] = 0


def damaged_outer(group):
    group["kernel.outer_scale"][...] = 0.3


def no_outer(group):
    del group["kernel.outer_scale"]


def damaged_header(group):
    header = json.loads(group["stored"][()].tobytes())
    header["scale_format"] = "float16"
    del group["stored"]
    group["stored"] = np.frombuffer(json.dumps(header).encode(), "uint8")


@pytest.mark.parametrize(
    "damage",
    [damaged_scale, damaged_number, damaged_header, damaged_outer, no_outer],
)
def test_damaged_scales_in_a_file_are_refused(damage, tmp_path):
    model = model_of()
    of_outer = damage in (damaged_outer, no_outer)
    scale_format = E4M3 if of_outer else "bfloat16"
    kpe.freeze(model, weights="int4", scale_format=scale_format)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "a") as file:
        damage(file["layers/dense/vars"])
    with pytest.raises(ValueError, match="damaged"):
        model.load_weights(path)
