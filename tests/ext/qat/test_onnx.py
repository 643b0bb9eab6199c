"""ONNX files with integers, as onnxruntime computes them."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import normal, numpy

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

X = normal(5, 6, 64)


def frozen(**how):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6, 64)),
            layers.Dense(48, activation="relu", name="first"),
            layers.Conv1D(40, 3, padding="same", name="window"),
            layers.EinsumDense("btd,dnh->btnh", (None, 3, 5), name="heads"),
        ]
    )
    kpe.freeze(model, **how)
    return model


def run(path, x):
    """What onnxruntime computes without rounding inputs itself."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # By default it rounds the inputs of a product with blocks to int8.
    options.add_session_config_entry(
        "session.qdq_matmulnbits_accuracy_level", "1"
    )
    session = onnxruntime.InferenceSession(str(path), options)
    (name,) = (each.name for each in session.get_inputs())
    return session.run(None, {name: x})[0]


HOWS = {
    "int8": dict(weights="int8"),
    "int4": dict(weights="int4"),
    "groups": dict(weights="int4", granularity="group"),
    "large groups": dict(weights="int8", granularity="group64"),
    "blocks": dict(weights="int4", granularity="block"),
}


@pytest.mark.parametrize("kind", HOWS)
def test_onnxruntime_computes_what_the_frozen_model_does(kind, tmp_path):
    model = frozen(**HOWS[kind])
    report = kpe.export(model, tmp_path / "model.onnx", format="onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    dtypes = {each.dtype for each in report.weights if each.quantized}
    assert dtypes == {HOWS[kind]["weights"]}
    expected = numpy(model(X))
    error = np.abs(run(tmp_path / "model.onnx", X) - expected).max()
    assert error < 1e-5 * np.abs(expected).max()


def test_inputs_are_rounded_to_int8(tmp_path):
    model = frozen(weights="int4", activations="dynamic")
    kpe.export(model, tmp_path / "model.onnx", format="onnx")
    expected = numpy(model(X))
    outputs = run(tmp_path / "model.onnx", X)
    # One ulp before a rounding may move one number to the next.
    assert np.abs(outputs - expected).max() < 2e-2 * np.abs(expected).max()
    unrounded = numpy(frozen(weights="int4")(X))
    error = np.sqrt(np.mean((outputs - expected) ** 2))
    assert error < 0.3 * np.sqrt(np.mean((outputs - unrounded) ** 2))


def test_codes_are_two_in_a_byte(tmp_path):
    model = frozen(**HOWS["groups"])
    kpe.export(model, tmp_path / "model.onnx", format="onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    codes = [
        each
        for each in graph.initializer
        if each.data_type == onnx.TensorProto.INT4
    ]
    first = model.get_layer("first").kernel.stored
    (found,) = (each for each in codes if list(each.dims) == [64, 48])
    assert len(found.raw_data) == 64 * 48 // 2
    np.testing.assert_array_equal(
        onnx.numpy_helper.to_array(found).astype("int8"),
        first.codes.view("int8"),
    )


def test_embeddings_are_looked_up(tmp_path):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Embedding(20, 40)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), layer])
    kpe.freeze(model, weights="int4", granularity="group")
    kpe.export(model, tmp_path / "model.onnx", format="onnx")
    words = np.array([[1, 5, 19]], "int32")
    np.testing.assert_array_equal(
        run(tmp_path / "model.onnx", words), numpy(model(words))
    )


@pytest.mark.parametrize(
    "how, opset, fault",
    [
        (dict(weights="int3"), None, "no such integers"),
        (dict(weights="float4_e2m1fn"), None, "no such floats"),
        (dict(weights="int4"), 20, "no integers of four bits"),
        (
            dict(weights="int8", granularity="group"),
            20,
            "no scales of blocks",
        ),
    ],
)
def test_what_onnx_cannot_hold_is_refused_first(how, opset, fault, tmp_path):
    model = frozen(**how)
    with pytest.raises(ValueError, match=fault) as error:
        kpe.export(model, tmp_path / "model.onnx", format="onnx", opset=opset)
    assert "Allowed" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_frozen_yet_is_refused(tmp_path):
    model = frozen(weights="int4")
    kpe.thaw(model)
    kpe.convert(model, "int4")
    with pytest.raises(ValueError, match="trained for a grid"):
        kpe.export(model, tmp_path / "model.onnx", format="onnx")
    assert not list(tmp_path.iterdir())
