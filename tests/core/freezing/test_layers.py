"""Frozen layers give what stock layers with the rounded weights give."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from frozen_models import (
    GRANULARITIES,
    JIT,
    float_twin,
    frozen_layers,
    outputs_of,
)
from steps import normal, numpy

BACKEND = keras.backend.backend()
LAYERS = keras.layers


@keras.saving.register_keras_serializable("test_frozen_layers")
class Twice(kpe.layers.Float8Mixin, keras.layers.Layer):
    """A user's layer with two kernels, one of which it reads transposed."""

    float8_kernels = ("up", "down")

    def build(self, input_shape):
        shape = (input_shape[-1], 5)
        self.up = self.add_weight(name="up", shape=shape)
        self.down = self.add_weight(name="down", shape=shape)
        self.table = self.add_weight(name="table", shape=shape)

    @classmethod
    def float8_axes(cls, layer, kernel):
        axes = ((1,), (0,)) if kernel.name == "down" else ((0,), (1,))
        return kpe.stored_kernels.Axes(*axes)

    def call(self, x):
        hidden = self.float8_matmul(x, self.up)
        return self.float8_einsum("...y,xy->...x", hidden, self.down)


def sequential(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers])


def attention(cls, *args, **kwargs):
    x = keras.Input((5, 8))
    y = keras.Input((3, 8))
    layer = cls(*args, **kwargs)
    return keras.Model([x, y], layer(x, y, y) if kwargs else layer(x, y))


def reversible(tie):
    ids = keras.Input((4,), dtype="int32")
    layer = LAYERS.ReversibleEmbedding(11, 6, tie_weights=tie)
    x = layer(ids)
    return keras.Model(ids, [x, layer(ops.tanh(x), reverse=True)])


def einsum(equation, shape, output_shape, **kwargs):
    return lambda: sequential(
        shape, LAYERS.EinsumDense(equation, output_shape, **kwargs)
    )


CONV = {"kernel": (0, 1)}
CONV2, CONV3 = {"kernel": (0, 1, 2)}, {"kernel": (0, 1, 2, 3)}
PROJECTIONS = {"kernel": (0,), "attention_output/kernel": (0, 1)}
CELL = {"kernel": (0,), "recurrent_kernel": (0,)}

CASES = {
    "dense": (
        lambda: sequential((6,), LAYERS.Dense(5, "relu", name="a")),
        {"kernel": (0,)},
    ),
    "dense of tokens": (
        lambda: sequential((3, 6), LAYERS.Dense(5, use_bias=False)),
        {"kernel": (0,)},
    ),
    "ab,bc->ac": (einsum("ab,bc->ac", (6,), 5), {"kernel": (0,)}),
    "abc,cde->abde": (
        einsum("abc,cde->abde", (3, 6), (None, 2, 4), bias_axes="de"),
        {"kernel": (0,)},
    ),
    "abde,dec->abc": (
        einsum("abde,dec->abc", (3, 2, 4), (None, 6), bias_axes="c"),
        {"kernel": (0, 1)},
    ),
    "abde,edc->abc": (
        einsum("abde,edc->abc", (3, 2, 4), (None, 6)),
        {"kernel": ((1, 0), (2,))},
    ),
    "abc,dec->abde": (
        einsum("abc,dec->abde", (3, 6), (None, 2, 4)),
        {"kernel": (2,)},
    ),
    "...x,xy->...y": (
        einsum("...x,xy->...y", (2, 3, 6), 5, bias_axes="y"),
        {"kernel": (0,)},
    ),
    "abc,bcd->abd": (
        einsum("abc,bcd->abd", (3, 6), (3, 5)),
        {"kernel": (1,)},
    ),
    "abc,dbc->abd": (
        einsum("abc,dbc->abd", (3, 6), (3, 5)),
        {"kernel": ((2,), (1, 0))},
    ),
    "conv1d": (lambda: sequential((9, 4), LAYERS.Conv1D(5, 3)), CONV),
    "conv1d causal": (
        lambda: sequential(
            (9, 4),
            LAYERS.Conv1D(
                5, 3, padding="causal", dilation_rate=2, activation="tanh"
            ),
        ),
        CONV,
    ),
    "conv2d": (
        lambda: sequential(
            (7, 8, 4), LAYERS.Conv2D(5, 3, strides=2, padding="same")
        ),
        CONV2,
    ),
    "conv2d groups": (
        lambda: sequential((7, 8, 4), LAYERS.Conv2D(6, (3, 1), groups=2)),
        CONV2,
    ),
    "conv2d dilated": (
        lambda: sequential((9, 8, 4), LAYERS.Conv2D(3, 2, dilation_rate=3)),
        CONV2,
    ),
    "conv3d": (
        lambda: sequential((4, 5, 4, 3), LAYERS.Conv3D(4, 2, padding="same")),
        CONV3,
    ),
    "conv2d transposed": (
        lambda: sequential(
            (4, 5, 3), LAYERS.Conv2DTranspose(5, 3, strides=2, padding="same")
        ),
        {"kernel": ((0, 1, 3), (2,))},
    ),
    "separable": (
        lambda: sequential((9, 4), LAYERS.SeparableConv1D(5, 3)),
        {"pointwise_kernel": (0, 1)},
    ),
    "multi head attention": (
        lambda: attention(LAYERS.MultiHeadAttention, 2, 4),
        PROJECTIONS,
    ),
    "grouped query attention": (
        lambda: attention(LAYERS.GroupQueryAttention, 4, 4, 2),
        PROJECTIONS,
    ),
    "lstm": (
        lambda: sequential((4, 6), LAYERS.LSTM(5, return_sequences=True)),
        CELL,
    ),
    "gru": (lambda: sequential((4, 6), LAYERS.GRU(5)), CELL),
    "gru before": (
        lambda: sequential((4, 6), LAYERS.GRU(5, reset_after=False)),
        CELL,
    ),
    "simple rnn": (lambda: sequential((4, 6), LAYERS.SimpleRNN(5)), CELL),
    "rnn of cells": (
        lambda: sequential(
            (4, 6), LAYERS.RNN([LAYERS.GRUCell(4), LAYERS.LSTMCell(3)])
        ),
        CELL,
    ),
    "bidirectional": (
        lambda: sequential((4, 6), LAYERS.Bidirectional(LAYERS.LSTM(3))),
        CELL,
    ),
    "time distributed": (
        lambda: sequential((4, 6), LAYERS.TimeDistributed(LAYERS.Dense(3))),
        {"kernel": (0,)},
    ),
    "embedding": (
        lambda: sequential((4,), LAYERS.Embedding(11, 6)),
        {"embeddings": (1,)},
    ),
    "reversible, tied": (lambda: reversible(True), {"embeddings": (1,)}),
    "reversible, not tied": (
        lambda: reversible(False),
        {"embeddings": (1,), "reverse_embeddings": (0,)},
    ),
    "a user's": (
        lambda: sequential((4, 6), Twice(name="twice")),
        {"up": (0,), "down": (1,)},
    ),
}
if BACKEND != "tensorflow":  # It has no such convolution on a CPU.
    CASES["conv2d channels first"] = (
        lambda: sequential(
            (4, 7, 8), LAYERS.Conv2D(5, 3, data_format="channels_first")
        ),
        CONV2,
    )

