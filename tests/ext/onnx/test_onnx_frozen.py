"""Frozen models in ONNX files, against what they predict."""

import keras
import numpy as np
import onnx
import pytest

import keras_policy_ext as kpe
from cases import mostly
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.numerics import sqnr_db
from onnx_files import UNIT, rounded, run_at_all_levels, values

layers = keras.layers

# Each with the shape of its inputs, the axes of them that share a scale, and
# the numbers of terms of its sums.
CASES = {
    "dense": (lambda: layers.Dense(6), (140,), -1, 140),
    "dense 3d": (lambda: layers.Dense(6, use_bias=False), (3, 10), -1, 10),
    "einsum": (
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 5)),
        (4, 140),
        -1,
        140,
    ),
    "einsum of two axes": (
        lambda: layers.EinsumDense("abcd,dce->abe", (None, 5), bias_axes="e"),
        (3, 2, 70),
        (-2, -1),
        140,
    ),
    "einsum that turns": (
        lambda: layers.EinsumDense("abc,ced->adbe", (2, None, 5)),
        (4, 10),
        -1,
        10,
    ),
    "einsum of alone axes": (
        lambda: layers.EinsumDense("abcd,de->ace", (2, 5)),
        (3, 2, 10),
        (1, 3),
        30,
    ),
    "einsum that sums nothing": (
        lambda: layers.EinsumDense("abc,bc->abc", (3, 5), bias_axes="c"),
        (3, 5),
        (),
        1,
    ),
    "conv 1d": (
        lambda: layers.Conv1D(5, 3, padding="causal"),
        (11, 4),
        (1, 2),
        12,
    ),
    "conv 2d": (
        lambda: layers.Conv2D(6, 3, strides=2, padding="same"),
        (9, 8, 20),
        (1, 2, 3),
        180,
    ),
    "conv 2d transposed": (
        lambda: layers.Conv2DTranspose(6, 3, strides=2, padding="same"),
        (5, 4, 20),
        (1, 2, 3),
        180,
    ),
}


def frozen(name, granularity, activations):
    """A frozen model of one layer, and how its inputs are scaled."""
    make, shape, shared, terms = CASES[name]
    x = keras.Input(shape)
    layer = make()
    model = keras.Model(x, layer(x))
    rng = np.random.default_rng(7)
    layer.set_weights([values(rng, *w.shape) for w in layer.get_weights()])
    scale = None
    if activations == "static":
        kpe.convert(model, "float8/delayed_from_float32")
        kpe.calibrate(model, [values(rng, 7, *shape)])
    kpe.freeze(model, granularity=granularity, activations=activations)
    if activations == "static":
        (variable,) = stored_weights.stored_in(layer)
        scale = np.float32(keras.ops.convert_to_numpy(variable.inputs_scale))
    return model, shape, shared, terms, scale


def sums_of_magnitudes(model, x):
    """What a model of one layer yields without signs; it is spent then."""
    kpe.thaw(model)
    for weight in model.weights:
        weight.assign(keras.ops.absolute(weight))
    return keras.ops.convert_to_numpy(model(np.abs(x)))


@pytest.mark.full_except("einsum that turns-channel-dynamic")
@pytest.mark.parametrize("activations", [None, "dynamic", "static"])
@pytest.mark.parametrize(
    "granularity", mostly(["channel", "tensor", "block"], "channel", "block")
)
@pytest.mark.parametrize(
    "name", mostly(CASES, "dense", "einsum that turns", "conv 2d")
)
@pytest.mark.slow_except(
    "dense-block-None",
    "conv 2d-block-None",
    "dense-channel-dynamic",
    "einsum that turns-block-dynamic",
    "conv 2d-channel-dynamic",
    "conv 2d-block-static",
)
def test_file_predicts_what_the_frozen_model_does(
    name, granularity, activations, tmp_path
):
    model, shape, shared, terms, scale = frozen(name, granularity, activations)
    # Larger than any that was seen: static scales saturate.
    x = 3 * values(np.random.default_rng(1), 7, *shape)
    found = run_at_all_levels(model, tmp_path, x)
    expected = model.predict(x, verbose=0)
    if activations:
        x = rounded(x, shared, scale)
    # The two sums round otherwise: Higham, Accuracy and Stability, 3.5.
    allowed = 2 * (terms + 2) * UNIT * sums_of_magnitudes(model, x)
    for (outputs,) in found:
        assert np.all(np.abs(outputs - expected) <= allowed)


