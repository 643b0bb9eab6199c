"""Where Keras asks for shapes and dtypes alone, nothing is quantized."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.contractions.operands import OperandUse

LAYERS = {
    "dense": (lambda: kpe.layers.Dense(7), (3, 11)),
    "einsum": (
        lambda: kpe.layers.EinsumDense("abc,cd->abd", (None, 7), "relu"),
        (3, 5, 11),
    ),
    "convolution": (lambda: kpe.layers.Conv1D(7, 2), (3, 9, 5)),
    "recurrent": (lambda: kpe.layers.GRU(7), (3, 4, 11)),
    "attention": (lambda: kpe.layers.MultiHeadAttention(2, 7), (3, 4, 11)),
}


class Inside(keras.layers.Layer):
    """A layer of which Keras knows no shape without a call."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, shape):
        attends = isinstance(self.inner, keras.layers.MultiHeadAttention)
        self.inner.build(*[shape] * (2 if attends else 1))

    def call(self, inputs):
        if isinstance(self.inner, keras.layers.MultiHeadAttention):
            return self.inner(inputs, inputs)
        return self.inner(inputs)


@pytest.fixture
def seen(monkeypatch):
    """The shapes of what is quantized."""
    found = []
    quantize = OperandUse.quantize

    def spy(use, home, amax, known, cast, *slot):
        def seen_cast(x, *arguments):
            found.append(tuple(x.shape))
            return cast(x, *arguments)

        return quantize(use, home, amax, known, seen_cast, *slot)

    monkeypatch.setattr(OperandUse, "quantize", spy)
    return found


@pytest.mark.slow_except("attention-current", "recurrent-block", "dense-nvfp4")
@pytest.mark.full_except(
    "convolution-delayed", "dense-delayed", "einsum-delayed"
)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "nvfp4"])
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_and_dtypes_are_those_of_a_call(seen, name, recipe):
    make, shape = LAYERS[name]
    with kpe.policy_scope(f"float8/{recipe}_from_mixed_bfloat16"):
        layer = Inside(make())
    symbolic = layer(keras.KerasTensor(shape))
    assert seen == []
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    outputs = layer(ops.convert_to_tensor(x))
    assert seen
    assert symbolic.shape == tuple(outputs.shape)
    assert symbolic.dtype == keras.backend.standardize_dtype(outputs.dtype)
