"""Files for other programs: the same numbers, or an error before any file."""

import importlib.util
import inspect

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import needs_whole_graphs
from keras_policy_ext._keras import saving_hooks
from keras_policy_ext.saving import keras_hooks
from steps import numpy, observe_inputs

BACKEND = keras.backend.backend()
FORMATS = ("tf_saved_model", "onnx", "litert", "openvino", "torch")
POLICIES = {
    "delayed": ("float8/4_from_float32", "float32"),
    "current": ("float8/current_from_float32", "float32"),
    "mixed": ("float8/4_from_mixed_bfloat16", "mixed_bfloat16"),
}
X = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")

needs_torch = pytest.mark.skipif(
    BACKEND != "torch", reason="torch.export is one of PyTorch's"
)


def is_installed(name):
    return importlib.util.find_spec(name) is not None


def dense(x, dtype):
    x = keras.layers.Dense(8, "relu", dtype=dtype)(x)
    return keras.layers.EinsumDense("abc,cd->abd", (None, 5), dtype=dtype)(x)


def convolution(x, dtype):
    return keras.layers.Conv1D(8, 3, dtype=dtype)(x)


def attention(x, dtype):
    return keras.layers.MultiHeadAttention(2, 4, dtype=dtype)(x, x)


def recurrent(x, dtype):
    return keras.layers.GRU(5, dtype=dtype)(x)


KINDS = {f.__name__: f for f in (dense, convolution, attention, recurrent)}


def model_of(kind, policy, observed=True):
    """A converted model, with amaxes or none."""
    keras.utils.set_random_seed(0)
    name, source = POLICIES[policy]
    inputs = keras.Input((6, 4))
    x = KINDS[kind](inputs, source)
    model = keras.Model(inputs, keras.layers.Dense(3, dtype=source)(x))
    products = {"attention": "float8"} if kind == "attention" else {}
    kpe.convert(model, name, **products)
    if observed:
        observe_inputs(model, X)
    return model


def predicted(model):
    return numpy(model(X, training=False)).astype("float32")


def assert_same(found, expected, policy):
    """Up to the order in which a sum is taken: two units in the last place."""
    unit = 2.0**-7 if policy == "mixed" else 2.0**-23
    atol = 2 * unit * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


# What can be exported


@pytest.mark.full
@pytest.mark.skipif(
    "tf_saved_model" not in keras_hooks.FORMATS[BACKEND],
    reason="Keras writes a SavedModel from PyTorch by torch_xla alone",
)
@pytest.mark.skipif(
    not is_installed("tensorflow"), reason="a SavedModel is TensorFlow's"
)
@pytest.mark.parametrize(
    "kind, policy",
    [("dense", "mixed"), ("dense", "current"), ("attention", "delayed")],
)
def test_a_saved_model_computes_the_same(kind, policy, tmp_path):
    import tensorflow as tf

    model = model_of(kind, policy)
    expected = predicted(model)
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    found = tf.cast(loaded.serve(X), tf.float32).numpy()
    assert_same(found, expected, policy)


@pytest.mark.full_except("dense-current-True")
@needs_torch
@pytest.mark.parametrize(
    "kind, policy, observed",
    [
        *((kind, "delayed", True) for kind in KINDS),
        ("dense", "delayed", False),
        ("recurrent", "delayed", False),
        ("dense", "current", True),
        ("dense", "mixed", True),
    ],
)
def test_torch_export_computes_the_same_by_operations_of_torch(
    kind, policy, observed
):
    """And nothing else: the file needs no package but torch."""
    import torch

    model = model_of(kind, policy, observed)
    expected = predicted(model)
    program = torch.export.export(model, (torch.tensor(X),), strict=False)
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    owners = {getattr(n.target, "namespace", "python") for n in calls}
    assert owners <= {"aten", "python"}
    found = program.module()(torch.tensor(X)).detach().float().numpy()
    assert_same(found, expected, policy)


@needs_torch
def test_what_torch_export_traces_is_rounded_to_float8():
    import torch

    model = model_of("dense", "current")
    kept = predicted(model)
    program = torch.export.export(model, (torch.tensor(X),), strict=False)
    kpe.revert(model)
    found = program.module()(torch.tensor(X)).detach().numpy()
    assert np.abs(found - kept).max() < np.abs(predicted(model) - kept).max()


