"""What people do with frozen models that other tests do not."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.policies.of_layers import is_frozen
from steps import normal


def dense_model():
    base = keras.layers.Dense(8, name="base")
    head = keras.layers.Dense(4, name="head")
    return keras.Sequential([keras.Input((8,)), base, head])


class Tied(keras.layers.Layer):
    """Multiplies with the weight of another layer, which it keeps."""

    def __init__(self, embedding):
        super().__init__(name="tied")
        self.embedding = embedding

    def build(self, shape):
        self.table = self.embedding.embeddings

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table))


def test_thaw_keeps_what_does_not_train():
    model = dense_model()
    base = model.get_layer("base")
    base.trainable = False
    kpe.freeze(model)
    kpe.thaw(model)
    trained = [weight.path for weight in model.trainable_weights]
    assert trained == [weight.path for weight in model.layers[1].weights]
    base.trainable = True
    assert len(model.trainable_weights) == 4


def test_thaw_after_transfer_does_not_train_the_base():
    base = dense_model()
    kpe.freeze(base)
    base.trainable = False
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(2)(base(inputs)))
    model.compile("sgd", "mse")
    model.fit(normal(4, 8), normal(4, 2), verbose=0)
    kpe.thaw(model)
    before = base.get_weights()
    model.fit(normal(4, 8), normal(4, 2), verbose=0)
    for old, new in zip(before, base.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_weight_of_two_layers_stays_one():
    ids = keras.Input((3,), dtype="int32")
    embedding = keras.layers.Embedding(11, 8, name="words")
    tied = Tied(embedding)
    hidden = keras.layers.Dense(8, name="hidden")
    model = keras.Model(ids, tied(hidden(embedding(ids))))
    report = kpe.freeze(model)
    assert is_frozen(hidden) and not is_frozen(embedding)
    assert tied.table is embedding.embeddings
    reasons = {each.path: each.reason for each in report.skipped}
    assert reasons["words"] == (
        "layer 'tied' holds its weight 'embeddings' too"
    )


def in_closure(embedding, x):
    table = embedding.embeddings
    name = {"name": "tied", "output_shape": (11,)}
    transposed = keras.ops.transpose
    return keras.layers.Lambda(lambda t: t @ transposed(table), **name)(x)


def in_default(embedding, x):
    def multiply(t, table=embedding.embeddings):
        return keras.ops.matmul(t, keras.ops.transpose(table))

    return keras.layers.Lambda(multiply, name="tied", output_shape=(11,))(x)


def in_global(embedding, x):
    scope = {"table": embedding.embeddings, "ops": keras.ops}
    multiply = eval("lambda t: ops.matmul(t, ops.transpose(table))", scope)
    return keras.layers.Lambda(multiply, name="tied", output_shape=(11,))(x)


def in_graph(embedding, x):
    return keras.ops.einsum("bth,vh->btv", x, embedding.embeddings)


@pytest.mark.parametrize("head", [in_closure, in_default, in_global, in_graph])
def test_a_weight_that_a_function_or_a_graph_holds_stays_too(head):
    """Made anew from a file they would multiply with codes."""
    ids = keras.Input((3,), dtype="int32")
    embedding = keras.layers.Embedding(11, 8, name="words")
    x = keras.layers.Dense(8, name="hidden")(embedding(ids))
    model = keras.Model(ids, head(embedding, x), name="model")
    report = kpe.freeze(model)
    assert not is_frozen(embedding)
    holder = "model" if head is in_graph else "tied"
    reasons = {each.path: each.reason for each in report.skipped}
    assert f"layer {holder!r} holds its weight" in reasons["words"]


@keras.saving.register_keras_serializable()
class Words(keras.Model):
    """Its head holds the table of the embedding, and is made anew with it."""

    def __init__(self, **kwargs):
        ids = keras.Input((3,), dtype="int32")
        embedding = keras.layers.Embedding(11, 8, name="words")
        x = keras.layers.Dense(8, name="hidden")(embedding(ids))
        super().__init__(ids, in_closure(embedding, x), **kwargs)

    def get_config(self):
        return {"name": self.name}


def test_a_weight_that_a_function_holds_is_one_in_a_loaded_model(tmp_path):
    model = Words()
    kpe.freeze(model)
    model.save(tmp_path / "words.keras")
    again = kpe.load_model(tmp_path / "words.keras")
    assert is_frozen(again.get_layer("hidden"))
    ids = np.array([[1, 2, 3]])
    np.testing.assert_array_equal(
        again.predict(ids, verbose=0), model.predict(ids, verbose=0)
    )


def test_spectral_normalization_keeps_the_kernel_that_it_divides():
    wrapper = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    model = keras.Sequential([keras.Input((8,)), wrapper])
    kpe.freeze(model)
    assert wrapper.kernel is wrapper.layer.kernel


@pytest.mark.parametrize("include", [None, "head"])
def test_what_is_not_frozen_is_converted(include):
    model = dense_model()
    kpe.freeze(model, exclude="head")
    report = kpe.convert(model, include=include)
    (converted,) = report.converted
    assert converted.path.endswith("head")
    assert is_frozen(model.get_layer("base"))


def test_loading_frozen_weights_names_the_ways(tmp_path):
    model = dense_model()
    kpe.freeze(model)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    with pytest.raises(ValueError, match=r"as_saved=True.*dequantize=True"):
        kpe.load_weights(dense_model(), path)


def test_thaw_is_a_public_name():
    assert "thaw" in dir(kpe)
