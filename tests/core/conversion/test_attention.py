"""Attention in models that are converted."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from small_models import LITTLE, POLICY
from steps import normal, numpy


def attending(flash_attention=None):
    inputs = keras.Input((4, 6))
    layer = keras.layers.MultiHeadAttention(
        2, 3, name="attention", flash_attention=flash_attention
    )
    return keras.Model(inputs, layer(inputs, inputs)), layer


@pytest.mark.full
def test_scores_and_weighted_sums_are_converted_on_request():
    model, layer = attending()
    x = normal(2, 4, 6)
    stock = numpy(model(x))
    report = kpe.convert(model, POLICY)
    assert [e.class_name for e in report.converted] == ["EinsumDense"] * 4
    assert layer.quantization_mode is None
    projections = numpy(model(x))
    kpe.revert(model)
    report = kpe.convert(model, POLICY, attention="float8")
    assert report.converted[-1].class_name == "MultiHeadAttention"
    assert layer.quantization_mode == "float8"
    assert not np.array_equal(numpy(model(x)), projections)
    kpe.revert(model)
    np.testing.assert_array_equal(numpy(model(x)), stock)
    kpe.convert(model, POLICY)
    np.testing.assert_array_equal(numpy(model(x)), projections)


def test_attention_stays_where_projections_do():
    model, layer = attending()
    with pytest.warns(UserWarning, match="`attention='float8'` had no effect"):
        kpe.convert(model, POLICY, exclude="query", attention="float8")
    assert layer.quantization_mode is None
    assert type(layer) is keras.layers.MultiHeadAttention
    with pytest.raises(ValueError, match=r"`attention` is neither .*'float16'"):
        kpe.convert(model, POLICY, attention="float16")


@pytest.mark.filterwarnings(LITTLE)
@pytest.mark.extension("gain")
def test_the_projection_of_an_embedding_is_its_one_product():
    for tie in (True, False):
        layer = keras.layers.ReversibleEmbedding(32, 16, tie_weights=tie)
        layer.build((None, 4))
        model = keras.Sequential([layer])
        model.build((None, 4))
        # 16 terms for each of 32 logits, once.
        small = kpe.filters.Auto(smallest=17)
        (left,) = kpe.convert(model, POLICY, filter=small).skipped
        assert "sums over 16 and yields 32" in left.reason
        kpe.convert(model, POLICY)
        (kernel,) = layer.float8_contracted
        assert kernel.name == ("embeddings" if tie else "reverse_embeddings")


@pytest.mark.parametrize(
    "rule, kept", [("other", True), (".*lstm_cell", False)]
)
@pytest.mark.extension("recurrent")
def test_a_composite_keeps_a_policy_that_says_what_its_layers_follow(
    rule, kept
):
    held = kpe.Float8DTypePolicy(
        "float32", rules=[(rule, "float8/2_from_float32")]
    )
    layer = keras.layers.LSTM(2, dtype=held)
    model = keras.Sequential([keras.Input((3, 4)), layer])
    kpe.convert(model, "delayed")
    assert layer.cell.float8_policy == kpe.Float8DTypePolicy("float32")
    assert (layer.dtype_policy == held) is kept


class OwnAttention(keras.layers.Layer):
    """Slices the probabilities, so that they are not recognised."""

    def __init__(self):
        super().__init__()
        self.query = keras.layers.Dense(6)

    def build(self, shape):
        self.query.build(shape)

    def call(self, x):
        query = self.query(x)
        scores = keras.ops.matmul(query, keras.ops.transpose(x, (0, 2, 1)))
        return keras.ops.matmul(keras.ops.softmax(scores)[:, :, 1:], x[:, 1:])


@pytest.mark.any_backend
@pytest.mark.parametrize("make", [OwnAttention, lambda: attending(True)[0]])
def test_attention_that_stays_as_it_is_is_said_to(make):
    model = make()
    if isinstance(model, OwnAttention):
        model = keras.Sequential([keras.Input((4, 6)), model])
    with pytest.warns(UserWarning, match="attention='float8'. had no effect"):
        report = kpe.convert(model, attention="float8")
    assert report.without_effect[0].startswith("`attention")
    assert "had no effect" in " ".join(str(report).split())
    assert not kpe.convert(model).without_effect


def test_flash_attention_is_chosen_again_after_revert():
    """Keras's default, None, lets it choose."""
    inputs = keras.Input((5, 8))
    layer = keras.layers.MultiHeadAttention(2, 4)
    model = keras.Model(inputs, layer(inputs, inputs))
    before = layer._flash_attention
    kpe.convert(model, "float8/current_from_float32", attention="float8")
    model(np.ones((2, 5, 8), "float32"))
    kpe.revert(model)
    assert layer._flash_attention is before
