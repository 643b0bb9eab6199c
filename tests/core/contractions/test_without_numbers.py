"""Operands without numbers: what stock Keras gives, forward and backward."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_policy_ext as kpe
from steps import gradients, numpy, weights_of
from ways import BACKEND

RECIPES = ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"]

CASES = {
    "no_features": (lambda: layers.Dense(4, bias_initializer="ones"), (3, 0)),
    "no_examples": (lambda: layers.Dense(4), (0, 8)),
    "no_positions": (lambda: layers.Dense(4), (2, 0, 8)),
    "einsum_no_features": (
        lambda: layers.EinsumDense("abc,cd->abd", (None, 4)),
        (2, 3, 0),
    ),
    "einsum_no_columns": (
        lambda: layers.EinsumDense("abc,cde->abde", (None, 0, 4)),
        (2, 3, 8),
    ),
    "bank_no_rows": (
        lambda: layers.EinsumDense("eti,eio->eto", (0, 4)),
        (3, 0, 8),
    ),
}


class Attention(keras.Model):
    """Attention of a batch to `keys`."""

    def __init__(self, queries, keys):
        super().__init__()
        self.keys = np.ones((2, keys, 8), "float32")
        self.attention = layers.MultiHeadAttention(2, 4)
        self.attention.build((2, queries, 8), (2, keys, 8))
        self.built = True

    def call(self, x, training=None):
        return self.attention(x, ops.convert_to_tensor(self.keys))


ATTENTION = {"no_queries": (0, 3), "no_keys": (3, 0)}


def results(model, shape, training=True):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    y, _, grads = gradients(model, x, lambda y: ops.sum(y * y), training)
    kernels = zip(model.trainable_variables, grads, strict=True)
    states = {id(v) for v in model.trainable_variables} - {
        id(v) for v in weights_of(model)
    }
    grads = [g for v, g in kernels if id(v) not in states]
    return [numpy(y)] + [None if g is None else numpy(g) for g in grads]


def assert_near(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        # None is a gradient of zeros: the framework saw no use.
        one, two = (0.0 if each is None else each for each in (one, two))
        size = np.abs(two).max(initial=1.0)
        np.testing.assert_allclose(one, two, atol=0.2 * size)


def pair(make, recipe, shape, **how):
    """Results of the stock layer, and of the converted one."""
    found = []
    for each in (None, recipe):
        keras.utils.set_random_seed(0)
        model = make()
        if not model.built:
            model.build(shape)
        if each is not None:
            kpe.convert(model, each, **how)
        found.append(results(model, shape))
    return found


@pytest.mark.full_except("nvfp4-no_features", "rowwise-no_features")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_without_numbers_is_that_of_stock_keras(recipe, case):
    make, shape = CASES[case]
    if case == "einsum_no_columns" and BACKEND == "tensorflow":
        pytest.skip("stock Keras loses the axis of the batch (TF 2.21)")
    stock, found = pair(make, recipe, shape)
    assert_near(found, stock)


@pytest.mark.full
@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_without_queries_or_keys_is_that_of_stock_keras(recipe, case):
    queries, keys = ATTENTION[case]

    def make():
        return Attention(queries, keys)

    shape = (2, queries, 8)
    stock, found = pair(make, recipe, shape, attention="float8")
    assert_near(found, stock)


@pytest.mark.extension("count")
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_a_converted_layer_without_numbers_is_not_said_to_be_unchanged(
    recipe, recwarn
):
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(4)(inputs[:, :0]))
    report = kpe.convert(model, recipe)
    assert "1 of 1 layer in float8" in str(report)
    assert "its inputs have no numbers" in " ".join(str(report).split())
    assert not [w for w in recwarn if "has changed nothing" in str(w.message)]
