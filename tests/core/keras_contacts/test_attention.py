"""Why `_keras/attention.py` is needed. See `_keras/__init__.py`."""

import keras
import numpy as np
import pytest

from hidden_names import hidden
from keras_policy_ext._keras import attention
from public_api import members_about

LAYERS = [keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention]
VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
X = np.ones((1, 3, 4), "float32")


class Mixin:
    """From here on a class counts as stock."""


def made(cls, **kwargs):
    if cls is keras.layers.GroupQueryAttention:
        return cls(2, 2, 1, **kwargs)
    return cls(2, 2, **kwargs)


@pytest.mark.parametrize("cls", LAYERS)
def test_a_layer_does_not_tell_whether_it_uses_flash_attention(cls):
    for value in (True, False):
        layer = made(cls, flash_attention=value)
        assert "flash_attention" not in layer.get_config()
        assert attention.has_flash_attention(layer) is value
    assert members_about(cls, "flash") == []


@pytest.mark.parametrize("cls", LAYERS)
def test_keras_offers_no_attention_to_override(cls):
    words = ("attention", "score", "softmax", "equation", "causal")
    assert set(members_about(cls, *words)) <= {"attention_axes"}


@pytest.mark.full_except("GroupedQueryAttention")
@pytest.mark.parametrize("cls", LAYERS)
def test_attention_of_two_other_products_is_that_of_keras(cls):
    stock, layer = made(cls), made(cls)
    layer.__class__ = type("Mixed", (Mixin, cls), {})
    outputs = stock(X, X, use_causal_mask=True)
    layer.build(X.shape, X.shape)
    layer.set_weights(stock.get_weights())
    products = []

    def product(equation, a, b):
        products.append(equation)
        return keras.ops.einsum(equation, a, b)

    def scored(equation, query, key):
        query = query * float(query.shape[-1]) ** -0.5
        is_grouped = cls is keras.layers.GroupQueryAttention
        pair = (query, key) if is_grouped else (key, query)
        return product(equation, *pair)

    def attend(*args, **kwargs):
        return attention.attend(layer, scored, product, *args, **kwargs)

    attention.replace_attention(layer, Mixin, attend)
    got = layer(X, X, use_causal_mask=True)
    assert len(products) == 2
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(got),
        keras.ops.convert_to_numpy(outputs),
        rtol=1e-5,
    )


@pytest.mark.parametrize("cls", LAYERS)
def test_the_softmax_of_keras_casts_float32_scores_to_float16(cls):
    """Scores beyond 65504 would be infinite, and their softmax NaN."""
    layer = made(cls, dtype="float16")
    layer.build(X.shape, X.shape)
    scores = keras.ops.convert_to_tensor([[[[1e5, 1e5]]]], "float32")
    stock = keras.ops.convert_to_numpy(layer._masked_softmax(scores))
    assert stock.dtype == "float16" and np.isnan(stock).all()
    layer.__class__ = type("Mixed", (Mixin, cls), {})
    attention.replace_attention(layer, Mixin, lambda *args: None)
    got = keras.ops.convert_to_numpy(layer._masked_softmax(scores))
    np.testing.assert_array_equal(got, np.float32([[[[0.5, 0.5]]]]))


@pytest.mark.parametrize("cls", LAYERS)
def test_attention_is_replaced_where_keras_keeps_its_softmax_elsewhere(cls):
    layer = made(cls)
    layer.__class__ = type("Mixed", (Mixin, cls), {})
    layer.build(X.shape, X.shape)
    with hidden(cls, "_softmax"):
        attention.replace_attention(layer, Mixin, lambda *args: None)
    assert "_compute_attention" in vars(layer)


class Stock(Mixin, keras.layers.MultiHeadAttention):
    """Overrides nothing."""


class Overrides(keras.layers.MultiHeadAttention):
    """Remembers the mask that its attention gets."""

    def _compute_attention(self, query, key, value, mask=None, *args, **kwargs):
        self.mask = mask
        return super()._compute_attention(query, key, value, mask)


@pytest.mark.skipif(
    VERSION < (3, 15), reason="Keras up to 3.14 always makes the causal mask"
)
def test_keras_makes_a_causal_mask_where_a_class_overrides_attention():
    """And leaves it to the kernels where an instance does."""
    overriding = made(Overrides)
    overriding(X, X, use_causal_mask=True)
    assert overriding.mask is not None
    stock, seen = made(Stock), []
    attend = stock._compute_attention

    def remember(query, key, value, mask=None, *args, **kwargs):
        seen.append(mask)
        return attend(query, key, value, mask, *args, **kwargs)

    attention.replace_attention(stock, Mixin, remember)
    stock(X, X, use_causal_mask=True)
    assert seen and seen[-1] is None
