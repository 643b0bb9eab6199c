"""Layers with kernels, in ONNX files, against what they compute in Keras."""

import keras
import numpy as np
import pytest

from keras_policy_ext.stored_kernels import Axes
from onnx_files import bound, rounded, run_at_all_levels, store, values

# Frozen models (test_onnx_frozen.py) are written on every backend.
pytestmark = pytest.mark.any_backend

layers = keras.layers

GRANULARITIES = ("channel", "tensor", "block")
FIRST = "channels_first"


# Each with the shape of its inputs, the axes of them that share a scale, the
# axes of its kernel, and the numbers of terms of its sums.
CASES = {
    "dense": (
        lambda: layers.Dense(6),
        (10,),
        (-1,),
        Axes((0,), (1,)),
        10,
    ),
    "dense of many": (
        lambda: layers.Dense(130),
        (3, 300),
        (-1,),
        Axes((0,), (1,)),
        300,
    ),
    "dense without bias": (
        lambda: layers.Dense(6, use_bias=False),
        (4, 10),
        (-1,),
        Axes((0,), (1,)),
        10,
    ),
    "einsum": (
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 5)),
        (4, 10),
        (-1,),
        Axes((0,), (1, 2)),
        10,
    ),
    "einsum of two axes": (
        lambda: layers.EinsumDense("abcd,cde->abe", (None, 5), bias_axes="e"),
        (3, 2, 70),
        (-2, -1),
        Axes((0, 1), (2,)),
        140,
    ),
    "einsum with a batch": (
        lambda: layers.EinsumDense("abc,dcb->abd", (3, 5), bias_axes="d"),
        (3, 9),
        (-1,),
        Axes((1,), (0, 2)),
        9,
    ),
    "einsum with dots": (
        lambda: layers.EinsumDense("...x,xy->...y", 7, bias_axes="y"),
        (2, 3, 8),
        (-1,),
        Axes((0,), (1,)),
        8,
    ),
    "conv 1d": (
        lambda: layers.Conv1D(5, 3, strides=2, padding="same"),
        (11, 4),
        (1, 2),
        Axes((0, 1), (2,)),
        12,
    ),
    "conv 1d causal": (
        lambda: layers.Conv1D(5, 3, padding="causal", dilation_rate=2),
        (11, 4),
        (1, 2),
        Axes((0, 1), (2,)),
        12,
    ),
    "conv 1d of even size": (
        lambda: layers.Conv1D(5, 4, padding="same"),
        (11, 4),
        (1, 2),
        Axes((0, 1), (2,)),
        16,
    ),
    "conv 2d": (
        lambda: layers.Conv2D(6, (3, 2), strides=(1, 2), use_bias=False),
        (9, 8, 4),
        (1, 2, 3),
        Axes((0, 1, 2), (3,)),
        24,
    ),
    "conv 2d of many": (
        lambda: layers.Conv2D(130, 3, padding="same"),
        (5, 5, 20),
        (1, 2, 3),
        Axes((0, 1, 2), (3,)),
        180,
    ),
    "conv 2d of groups": (
        lambda: layers.Conv2D(6, 3, groups=2, strides=2, padding="same"),
        (7, 8, 4),
        (1, 2, 3),
        Axes((0, 1, 2), (3,)),
        18,
    ),
    "conv 2d dilated": (
        lambda: layers.Conv2D(4, 3, dilation_rate=2, padding="same"),
        (9, 8, 3),
        (1, 2, 3),
        Axes((0, 1, 2), (3,)),
        27,
    ),
    "conv 2d channels first": (
        lambda: layers.Conv2D(6, 3, data_format=FIRST),
        (3, 7, 8),
        (1, 2, 3),
        Axes((0, 1, 2), (3,)),
        27,
    ),
    "conv 2d transposed": (
        lambda: layers.Conv2DTranspose(130, (3, 2), strides=2, padding="same"),
        (4, 5, 3),
        (1, 2, 3),
        Axes((0, 1, 3), (2,)),
        18,
    ),
    "conv 3d": (
        lambda: layers.Conv3D(4, 2, strides=2, padding="same"),
        (5, 4, 6, 3),
        (1, 2, 3, 4),
        Axes((0, 1, 2, 3), (4,)),
        24,
    ),
}


