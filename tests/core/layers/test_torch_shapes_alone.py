"""PyTorch: on the device "meta", which has shapes alone, layers give shapes.

Keras asks for shapes there, and computes the whole model on ones of the real
device where that fails.
"""

import keras
import numpy as np
import pytest
from keras import layers

import keras_policy_ext as kpe
from keras_policy_ext import recipes

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="a device of PyTorch"
)

WIDTH = 32


def attention(cls, *args):
    class Attends(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = cls(*args)

        def build(self, shape):
            self.attention.build(shape, shape)

        def call(self, x):
            return self.attention(x, x)

        def compute_output_shape(self, shape):
            return shape

    return Attends()


class Projects(keras.layers.Layer):
    """Looks tokens up and multiplies with their table."""

    def __init__(self):
        super().__init__()
        self.table = layers.ReversibleEmbedding(WIDTH, WIDTH)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        return self.table(self.table(x[..., 0]), reverse=True)

    def compute_output_shape(self, shape):
        return shape


# A layer and the shape of a sample. Without GroupQueryAttention: that of Keras
# repeats heads, which Keras cannot do there (keras 3.15).
CASES = {
    "dense": (lambda: layers.Dense(WIDTH, activation="relu"), (8, WIDTH)),
    "einsum": (
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 16)),
        (8, WIDTH),
    ),
    "conv": (lambda: layers.Conv2D(WIDTH, 3), (8, 8, WIDTH)),
    "causal": (lambda: layers.Conv1D(8, 3, padding="causal"), (8, WIDTH)),
    "transposed": (lambda: layers.Conv1DTranspose(8, 3), (8, WIDTH)),
    "separable": (lambda: layers.SeparableConv1D(8, 3), (8, WIDTH)),
    "LSTM": (lambda: layers.LSTM(WIDTH), (8, WIDTH)),
    "GRU": (lambda: layers.GRU(WIDTH), (8, WIDTH)),
    "RNN": (lambda: layers.SimpleRNN(WIDTH), (8, WIDTH)),
    "attention": (
        lambda: attention(layers.MultiHeadAttention, 2, 16),
        (8, WIDTH),
    ),
    "table": (Projects, (8, 1)),
}


class Seen(keras.layers.Layer):
    """Notes on which devices it is called; what it returns, it does not say."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.devices = inner, []

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        y = self.inner(x)
        self.devices.append(y.device.type)
        return y


def shapes(model, seen, shape):
    """The devices on which a layer computes shapes, by both ways there."""
    seen.devices.clear()
    spec = seen.compute_output_spec(keras.KerasTensor((2, *shape)))
    with keras.device("meta"):
        outputs = model(keras.ops.ones((2, *shape)))
    assert tuple(outputs.shape) == tuple(spec.shape)
    return set(seen.devices)


BOTH = [(case, "delayed") for case in CASES]
BOTH += [("dense", recipe) for recipe in recipes.names()]
BOTH += [("attention", "mxfp8"), ("LSTM", "block")]


@pytest.mark.parametrize("case, recipe", BOTH)
def test_layers_in_float8_compute_shapes_alone(case, recipe):
    make, shape = CASES[case]
    seen = Seen(make())
    model = keras.Sequential([keras.Input(shape), seen])
    attends = "float8" if case == "attention" else None
    kpe.convert(model, recipe, attention=attends)
    assert shapes(model, seen, shape) == {"meta"}
    # The layer computes as before.
    model(np.ones((2, *shape), "float32"))
    assert seen.devices[-1] == "cpu"


@pytest.mark.parametrize(
    "options", [{"activations": "dynamic"}, {"granularity": "block"}]
)
@pytest.mark.parametrize("case", ["einsum", "conv", "LSTM", "table"])
def test_frozen_layers_compute_shapes_alone(case, options):
    make, shape = CASES[case]
    seen = Seen(make())
    model = keras.Sequential([keras.Input(shape), seen])
    kpe.freeze(model, **options)
    assert shapes(model, seen, shape) == {"meta"}


def test_fit_asks_for_shapes_alone():
    """A table of one row refuses the ones that Keras computes on."""
    ids, types = (keras.Input((6,), dtype="int32") for _ in range(2))
    h = layers.Dense(16)(layers.Embedding(50, 16)(ids))
    h = h + layers.Embedding(1, 16)(types)
    model = keras.Model([ids, types], layers.Dense(4)(h))
    model.compile("adam", "mse")
    kpe.convert(model)
    batch = [np.ones((4, 6), "int32"), np.zeros((4, 6), "int32")]
    model.fit(batch, np.zeros((4, 6, 4), "float32"), verbose=0)
