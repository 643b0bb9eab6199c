"""Whole models in ONNX files: graphs, names, axes, which kernels are stored."""

import keras
import numpy as np
import onnx
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import stored_kernels
from keras_policy_ext.ext import onnx as onnx_export
from keras_policy_ext.numerics import sqnr_db
from keras_policy_ext.stored_kernels import Axes
from onnx_files import bound, run, run_at_all_levels, store, values

layers = keras.layers
DENSE = Axes((0,), (1,))


def numbers(*shape):
    return np.random.default_rng(5).normal(size=shape).astype("float32")


def predicted(model, *inputs):
    inputs = list(inputs) if len(inputs) > 1 else inputs[0]
    return [
        keras.ops.convert_to_numpy(each)
        for each in keras.tree.flatten(model(inputs))
    ]


def store_all(model):
    """Give all layers in a model the numbers of their stored kernels."""
    for layer in model.layers:
        if hasattr(layer, "layers"):
            store_all(layer)
        elif isinstance(layer, layers.Dense):
            store(layer, DENSE)


def check(model, folder, *inputs):
    found = run_at_all_levels(model, folder, *inputs)
    store_all(model)
    expected = predicted(model, *inputs)
    for outputs in found:
        for a, b in zip(outputs, expected, strict=True):
            # Sums of at most 40 products, three layers deep.
            assert np.abs(a - b).max() <= 2.0**-17 * np.abs(b).max()
    return expected


def initializers(path):
    return {each.name: each for each in onnx.load(path).graph.initializer}


def float8_names(path):
    return {
        name
        for name, each in initializers(path).items()
        if each.data_type == onnx.TensorProto.FLOAT8E4M3FN
    }


def test_sequential_model(tmp_path):
    model = keras.Sequential(
        [keras.Input((10,)), layers.Dense(20, "relu"), layers.Dense(3)]
    )
    check(model, tmp_path, numbers(7, 10))
    (inputs,) = onnx.load(tmp_path / "model.onnx").graph.input
    assert inputs.name == model.inputs[0].name


def test_models_in_models_and_layers_called_twice(tmp_path):
    x = keras.Input((10,))
    shared = layers.Dense(10, "tanh")
    inner = keras.Model(x, [shared(x), layers.Dense(5)(shared(x))])
    deeper = keras.Sequential([layers.Dense(5), layers.ReLU()])
    y = keras.Input((10,), name="features")
    first, second = inner(shared(y))
    model = keras.Model(y, [layers.Add()([deeper(first), second]), first])
    check(model, tmp_path, numbers(7, 10))


def test_inputs_and_outputs_have_the_names_of_the_model(tmp_path):
    inputs = {name: keras.Input((4,), name=name) for name in ("b", "a")}
    total = layers.Add(name="total")([inputs["a"], inputs["b"]])
    model = keras.Model(inputs, {"sum": total, "same": inputs["a"]})
    path = tmp_path / "model.onnx"
    onnx_export.write(model, path)
    graph = onnx.load(path).graph
    feeds = {name: numbers(2, 4) * k for k, name in enumerate("ab", 1)}
    found = run(path, *(feeds[each.name] for each in graph.input))
    named = dict(zip((each.name for each in graph.output), found, strict=True))
    assert {each.name for each in graph.input} == {"a", "b"}
    np.testing.assert_array_equal(named["total"], feeds["a"] + feeds["b"])


def test_one_tensor_can_be_several_outputs(tmp_path):
    x = keras.Input((4,))
    y = layers.ReLU()(x)
    check(keras.Model(x, [y, y, x]), tmp_path, numbers(2, 4))


def test_unknown_axes_stay_unknown(tmp_path):
    x = keras.Input((None, 6), name="x")
    model = keras.Model(x, layers.Dense(3)(x))
    path = tmp_path / "model.onnx"
    onnx_export.write(model, path, activations="dynamic")
    shape = onnx.load(path).graph.input[0].type.tensor_type.shape
    assert [each.dim_param for each in shape.dim] == ["batch", "x_1", ""]
    for sizes in ((1, 1), (7, 9)):
        (found,) = run(path, numbers(*sizes, 6))
        assert found.shape == (*sizes, 3)


def test_kernels_have_one_byte_a_number(tmp_path):
    x = keras.Input((64,), name="x")
    model = keras.Model(x, layers.Dense(96, name="wide")(x))
    path = tmp_path / "model.onnx"
    onnx_export.write(model, path)
    kernel = initializers(path)["wide/kernel"]
    stored = stored_kernels.quantize(model.get_weights()[0], DENSE)
    assert kernel.raw_data == stored.codes.tobytes()
    assert list(kernel.dims) == [64, 96]


