"""Multiplications and parameters of layers, against those worked out here."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_policy_ext as kpe
from keras_policy_ext.conversion.work import work_of

JIT = keras.backend.backend() == "jax"


class Own(kpe.layers.Float8Mixin, keras.layers.Layer):
    """Two products; what they give together has none of their sizes."""

    def build(self, input_shape):
        size = input_shape[-1]
        self.up = self.add_weight(shape=(size, 8), name="up")
        self.down = self.add_weight(shape=(8, size), name="down")
        self.kept = self.add_weight(shape=(size, 8), name="kept", float8=False)

    def call(self, x):
        x = self.float8_matmul(self.float8_matmul(x, self.up), self.down)
        return ops.sum(x, axis=-1)


class Foreign(keras.layers.Layer):
    """No float8 form; a kernel, and weights that multiply nothing."""

    def build(self, input_shape):
        size = input_shape[-1]
        self.kernel = self.add_weight(shape=(size, 2), name="weight")
        self.scale = self.add_weight(shape=(1, size), name="scale")
        shape = (input_shape[1] or 1, size)
        for name in ("position_embedding", "pos_embed"):
            self.places = self.add_weight(shape=shape, name=name)
        for name in ("cos_cached", "weight"):
            self.add_weight(shape=shape, name=name, trainable=False)

    def call(self, x):
        return (x * self.scale + self.places) @ self.kernel


class Blurred(keras.layers.Layer):
    """A kernel that does not train."""

    def build(self, input_shape):
        shape = (input_shape[-1], 2)
        self.filter = self.add_weight(
            shape=shape, name="blur_filter", trainable=False
        )

    def call(self, x):
        return x @ self.filter


class Other(keras.layers.Dense):
    """Computes something else than `Dense`, and so stays."""

    def call(self, x):
        return ops.tanh(x @ self.kernel)


class Failing(keras.layers.Layer):
    """Cannot say what comes out of it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 7, 3))
        self.mix = self.add_weight(shape=(3, 3), name="mix")

    def call(self, x):
        return self.dense(x @ self.mix)

    def compute_output_shape(self, *args, **kwargs):
        raise RuntimeError("not now")

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:-1], 2), dtype=x.dtype)


# A layer, the shape of one sample, entries of its kernels, and how often each
# entry is multiplied with something.
CASES = {
    "dense": (lambda: layers.Dense(5), (3,), 3 * 5, 1),
    "dense of several rows": (lambda: layers.Dense(5), (7, 2, 3), 15, 14),
    "einsum": (
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3)),
        *((7, 4), 4 * 2 * 3, 7),
    ),
    "einsum with an ellipsis": (
        lambda: layers.EinsumDense("...x,xy->...y", 5),
        *((7, 2, 3), 15, 14),
    ),
    "einsum with a kernel for each position": (
        lambda: layers.EinsumDense("abc,bcd->abd", (5, 3)),
        *((5, 4), 5 * 4 * 3, 1),
    ),
    "einsum that changes the order": (
        lambda: layers.EinsumDense("abc,cd->adb", (3, 7)),
        *((7, 4), 12, 7),
    ),
    "convolution with strides": (
        lambda: layers.Conv2D(4, 3, strides=2, padding="same"),
        *((8, 8, 3), 3 * 3 * 3 * 4, 4 * 4),
    ),
    "convolution in groups": (
        lambda: layers.Conv2D(4, 1, groups=2),
        *((2, 2, 6), 3 * 4, 4),
    ),
    "causal convolution": (
        lambda: layers.Conv1D(4, 3, padding="causal"),
        *((8, 2), 24, 8),
    ),
    "convolution with channels first": (
        lambda: layers.Conv2D(4, 3, data_format="channels_first"),
        *((3, 8, 7), 108, 6 * 5),
    ),
    "convolution in three dimensions": (
        lambda: layers.Conv3D(2, 2),
        *((3, 4, 5, 1), 8 * 2, 2 * 3 * 4),
    ),
    "LSTM": (lambda: layers.LSTM(4), (6, 3), (3 + 4) * 16, 6),
    "GRU": (lambda: layers.GRU(4, reset_after=False), (6, 3), 7 * 12, 6),
    "both directions": (
        lambda: layers.Bidirectional(layers.SimpleRNN(4)),
        *((6, 3), 2 * (3 + 4) * 4, 6),
    ),
    "stacked cells": (
        lambda: layers.RNN([layers.LSTMCell(2), layers.GRUCell(2)]),
        *((6, 3), (3 + 2) * 8 + (2 + 2) * 6, 6),
    ),
    "time steps": (
        lambda: layers.TimeDistributed(layers.Conv1D(2, 2)),
        *((3, 5, 4), 16, 3 * 4),
    ),
    "time steps of time steps": (
        lambda: layers.TimeDistributed(layers.LSTM(4)),
        *((5, 6, 3), 7 * 16, 5 * 6),
    ),
    "depthwise": (
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
        *((5, 5, 2), 36, 9),
    ),
    "separable": (
        lambda: layers.SeparableConv1D(4, 3),
        *((8, 2), 3 * 2 + 2 * 4, 6),
    ),
    "transposed": (
        lambda: layers.Conv1DTranspose(4, 3, strides=2),
        *((8, 2), 24, 8),
    ),
    "convolutional LSTM": (
        lambda: layers.ConvLSTM1D(2, 3),
        *((4, 8, 3), 3 * 3 * 8 + 3 * 2 * 8, 4 * 6),
    ),
    "a user's layer with the mixin": (Own, (7, 3), 2 * 24, 7),
    "a user's layer without it": (Foreign, (7, 3), 6, 7),
    "a user's layer that does not train": (Blurred, (7, 3), 6, 7),
    "a user's Dense": (lambda: Other(5), (7, 3), 15, 7),
}