@pytest.mark.full
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("use_bias", [True, False])
def test_relu_before_static_scales_stays(rank, use_bias, tmp_path):
    """An optimizer that takes rounding for clipping drops it."""
    x = keras.Input((10,) if rank == 2 else (4, 10))
    y = layers.Dense(6, use_bias=use_bias)(layers.ReLU()(x))
    model = keras.Model(x, y)
    data = values(np.random.default_rng(1), 7, *x.shape[1:])
    kpe.convert(model, "float8/delayed_from_float32")
    kpe.calibrate(model, [data])
    kpe.freeze(model, activations="static")
    expected = model.predict(data, verbose=0)
    for (outputs,) in run_at_all_levels(model, tmp_path, data):
        # Sums of ten products; a Relu that is gone costs all.
        assert sqnr_db(expected, outputs) > 120


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
def test_frozen_embeddings_are_looked_up_exactly(granularity, tmp_path):
    x = keras.Input((5,), dtype="int32")
    model = keras.Model(x, layers.Embedding(300, 140)(x))
    kpe.freeze(model, granularity=granularity)
    indices = np.random.default_rng(0).integers(0, 300, (7, 5), "int32")
    expected = model.predict(indices, verbose=0)
    for (outputs,) in run_at_all_levels(model, tmp_path, indices):
        np.testing.assert_array_equal(outputs, expected)


@pytest.mark.full
@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.slow_except()
def test_deep_models_differ_by_flipped_roundings_only(activations, tmp_path):
    x = keras.Input((8, 8, 3))
    y = layers.Conv2D(8, 3, activation="relu", padding="same")(x)
    y = layers.BatchNormalization()(y)
    y = layers.Reshape((64, 8))(layers.MaxPooling2D(1)(y))
    y = layers.LayerNormalization()(layers.Dense(32, "gelu")(y))
    y = layers.EinsumDense("abc,cd->abd", (None, 10))(y)
    model = keras.Model(x, y)
    kpe.freeze(model, activations=activations)
    data = values(np.random.default_rng(1), 7, 8, 8, 3)
    expected = model.predict(data, verbose=0)
    for (outputs,) in run_at_all_levels(model, tmp_path, data):
        examples = [
            sqnr_db(a, b) for a, b in zip(expected, outputs, strict=True)
        ]
        tokens = zip(
            expected.reshape(-1, 10), outputs.reshape(-1, 10), strict=True
        )
        median = np.median([sqnr_db(a, b) for a, b in tokens])
        assert median > 100
        assert min(examples) > (100 if activations is None else 30)


def test_adapters_on_a_frozen_kernel_are_added(tmp_path):
    x = keras.Input((16,))
    layer = layers.Dense(8)
    model = keras.Model(x, layer(x))
    kpe.freeze(model)
    layer.enable_lora(2)
    rng = np.random.default_rng(0)
    layer.lora_kernel_b.assign(rng.normal(size=(2, 8)))
    data = values(rng, 7, 16)
    expected = model.predict(data, verbose=0)
    for (outputs,) in run_at_all_levels(model, tmp_path, data):
        # The sum is rounded to e4m3fn again: 3 bits behind the first one.
        assert 25 < sqnr_db(expected, outputs) < 60


def test_frozen_kernels_that_are_left_out_are_dequantized(tmp_path):
    x = keras.Input((16,))
    model = keras.Model(x, layers.Dense(8, name="dense")(x))
    kpe.freeze(model, activations="dynamic")
    path = tmp_path / "model.onnx"
    kpe.export(model, path, format="onnx", exclude="dense")
    tensors = {each.name: each for each in onnx.load(path).graph.initializer}
    kernel = onnx.numpy_helper.to_array(tensors["dense/kernel"])
    (variable,) = stored_weights.stored_in(model.layers[-1])
    np.testing.assert_array_equal(kernel, variable.stored.dequantized())
    assert "Cast" not in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.any_backend
def test_report_says_what_is_in_float(tmp_path):
    x = keras.Input((64,))
    y = layers.Dense(64, name="first")(x)
    model = keras.Model(x, layers.Dense(3, name="last")(y))
    report = kpe.export(
        model, tmp_path / "m.onnx", format="onnx", exclude="last"
    )
    written = {each.path: each for each in report.weights}
    assert written["first/kernel"].dtype == "float8_e4m3fn"
    assert written["first/kernel"].nbytes == 64 * 64 + 64 * 4
    assert "exclude" in written["last/kernel"].reason
    assert written["last/bias"].dtype == "float32"
    assert "onnx" in str(report)
