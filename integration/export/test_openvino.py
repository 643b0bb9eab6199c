"""What OpenVINO computes of an ONNX file, beside onnxruntime."""

import keras
import numpy as np
import onnxruntime
import openvino
import pytest

import keras_policy_ext as kpe

SIZE = 64


def dense():
    return keras.Sequential(
        [
            keras.Input((SIZE,)),
            keras.layers.Dense(SIZE, activation="relu"),
            keras.layers.Dense(SIZE),
        ]
    )


def convolution():
    return keras.Sequential(
        [
            keras.Input((8, 8, 8)),
            keras.layers.Conv2D(SIZE, 3, activation="relu"),
            keras.layers.Conv2D(8, 3),
        ]
    )


def both(path, x):
    """The outputs of both readers; OpenVINO computes in float32."""
    options = onnxruntime.SessionOptions()
    # By default both round the inputs of products with integers.
    options.add_session_config_entry(
        "session.qdq_matmulnbits_accuracy_level", "1"
    )
    session = onnxruntime.InferenceSession(str(path), options)
    (name,) = (each.name for each in session.get_inputs())
    (first,) = session.run(None, {name: x})
    exact = {
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }
    model = openvino.Core().compile_model(str(path), "CPU", exact)
    return first, model(x)[0]


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
@pytest.mark.parametrize("make", [dense, convolution])
def test_stored_kernels_are_read_alike(make, granularity, tmp_path):
    keras.utils.set_random_seed(0)
    model = make()
    kpe.freeze(model, granularity=granularity)
    path = tmp_path / "model.onnx"
    kpe.export(model, path, format="onnx")
    x = np.random.default_rng(0).normal(size=(4, *model.inputs[0].shape[1:]))
    first, second = both(path, x.astype("float32"))
    # Sums of 576 terms in another order.
    bound = 1e-5 * np.abs(first).max()
    np.testing.assert_allclose(second, first, rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("make", "weights", "granularity"),
    [
        (dense, "int8", "channel"),
        (dense, "int8", "group64"),
        (dense, "int4", "channel"),
        (dense, "int4", "group"),
        # It reads whole groups only; the first one sums 72 numbers.
        (convolution, "int8", "channel"),
        (convolution, "int4", "channel"),
    ],
)
def test_integers_are_read_alike(make, weights, granularity, tmp_path):
    keras.utils.set_random_seed(0)
    model = make()
    kpe.freeze(model, weights=weights, granularity=granularity)
    path = tmp_path / "model.onnx"
    kpe.export(model, path, format="onnx")
    x = np.random.default_rng(0).normal(size=(4, *model.inputs[0].shape[1:]))
    x = x.astype("float32")
    expected = keras.ops.convert_to_numpy(model(x))
    bound = 1e-5 * np.abs(expected).max()
    for outputs in both(path, x):
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("make", [dense, convolution])
def test_rounded_inputs_are_numbers_where_they_saturate(
    make, activations, tmp_path
):
    """It rounds to float16 first, so a few of the inputs are neighbours."""
    keras.utils.set_random_seed(0)
    model = make()
    x = np.random.default_rng(0).normal(size=(4, *model.inputs[0].shape[1:]))
    x = x.astype("float32")
    kpe.convert(model, "delayed")
    kpe.calibrate(model, [x])
    kpe.freeze(model, activations=activations)
    path = tmp_path / "model.onnx"
    kpe.export(model, path, format="onnx")
    # Twice what was seen: static scales saturate.
    first, second = both(path, 2 * x)
    assert np.isfinite(second).all()
    error = np.square(second - first).sum() / np.square(first).sum()
    # An input is a neighbour, 2⁻³ away, where its rest is within 2⁻⁸ of half
    # a step: fewer than one in 100. Two layers add up.
    assert error < 2 * 2.0**-6 / 100