@pytest.mark.filterwarnings("ignore:None of the multiplications")
@pytest.mark.any_backend
@pytest.mark.parametrize("case", CASES)
def test_layers_multiply_as_often_as_their_sizes_say(case):
    make, shape, parameters, rows = CASES[case]
    model = keras.Sequential([keras.Input(shape), make()])
    before = kpe.inspect(model).layers
    report = kpe.convert(model)
    entries = [*report.converted, *report.skipped]
    for counted in (entries, before, kpe.inspect(model).layers):
        multiplying = [e for e in counted if e.multiplications]
        assert sum(e.parameters for e in multiplying) == parameters
        assert sum(e.multiplications for e in counted) == parameters * rows
        assert all(e.sizes_known for e in counted)


MULTIPLYING_NOTHING = {
    "Embedding": (lambda: layers.Embedding(9, 4), (5,)),
    "BatchNormalization": (layers.BatchNormalization, (5, 3)),
    "LayerNormalization": (lambda: layers.LayerNormalization((1, 2)), (5, 3)),
    "PReLU": (layers.PReLU, (5, 3)),
}


@pytest.mark.parametrize("case", MULTIPLYING_NOTHING)
def test_layers_without_a_kernel_multiply_nothing(case):
    make, shape = MULTIPLYING_NOTHING[case]
    model = keras.Sequential([keras.Input(shape), make()])
    (entry,) = kpe.inspect(model).layers
    assert (entry.multiplications, entry.sizes_known) == (0, True)
    assert entry.parameters == model.count_params()


def test_attention_multiplies_in_its_four_projections():
    inputs = keras.Input((5, 8))
    outputs = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    report = kpe.convert(keras.Model(inputs, outputs))
    counts = [(e.parameters, e.multiplications) for e in report.converted]
    assert counts == [(8 * 6, 8 * 6 * 5)] * 4


@pytest.mark.parametrize("tie", [True, False])
def test_an_embedding_multiplies_where_it_projects(tie):
    tokens = keras.Input((5,), dtype="int32")
    embedding = layers.ReversibleEmbedding(32, 4, tie_weights=tie)
    logits = embedding(layers.Dense(4)(embedding(tokens)), reverse=True)
    report = kpe.convert(keras.Model(tokens, logits))
    counts = {e.class_name: e.multiplications for e in report.converted}
    assert counts == {"ReversibleEmbedding": 5 * 32 * 4, "Dense": 5 * 4 * 4}


