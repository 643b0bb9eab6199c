"""Why the names in `ext/keras_float8/_keras` are needed."""

import keras
import pytest

from keras_policy_ext._keras import built_layers
from keras_policy_ext.ext.keras_float8 import _keras
from public_api import functions_about, members_about


def stock(function):
    """What a function was before another one was put around it."""
    return function.__wrapped__


def quantized():
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    layer.quantize("float8")
    return layer


def test_float8_of_keras_puts_trainable_weights_into_a_layer():
    layer = quantized()
    names = [weight.name for weight in layer.trainable_weights]
    assert len(names) == 2 + 6
    assert set(_keras.float8_variables(layer)) < set(names)


def test_keras_offers_no_way_back_from_float8():
    layer = quantized()
    with pytest.raises(ValueError, match="already quantized"):
        layer.quantize("int8")
    words = ("dequant", "unquant", "revert", "restore")
    assert members_about(type(layer), *words) == []
    assert functions_about("dequantize_model", "unquant") == []
    with built_layers.unlocked(layer):
        _keras.remove_float8_variables(layer)
    assert len(layer.trainable_weights) == 2


def test_keras_calls_no_layer_without_float8_under_its_own_float8_policy():
    layer = keras.layers.LayerNormalization(dtype="float8_from_float32")
    method = getattr(keras.layers.Layer, "_float8_call", None)
    with pytest.raises(NotImplementedError):
        if method is None:  # Keras 3.16.
            strategy = _keras._Strategy()
            stock(type(strategy).call)(strategy, layer, 1.0)
        else:
            stock(method)(layer, 1.0)