@pytest.mark.any_backend
def test_layers_that_are_called_twice_are_stored_once(tmp_path):
    x = keras.Input((64,), name="x")
    shared = layers.Dense(64, name="shared")
    onnx_export.write(keras.Model(x, shared(shared(x))), tmp_path / "m.onnx")
    assert float8_names(tmp_path / "m.onnx") == {"shared/kernel"}


def test_layers_that_are_left_out_stay_float32(tmp_path):
    x = keras.Input((6,), name="x")
    hidden = layers.Dense(8, name="hidden")(x)
    model = keras.Model(x, layers.Dense(3, name="last")(hidden))
    path = tmp_path / "model.onnx"
    onnx_export.write(model, path, exclude="last", activations="dynamic")
    assert float8_names(path) == {"hidden/kernel"}
    onnx_export.write(
        model, path, include="last", activations="dynamic", overwrite=True
    )
    assert float8_names(path) == {"last/kernel"}
    casts = [n for n in onnx.load(path).graph.node if n.op_type == "Cast"]
    assert {node.name.split("/")[0] for node in casts} == {"last"}


@pytest.mark.full
def test_all_layers_left_out_is_the_model_itself(tmp_path):
    x = keras.Input((6, 6, 3))
    y = layers.Conv2D(4, 3)(x)
    y = layers.EinsumDense("abcd,de->abce", (4, 4, 5))(y)
    y = layers.Dense(3)(layers.Flatten()(y))
    model = keras.Model(x, y)
    data = numbers(7, 6, 6, 3)
    (expected,) = predicted(model, data)
    for (found,) in run_at_all_levels(model, tmp_path, data, exclude=""):
        assert sqnr_db(expected, found) > 120


@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_files_compute_in_float32(name, tmp_path):
    x = keras.Input((10,))
    layer = layers.Dense(6, dtype=name)
    model = keras.Model(x, layer(x))
    data = values(np.random.default_rng(0), 7, 10)
    found = run_at_all_levels(model, tmp_path, data)
    wide = keras.layers.Dense(6)
    wide.build((None, 10))
    wide.set_weights(model.get_weights())
    store(wide, DENSE)
    expected = keras.ops.convert_to_numpy(wide(data))
    for (outputs,) in found:
        assert np.all(np.abs(outputs - expected) <= bound(wide, data, 10))


def test_layers_in_float8_are_written(tmp_path):
    x = keras.Input((16,))
    model = keras.Model(x, layers.Dense(32, name="dense")(x))
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    kpe.convert(model, "float8_from_float32")
    onnx_export.write(model, tmp_path / "float8.onnx")
    onnx_export.write(twin, tmp_path / "stock.onnx")
    a, b = (
        initializers(tmp_path / f"{name}.onnx")["dense/kernel"].raw_data
        for name in ("float8", "stock")
    )
    assert a == b


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dense", "einsum", "conv", "embedding"])
def test_adapters_are_added_to_the_kernel(kind, tmp_path):
    made = {
        "dense": (layers.Dense(8), (6,), DENSE),
        "einsum": (
            layers.EinsumDense("abc,cde->abde", (None, 2, 4)),
            (3, 6),
            Axes((0,), (1, 2)),
        ),
        "conv": (layers.Conv1D(8, 2), (5, 6), Axes((0, 1), (2,))),
        "embedding": (layers.Embedding(9, 6), (3,), Axes((1,), (0,))),
    }
    layer, shape, axes = made[kind]
    x = keras.Input(shape)
    model = keras.Model(x, layer(x))
    layer.enable_lora(2)
    rng = np.random.default_rng(0)
    for weight in layer.trainable_weights:
        if "lora" in weight.name:
            weight.assign(rng.normal(size=weight.shape))
    merged = layer.embeddings if kind == "embedding" else layer.kernel
    merged = keras.ops.convert_to_numpy(merged)
    onnx_export.write(model, tmp_path / "model.onnx")
    stored = stored_kernels.quantize(merged, axes).dequantized()
    data = rng.integers(0, 9, (7, *shape)).astype("float32")
    (found,) = run(tmp_path / "model.onnx", data)
    layer.lora_enabled = False
    layer.weights[0].assign(stored)
    (expected,) = predicted(model, data)
    # The merged kernel is one rounding off here and there: half an ulp of
    # e4m3fn at most, in few of its numbers.
    assert sqnr_db(expected, found) > 45


def test_calls_for_inference_are_written(tmp_path):
    x = keras.Input((6,))
    y = layers.Dropout(0.5)(x, training=False)
    onnx_export.write(keras.Model(x, y), tmp_path / "model.onnx")
    data = numbers(2, 6)
    (found,) = run(tmp_path / "model.onnx", data)
    np.testing.assert_array_equal(found, data)
