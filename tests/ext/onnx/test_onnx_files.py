"""What is refused, and that a file is whole or not there."""

import importlib.util
import os

import keras
import numpy as np
import onnx
import pytest

from keras_policy_ext import stored_kernels
from keras_policy_ext.ext import onnx as onnx_export
from keras_policy_ext.ext.onnx import graph
from onnx_files import run

pytestmark = pytest.mark.any_backend

layers = keras.layers


def model_of(layer, shape=(6,)):
    x = keras.Input(shape)
    return keras.Model(x, layer(x))


def small_model():
    return keras.Sequential(
        [keras.Input((64,)), layers.Dense(64), layers.Dense(32)]
    )


class Doubled(layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs)


class Masked(layers.Dense):
    """A kernel of its own, in no method."""

    @property
    def kernel(self):
        return 2 * super().kernel


class Standardized(layers.Conv2D):
    """Computes with a function that was put into the layer."""

    def build(self, shape):
        super().build(shape)
        plain = self.convolution_op
        self.convolution_op = lambda x, kernel: plain(x, 2 * kernel)


class Configured(layers.Dense):
    """Changes nothing but what it is made of."""

    def __init__(self, units=3, **kwargs):
        super().__init__(units, **kwargs)


class OwnCall(keras.Model):
    def __init__(self):
        x = keras.Input((6,))
        super().__init__(x, layers.Dense(3)(x))

    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs)


REFUSED = {
    "another layer": (lambda: model_of(layers.Lambda(abs)), "Lambda"),
    "a layer in a model": (
        lambda: model_of(model_of(layers.Lambda(abs))),
        "'lambda",
    ),
    "another call": (lambda: model_of(Doubled(3)), "replaces 'call' of Dense"),
    "a kernel of its own": (lambda: model_of(Masked(3)), "'kernel' of Dense"),
    "a function in a layer": (
        lambda: model_of(Standardized(3, 2), (4, 4, 2)),
        "`convolution_op` was replaced on this instance",
    ),
    "no layer of ONNX, before its arguments": (
        lambda: model_of(layers.Resizing(4, 4), (2, 2, 3)),
        "Resizing 'resizing': ONNX files have no such layer",
    ),
    "a call of its own": (lambda: model_of(patched()), "replaces 'call'"),
    "training": (
        lambda: model_of(lambda x: layers.Dropout(0.5)(x, training=True)),
        "training=True",
    ),
    "training in a model": (
        lambda: model_of(
            lambda x: model_of(layers.Dropout(0.5))(x, training=True)
        ),
        "training=True",
    ),
    "padding of unknown width": (
        lambda: model_of(
            layers.Conv2D(4, 2, strides=3, padding="same"), (None, 9, 3)
        ),
        "stride is larger",
    ),
    "inputs by name": (
        lambda: model_of(lambda x: model_of(layers.ReLU())(inputs=x)),
        "inputs=",
    ),
    "an operation": (
        lambda: model_of(lambda x: keras.ops.roll(x, 1)),
        "Roll",
    ),
    "a function": (
        lambda: model_of(layers.Dense(3, activation=lambda x: x + 1)),
        "its activation is <lambda>",
    ),
    "a lambda": (lambda: model_of(layers.Lambda(lambda x: x)), "Lambda"),
    "a mask": (
        lambda: model_of(layers.Embedding(9, 3, mask_zero=True)),
        "mask_zero",
    ),
    "kernels of Keras": (lambda: quantized_by_keras(), "int8"),
    "another dtype": (
        lambda: model_of(lambda x: keras.ops.cast(x, "float16")),
        "float16",
    ),
}


def patched():
    layer = layers.ReLU()
    layer.call = lambda x: x
    return layer


def quantized_by_keras():
    model = model_of(layers.Dense(3))
    model.quantize("int8")
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_named(name, tmp_path):
    make, text = REFUSED[name]
    with pytest.raises(NotImplementedError) as caught:
        onnx_export.write(make(), tmp_path / "model.onnx")
    message = str(caught.value)
    assert text in message
    assert "Allowed: " in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "make",
    [
        OwnCall,
        lambda: keras.Sequential([layers.Dense(3)]),
        lambda: layers.Dense(3),
    ],
)
def test_models_without_a_graph_are_refused(make, tmp_path):
    with pytest.raises(ValueError, match="no graph"):
        onnx_export.write(make(), tmp_path / "model.onnx")


def test_allowed_layers_are_listed(tmp_path):
    with pytest.raises(NotImplementedError, match=r"Allowed: .*ZeroPadding3D"):
        onnx_export.write(REFUSED["a lambda"][0](), tmp_path / "m.onnx")