EVERYWHERE = (
    "dense",
    "abc,bcd->abd",
    "abde,edc->abc",
    "conv1d causal",
    "conv2d groups",
    "conv2d transposed",
    "multi head attention",
    "lstm",
    "embedding",
    "reversible, not tied",
    "a user's",
)


def inputs_of(model):
    """Inputs for a model: tokens where it takes integers."""
    rng = np.random.default_rng(3)
    found = []
    for each in model.inputs:
        shape = (3, *each.shape[1:])
        if "int" in each.dtype or "embedding" in model.layers[0].name:
            found.append(rng.integers(0, 11, shape).astype("int32"))
        else:
            found.append(rng.normal(size=shape).astype("float32"))
    return found if len(found) > 1 else found[0]


def all_outputs(model, x):
    y = model(x, training=False)
    return [numpy(each) for each in (y if isinstance(y, list) else [y])]


def made(kind):
    """A model with weights of many sizes, and its axes."""
    build, summed = CASES[kind]
    model = build()
    for n, variable in enumerate(model.weights):
        variable.assign(normal(*variable.shape, seed=n) * (1 + n))
    return model, summed


def assert_near(found, expected):
    """Equal up to the order of float32 sums of few terms."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        error = np.linalg.norm(one - other)
        assert error <= 2e-6 * np.linalg.norm(other)


@pytest.mark.full_except("abc,bcd->abd", "conv2d groups", "dense", "embedding")
@pytest.mark.parametrize("kind", mostly(list(CASES), *EVERYWHERE))
def test_a_frozen_layer_gives_what_its_rounded_weights_give(kind):
    model, summed = made(kind)
    twin = float_twin(CASES[kind][0], model, summed)
    x = inputs_of(model)
    expected = all_outputs(twin, x)
    exact = all_outputs(model, x)
    report = kpe.freeze(model)
    assert len(report.stored) == sum(
        v.path.endswith(tuple(summed)) for v in twin.weights
    )
    found = all_outputs(model, x)
    assert_near(found, expected)
    assert any(np.any(a != b) for a, b in zip(found, exact, strict=True))
    predicted = model.predict(x, verbose=0)
    predicted = predicted if isinstance(predicted, list) else [predicted]
    assert_near(predicted, expected)


@pytest.mark.full_except(
    "conv2d-block-float8_e4m3fn",
    "dense-block-float8_e5m2",
    "dense-tensor-float8_e4m3fn",
)
@pytest.mark.parametrize("weights", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    "kind", ["dense", "conv2d", "reversible, not tied", "lstm"]
)
def test_in_every_format_and_granularity(kind, granularity, weights):
    model, summed = made(kind)
    twin = float_twin(
        CASES[kind][0], model, summed, granularity, weights=weights
    )
    kpe.freeze(model, granularity=granularity, weights=weights)
    x = inputs_of(model)
    assert_near(all_outputs(model, x), all_outputs(twin, x))


LARGE = {
    "dense": (
        lambda: sequential((200,), LAYERS.Dense(150, name="a")),
        {"kernel": (0,)},
    ),
    "abde,edc->abc": (
        einsum("abde,edc->abc", (2, 20, 13), (None, 150)),
        {"kernel": ((1, 0), (2,))},
    ),
    "abc,ced->abde": (
        einsum("abc,ced->abde", (2, 140), (None, 20, 13)),
        {"kernel": ((0,), (2, 1))},
    ),
    "conv2d": (
        lambda: sequential((4, 4, 40), LAYERS.Conv2D(130, 2)),
        {"kernel": ((0, 1, 2), (3,))},
    ),
    "embedding": (
        lambda: sequential((4,), LAYERS.Embedding(140, 130)),
        {"embeddings": (1,)},
    ),
    "reversible": (
        lambda: sequential((4,), LAYERS.ReversibleEmbedding(140, 130)),
        {"embeddings": (1,)},
    ),
}


@pytest.mark.full_except("abde,edc->abc")
@pytest.mark.parametrize("kind", LARGE)
def test_blocks_are_those_of_outputs_by_inputs(kind):
    build, summed = LARGE[kind]
    model = build()
    for n, variable in enumerate(model.weights):
        spread = np.exp2(4 * normal(*variable.shape, seed=n + 9))
        variable.assign(normal(*variable.shape, seed=n) * spread)
    twin = float_twin(build, model, summed, "block")
    x = inputs_of(model)
    if "embedding" in kind or "reversible" in kind:
        x = np.array([[0, 127, 128, 139], [1, 130, 2, 64]], "int32")
    kpe.freeze(model, granularity="block")
    assert_near(all_outputs(model, x), all_outputs(twin, x))


@pytest.mark.parametrize("source", ["mixed_bfloat16", "bfloat16"])
def test_a_layer_in_bfloat16_widens_to_bfloat16(source):
    def build():
        return sequential((4, 6), LAYERS.Dense(5, dtype=source))

    model = build()
    kernel = normal(6, 5)
    model.layers[0]._kernel.assign(kernel)
    twin = float_twin(build, model, {"kernel": (0,)})
    kpe.freeze(model)
    x = normal(3, 4, 6)
    y = model(x)
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    # Equal but for the rounding of the products' sums to bfloat16.
    found, expected = outputs_of(model, x), outputs_of(twin, x)
    np.testing.assert_allclose(found, expected, rtol=2.0**-7, atol=2.0**-7)


def test_a_layer_in_float16_widens_to_float16():
    def build():
        return sequential((4, 6), LAYERS.Dense(5, dtype="mixed_float16"))

    model = build()
    twin = float_twin(build, model, {"kernel": (0,)})
    kpe.freeze(model)
    x = normal(3, 4, 6)
    assert keras.backend.standardize_dtype(model(x).dtype) == "float16"
    found, expected = outputs_of(model, x), outputs_of(twin, x)
    np.testing.assert_allclose(found, expected, rtol=2.0**-10, atol=2.0**-10)


def test_an_empty_batch_gives_empty_outputs():
    model = sequential((6,), LAYERS.Dense(5), LAYERS.Dense(3))
    for activations in (None, "dynamic"):
        frozen = keras.models.clone_model(model)
        kpe.freeze(frozen, activations=activations)
        assert outputs_of(frozen, np.zeros((0, 6), "float32")).shape == (0, 3)


def test_a_compiled_predict_gives_what_a_call_gives():
    model = sequential((6,), LAYERS.Dense(5, "tanh"), LAYERS.Dense(3))
    kpe.freeze(model, granularity="tensor")
    model.compile(jit_compile=JIT)
    x = normal(40, 6)
    assert_near([model.predict(x, verbose=0)], [outputs_of(model, x)])


def test_a_layer_that_reads_inputs_of_another_rank():
    layer = LAYERS.Dense(5)
    layer.build((None, None, 6))
    kpe.freeze(layer)
    x = normal(2, 3, 4, 6)
    whole = numpy(layer(x))
    assert whole.shape == (2, 3, 4, 5)
    for n in range(2):
        np.testing.assert_allclose(numpy(layer(x[n])), whole[n], rtol=1e-5)


def test_each_frozen_layer_reports_float8_and_its_recipe():
    model = sequential((6,), LAYERS.Dense(5), LAYERS.Dense(3))
    kpe.freeze(model, granularity="tensor", activations="dynamic")
    for layer in model.layers:
        assert layer.quantization_mode == "float8"
        recipe = layer.float8_policy.recipe
        assert (recipe.per, recipe.activations) == ("tensor", "dynamic")
        assert type(layer._kernel.path) is str
        stored = layer._kernel.stored
        assert stored.granularity == "tensor"
        assert tuple(stored.axes) == ((0,), (1,))
    assert frozen_layers(model) == model.layers
