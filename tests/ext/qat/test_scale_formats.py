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
BYTES = {"float32": 4, "bfloat16": 2, "float8_e8m0fnu": 1}


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


@pytest.mark.parametrize("scale_format", SHORT)
def test_every_scale_is_rounded_alike_in_numpy_and_by_the_framework(
    scale_format,
):
    # All exponents, and significands around ties and powers of two.
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF], "int32")
    exponents = np.arange(1, 254, dtype="int32") << 23
    scales = (exponents[:, None] + ends).view("float32")
    scales = np.append(scales, np.float32(2.0**127))
    expected = stored_kernels.rounded_scales(scales, scale_format)
    got = scaling.round_scale(ops.convert_to_tensor(scales), scale_format)
    np.testing.assert_array_equal(numpy(got), expected)


def model_of():
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(24, name="dense")
    return keras.Sequential([keras.Input((96,)), layer], name="m")


X = normal(8, 96)


@pytest.mark.parametrize("scale_format", SHORT)
def test_what_is_trained_is_what_is_frozen_and_in_the_file(
    scale_format, tmp_path
):
    model = model_of()
    kpe.convert(model, f"int4(group=32,scale_format={scale_format!r})")
    model.compile("adam", "mse", jit_compile=keras.backend.backend() == "jax")
    model.fit(X, normal(8, 24), epochs=2, verbose=0)
    trained = numpy(model(X))
    report = kpe.freeze(model)
    scales = BYTES[scale_format] * 3 * 24
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


def damaged_scale(group):
    codes = group["kernel.scale_codes"][()]
    del group["kernel.scale_codes"]
    group["kernel.scale_codes"] = codes.astype("uint32")


def damaged_number(group):
    group["kernel.scale_codes"][0, 0] = 0


def damaged_header(group):
    header = json.loads(group["stored"][()].tobytes())
    header["scale_format"] = "float16"
    del group["stored"]
    group["stored"] = np.frombuffer(json.dumps(header).encode(), "uint8")


@pytest.mark.parametrize(
    "damage", [damaged_scale, damaged_number, damaged_header]
)
def test_damaged_scales_in_a_file_are_refused(damage, tmp_path):
    model = model_of()
    kpe.freeze(model, weights="int4", scale_format="bfloat16")
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "a") as file:
        damage(file["layers/dense/vars"])
    with pytest.raises(ValueError, match="damaged"):
        model.load_weights(path)