def test_subclass_that_computes_the_same_is_written(tmp_path):
    path = tmp_path / "model.onnx"
    onnx_export.write(model_of(Configured()), path)
    written = [node.op_type for node in onnx.load(path).graph.node]
    onnx_export.write(model_of(layers.Dense(3)), path, overwrite=True)
    assert written == [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize(
    "arguments",
    [
        {"weights": "float8_e4m3"},
        {"granularity": "row"},
        {"activations": "token"},
        {"opset": 18},
        {"opset": 26},
        {"opset": 20, "granularity": "block"},
    ],
)
def test_arguments_are_checked(arguments, tmp_path):
    name = next(iter(arguments))
    with pytest.raises(ValueError, match=f"Received: {name}=.*Allowed: "):
        onnx_export.write(small_model(), tmp_path / "m.onnx", **arguments)


def test_static_scales_are_those_of_frozen_layers(tmp_path):
    with pytest.raises(NotImplementedError, match="freeze"):
        onnx_export.write(
            small_model(), tmp_path / "m.onnx", activations="static"
        )


def test_onnx_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"keras-policy-ext\[export\]"):
        onnx_export.write(small_model(), tmp_path / "m.onnx")


def test_file_is_replaced_when_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    with pytest.raises(NotImplementedError):
        onnx_export.write(model_of(layers.Lambda(abs)), path, overwrite=True)
    assert path.read_bytes() == b"before"

    def fails(*args, **kwargs):
        raise onnx.checker.ValidationError("not valid")

    with monkeypatch.context() as patch:
        patch.setattr(onnx.checker, "check_model", fails)
        with pytest.raises(onnx.checker.ValidationError):
            onnx_export.write(small_model(), path, overwrite=True)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["model.onnx"]
    onnx_export.write(small_model(), path, overwrite=True)
    onnx.checker.check_model(str(path))
    assert os.listdir(tmp_path) == ["model.onnx"]


@pytest.mark.skipif(os.name != "posix", reason="no limit on sizes of files")
@pytest.mark.parametrize("size", [2000, 7000])
def test_a_full_disk_leaves_nothing(size, tmp_path):
    """The numbers come to 6144 bytes, and the file with all to more."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = small_model()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        with pytest.raises(OSError):
            onnx_export.write(model, tmp_path / "model.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("granularity", ["channel", "block"])
def test_numbers_that_are_too_many_lie_beside(
    granularity, tmp_path, monkeypatch
):
    model = small_model()
    x = np.random.default_rng(0).normal(size=(7, 64)).astype("float32")
    options = {"granularity": granularity}
    onnx_export.write(model, tmp_path / "one.onnx", **options)
    monkeypatch.setattr(graph, "INLINE_LIMIT", 1000)
    onnx_export.write(model, tmp_path / "two.onnx", **options)
    names = ["one.onnx", "two.onnx", "two.onnx.data"]
    assert sorted(os.listdir(tmp_path)) == names
    sizes = [os.path.getsize(tmp_path / name) for name in names]
    assert sizes[1] < 4000 < 6000 < sizes[2] < sizes[0] + 4 * 4096
    np.testing.assert_array_equal(
        *(run(tmp_path / name, x)[0] for name in names[:2])
    )


def test_numbers_beside_do_not_stay_without_their_model(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "INLINE_LIMIT", 1000)
    replace = os.replace

    def fails(source, target):
        if str(target).endswith(".onnx"):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="Input/output"):
        onnx_export.write(small_model(), tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_numbers_beside_replace_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "INLINE_LIMIT", 1000)
    onnx_export.write(small_model(), tmp_path / "m.onnx")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r"m\.onnx\.data"):
        onnx_export.write(small_model(), tmp_path / "m.onnx", overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_one_kernel_is_quantized_at_a_time(tmp_path, monkeypatch):
    """None of them is kept when the next one is read."""
    import gc
    import weakref

    alive = []
    real = stored_kernels.quantize

    def watched(*args, **named):
        gc.collect()
        assert not [each for each in alive if each() is not None]
        stored = real(*args, **named)
        if stored.codes.size > 1:
            alive.append(weakref.ref(stored))
        return stored

    monkeypatch.setattr(stored_kernels, "quantize", watched)
    onnx_export.write(small_model(), tmp_path / "m.onnx")
    assert len(alive) == 2


def test_equal_bytes_of_other_dtypes_are_other_initializers(tmp_path):
    numbers = graph.Initializers(tmp_path / "data")
    made = graph.OnnxGraph(numbers)
    codes = np.zeros(400, "uint8")
    names = [
        made.constant(codes.view("float32")).name,
        made.constant(codes.view("int32")).name,
        made.constant(np.zeros(100, "float32")).name,
        made.codes(codes, "float8_e4m3fn", "kernel").name,
        made.codes(codes, "float8_e5m2", "kernel").name,
    ]
    numbers.close()
    assert names[0] == names[2]
    assert len(set(names)) == len(numbers.tensors) == 4