def test_a_layer_that_is_used_twice_counts_twice():
    shared = layers.Dense(3)
    inner_inputs = keras.Input((3,))
    tower = keras.Model(inner_inputs, shared(shared(inner_inputs)))
    first, second = keras.Input((3,)), keras.Input((3,))
    x = layers.Concatenate()([tower(first), tower(second)])
    model = keras.Model([first, second], layers.Dense(2)(x))
    counts = [e.multiplications for e in kpe.convert(model).converted]
    assert sorted(counts) == sorted([2 * 2 * 3 * 3, 6 * 2])


def test_a_quantized_layer_multiplies_as_before():
    model = keras.Sequential([keras.Input((7, 3)), layers.Dense(5)])
    model.quantize("int8")
    (entry,) = kpe.inspect(model).layers
    assert (entry.parameters, entry.multiplications) == (15, 105)


@pytest.mark.parametrize("shape", [(None, 3), (None, None, 3)])
def test_sizes_that_are_none_count_as_one_and_are_said_to(shape):
    model = keras.Sequential([keras.Input(shape), layers.Dense(5)])
    report = kpe.convert(model)
    (entry,) = report.converted
    assert (entry.multiplications, entry.sizes_known) == (15, False)
    for text in (str(report), report.table(full=True), str(kpe.inspect(model))):
        assert "not known" in text


def test_sound_of_unknown_length_is_long_enough_for_its_convolution():
    kernel = keras.Variable(np.ones((4, 8), "float32"))
    model = keras.Sequential(
        [
            keras.Input((None, 1)),
            layers.Conv1D(4, 127, strides=64),
            layers.Lambda(lambda x: ops.matmul(x, kernel)),
        ]
    )
    totals = kpe.convert(model).totals
    assert not totals.sizes_known
    # Of each position 127 numbers, and then 8, make 4.
    share = totals.multiplications_in_float8 / totals.multiplications
    assert share == 127 / (127 + 8)


def test_layers_whose_shapes_nobody_knows_count_once_and_nothing_fails():
    layer = Failing()
    layer.built = True
    report = kpe.convert(layer)
    (dense,) = report.converted
    (own,) = report.skipped
    assert (dense.multiplications, dense.sizes_known) == (7 * 6, False)
    assert (own.multiplications, own.sizes_known) == (9, False)


@pytest.mark.filterwarnings("ignore:None of the multiplications")
def test_the_arithmetic_of_another_library_is_counted():
    backend = keras.backend.backend()
    if backend == "tensorflow":
        pytest.skip("Keras wraps modules of torch and functions of JAX only")
    if backend == "torch":
        import torch

        layer = layers.TorchModuleWrapper(torch.nn.Linear(3, 5))
    else:
        # Given parameters, and no `init_fn`: Keras traces that one with a
        # helper that asks TensorFlow whether it is inside a function.
        layer = layers.JaxLayer(
            lambda params, inputs: inputs @ params["weight"],
            params={"weight": np.ones((3, 5), "float32")},
        )
    layer(np.ones((2, 7, 3), "float32"))
    (entry,) = kpe.convert(layer).skipped
    # Keras records no shape for a layer that holds a module.
    expected = (15, False) if backend == "torch" else (105, True)
    assert (entry.multiplications, entry.sizes_known) == expected


def test_attributes_that_were_changed_afterwards_do_not_fail():
    model = keras.Sequential([keras.Input((8, 2)), layers.Conv1D(4, 3)])
    model.layers[0].kernel_size = (30,)
    found = work_of(model).of(model.layers[0])
    assert found.multiplications == found.parameters
    assert not found.sizes_known


def test_shapes_of_a_batch_that_was_seen_are_those_of_a_sample():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(5)

        def call(self, x):
            return self.dense(x)

    model = Model()
    model(np.zeros((4, 7, 3), "float32"))
    (entry,) = kpe.convert(model).converted
    assert (entry.multiplications, entry.sizes_known) == (105, True)
