"""Why `_keras/attention.py` is needed. See `_keras/__init__.py`."""

import functools
import types

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


def einsums_of(monkeypatch):
    """The equations that `einsum` gets from layers of Keras from now on."""
    equations = []

    def noted(stock):
        def einsum(equation, *operands, **kwargs):
            equations.append(equation)
            return stock(equation, *operands, **kwargs)

        return einsum

    for home in (keras.src.ops, numpy_of_layers()):
        if home is not None:
            monkeypatch.setattr(home, "einsum", noted(home.einsum))
    return equations


def numpy_of_layers():
    """What layers of keras 3.16 call in place of `ops`; None before."""
    ops = getattr(keras.src.backend, "ops", None)
    return None if ops is None else ops.numpy


def by_scores(layer):
    stock = type(layer)._compute_attention
    bound = functools.partial(stock, layer)
    home = types.SimpleNamespace(_compute_attention=bound)

    def attend(*args, **kwargs):
        return attention.attend_by_scores(layer, home, *args, **kwargs)

    return attend


@pytest.mark.full_except("GroupedQueryAttention")
@pytest.mark.parametrize("cls", LAYERS)
def test_keras_multiplies_by_two_einsums_only_where_scores_are_returned(
    cls, monkeypatch
):
    layer = made(cls)
    outputs = layer(X, X, use_causal_mask=True)
    equations = einsums_of(monkeypatch)
    layer(X, X, use_causal_mask=True)
    products = attention.products_of(layer)
    assert not set(products) & set(equations)
    attention.replace_attention(layer, by_scores(layer))
    got = layer(X, X, use_causal_mask=True)
    assert [e for e in equations if e in products] == list(products)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(got),
        keras.ops.convert_to_numpy(outputs),
        rtol=1e-5,
    )


@pytest.mark.parametrize("cls", LAYERS)
def test_keras_returns_no_scores_with_flash_attention(cls):
    layer = made(cls, flash_attention=True)
    layer.build(X.shape, X.shape)
    with pytest.raises((ValueError, RuntimeError), match="flash"):
        layer(X, X, return_attention_scores=True)
    attention.replace_attention(layer, by_scores(layer))
    assert layer(X, X).shape == X.shape


@pytest.mark.parametrize("cls", LAYERS)
def test_the_softmax_of_keras_casts_float32_scores_to_float16(cls):
    """Scores beyond 65504 would be infinite, and their softmax NaN."""
    layer = made(cls, dtype="float16")
    layer.build(X.shape, X.shape)
    scores = keras.ops.convert_to_tensor([[[[1e5, 1e5]]]], "float32")
    stock = keras.ops.convert_to_numpy(layer._masked_softmax(scores))
    assert stock.dtype == "float16" and np.isnan(stock).all()
    attention.replace_attention(layer, lambda *args: None)
    got = keras.ops.convert_to_numpy(layer._masked_softmax(scores))
    np.testing.assert_array_equal(got, np.float32([[[[0.5, 0.5]]]]))


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("name", ["_dot_product_equation", "_combine_equation"])
def test_without_its_equations_attention_in_float8_is_refused(cls, name):
    layer = made(cls)
    layer.build(X.shape, X.shape)
    with hidden(cls, name), pytest.raises(ImportError, match=name):
        attention.products_of(layer)


@pytest.mark.parametrize("cls", LAYERS)
def test_attention_is_replaced_where_keras_keeps_its_softmax_elsewhere(cls):
    layer = made(cls)
    layer.build(X.shape, X.shape)
    with hidden(cls, "_softmax"):
        attention.replace_attention(layer, lambda *args: None)
    assert "_compute_attention" in vars(layer)


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
    stock, seen = made(keras.layers.MultiHeadAttention), []
    attend = stock._compute_attention

    def remember(query, key, value, mask=None, *args, **kwargs):
        seen.append(mask)
        return attend(query, key, value, mask, *args, **kwargs)

    attention.replace_attention(stock, remember)
    stock(X, X, use_causal_mask=True)
    assert seen and seen[-1] is None