@pytest.mark.full
@needs_torch
@pytest.mark.skipif(
    "torch" not in inspect.getsource(inspect.unwrap(keras.Model.export)),
    reason=f"Keras {keras.__version__} has no such format yet",
)
def test_a_pt2_file_computes_the_same(tmp_path):
    import torch

    model = model_of("dense", "delayed")
    model.export(tmp_path / "model.pt2", format="torch", verbose=False)
    program = torch.export.load(tmp_path / "model.pt2").module()
    one = torch.tensor(X[:1])  # Keras fixes the size of the batch.
    expected = predicted(model)[:1]
    assert_same(program(one).detach().numpy(), expected, "delayed")


@needs_torch
def test_exporting_observes_nothing():
    import torch

    model = model_of("dense", "delayed")
    before = model.get_weights()
    torch.export.export(model, (torch.tensor(X),), strict=False)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


# What is refused


@pytest.mark.parametrize("format", FORMATS)
def test_other_formats_are_refused_before_anything_is_written(format, tmp_path):
    if format in keras_hooks.FORMATS[BACKEND]:
        pytest.skip(f"{format} can be written on {BACKEND}")
    model = model_of("dense", "delayed")
    with pytest.raises(NotImplementedError) as caught:
        model.export(tmp_path / "model", format=format)
    message = str(caught.value)
    for part in (f"Received: format={format!r}", "Allowed", "revert(model)"):
        assert part in message
    assert not list(tmp_path.iterdir())
    kpe.revert(model)
    keras_hooks.check_export(model, format)


def test_a_float8_layer_in_a_block_is_found(tmp_path):
    model = keras.Sequential([keras.Input((6, 4)), model_of("dense", "mixed")])
    with pytest.raises(NotImplementedError, match="3 layers in float8"):
        model.export(tmp_path / "model.onnx", "onnx")


def test_what_is_not_in_float8_is_exported_as_keras_does(monkeypatch):
    called = []

    def export(self, filepath, format="tf_saved_model", **kwargs):
        called.append((filepath, format, kwargs))
        return "exported"

    monkeypatch.setattr(keras.Model, "export", export)

    saving_hooks.before_export(keras_hooks.check_export)
    model = keras.Sequential([keras.Input((4,)), kpe.layers.Dense(2)])
    assert model.export("path", format="onnx", opset_version=18) == "exported"
    assert model.export("path") == "exported"
    assert called == [
        ("path", "onnx", {"opset_version": 18}),
        ("path", "tf_saved_model", {}),
    ]


@needs_torch
def test_torch_onnx_is_refused_by_the_layer_itself(tmp_path):
    import torch

    model = model_of("dense", "delayed")
    with pytest.raises(NotImplementedError, match=r"ONNX.*revert\(model\)"):
        torch.onnx.export(
            model, (torch.tensor(X),), tmp_path / "model.onnx", dynamo=False
        )
    assert not list(tmp_path.iterdir())


@needs_torch
@pytest.mark.parametrize("frozen", [False, True])
def test_torchscript_is_refused_by_the_layer_itself(frozen):
    import torch

    model = model_of("dense", "delayed")
    if frozen:
        kpe.freeze(model)
    with pytest.raises(NotImplementedError, match=r"trace.*revert\(model\)"):
        torch.jit.trace(model, (torch.tensor(X),), check_trace=False)
    if frozen:
        kpe.thaw(model)
    kpe.revert(model)
    traced = torch.jit.trace(model, (torch.tensor(X),), check_trace=False)
    np.testing.assert_array_equal(
        traced(torch.tensor(X)).detach(), model(X).detach()
    )


@needs_torch
@needs_whole_graphs
def test_strict_export_says_that_it_must_not_be():
    import torch

    model = model_of("dense", "delayed")
    with pytest.raises(Exception, match="Allowed: strict=False"):
        torch.export.export(model, (torch.tensor(X),), strict=True)


# Why: these expire when the files run


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras's way on TensorFlow")
@pytest.mark.skipif(
    not (is_installed("tf2onnx") and is_installed("onnxruntime")),
    reason="tf2onnx and onnxruntime are not installed",
)
def test_tf2onnx_writes_a_file_that_does_not_run(tmp_path):
    import onnxruntime

    path = str(tmp_path / "model.onnx")
    model = model_of("dense", "current")
    model.export.__wrapped__(model, path, "onnx", verbose=False)
    with pytest.raises(Exception, match="No Op registered for Bitcast"):
        onnxruntime.InferenceSession(path)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras's way on TensorFlow")
@pytest.mark.skipif(
    not is_installed("ai_edge_litert"), reason="LiteRT is not installed"
)
def test_litert_lacks_operations_of_the_file(tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    path = str(tmp_path / "model.tflite")
    model = model_of("dense", "current")
    model.export.__wrapped__(model, path, "litert", verbose=False)
    with pytest.raises(RuntimeError, match="Flex"):
        Interpreter(path).allocate_tensors()