def built(name):
    """A case: its layer, a model of it alone, and the rest."""
    make, shape, *rest = CASES[name]
    inputs = keras.Input(shape)
    layer = make()
    model = keras.Model(inputs, layer(inputs))
    rng = np.random.default_rng(7)
    layer.set_weights([values(rng, *w.shape) for w in layer.get_weights()])
    return layer, model, shape, *rest


def check(name, folder, granularity, activations, batch, **options):
    layer, model, shape, shared, axes, terms = built(name)
    x = values(np.random.default_rng(batch), batch, *shape)
    found = run_at_all_levels(
        model,
        folder,
        x,
        granularity=granularity,
        activations=activations,
        **options,
    )
    store(layer, axes, granularity, options.get("weights", "float8_e4m3fn"))
    if activations:
        x = rounded(x, shared)
    expected = keras.ops.convert_to_numpy(model(x))
    allowed = bound(layer, x, terms)
    for (outputs,) in found:
        assert outputs.shape == expected.shape
        assert np.all(np.abs(outputs - expected) <= allowed)


@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", CASES)
def test_file_computes_what_the_layer_does(
    name, granularity, activations, tmp_path
):
    batch = 7 if activations else 1
    check(name, tmp_path, granularity, activations, batch)


@pytest.mark.parametrize("opset", [19, 20, 21, 22, 23, 24, 25])
@pytest.mark.parametrize("name", ["dense of many", "einsum", "conv 2d"])
def test_every_opset_computes_the_same(name, opset, tmp_path):
    granularity = "channel" if opset < 21 else "block"
    check(name, tmp_path, granularity, "dynamic", 7, opset=opset)


@pytest.mark.parametrize("name", ["dense", "einsum", "conv 2d"])
def test_kernels_can_be_e5m2(name, tmp_path):
    check(name, tmp_path, "channel", None, 1, weights="float8_e5m2")


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("use_bias", [True, False])
def test_relu_before_rounded_inputs_stays(rank, use_bias, tmp_path):
    """An optimizer that takes rounding for clipping drops it."""
    inputs = keras.Input((10,) if rank == 2 else (4, 10))
    layer = layers.Dense(6, use_bias=use_bias)
    model = keras.Model(inputs, layer(layers.ReLU()(inputs)))
    x = values(np.random.default_rng(1), 7, *inputs.shape[1:])
    found = run_at_all_levels(model, tmp_path, x, activations="dynamic")
    store(layer, Axes((0,), (1,)))
    x = rounded(np.maximum(x, 0), (-1,))
    expected = keras.ops.convert_to_numpy(layer(x))
    for (outputs,) in found:
        assert np.all(np.abs(outputs - expected) <= bound(layer, x, 10))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_embeddings_are_looked_up_exactly(granularity, dtype, tmp_path):
    inputs = keras.Input((5,), dtype=dtype)
    layer = layers.Embedding(300, 9)
    model = keras.Model(inputs, layer(inputs))
    indices = np.random.default_rng(0).integers(0, 300, (7, 5)).astype(dtype)
    found = run_at_all_levels(model, tmp_path, indices, granularity=granularity)
    store(layer, Axes((1,), (0,)), granularity)
    expected = keras.ops.convert_to_numpy(model(indices))
    for (outputs,) in found:
        np.testing.assert_array_equal(outputs, expected)


def test_not_a_number_spoils_its_row_only(tmp_path):
    inputs = keras.Input((10,))
    model = keras.Model(inputs, layers.Dense(6)(inputs))
    x = values(np.random.default_rng(1), 7, 10)
    x[2, 3], x[4, 5] = np.nan, np.inf
    for (outputs,) in run_at_all_levels(
        model, tmp_path, x, activations="dynamic"
    ):
        assert np.isnan(outputs[[2, 4]]).all()
        assert np.isfinite(np.delete(outputs, [2, 4], axis=0)).all()
