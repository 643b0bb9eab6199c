"""Why `_keras/stock_float8.py` is needed. See `_keras/__init__.py`."""

import warnings

import keras
import pytest

from keras_policy_ext._keras import built_layers, stock_float8
from public_api import functions_about, members_about


def quantized():
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    layer.quantize("float8")
    return layer


def test_float8_of_keras_puts_trainable_weights_into_a_layer():
    layer = quantized()
    names = [weight.name for weight in layer.trainable_weights]
    assert len(names) == 2 + 6
    assert set(stock_float8.stock_float8(layer)) < set(names)


def test_keras_offers_no_way_back_from_float8():
    layer = quantized()
    with pytest.raises(ValueError, match="already quantized"):
        layer.quantize("int8")
    words = ("dequant", "unquant", "revert", "restore")
    assert members_about(type(layer), *words) == []
    assert functions_about("dequantize_model", "unquant") == []
    with built_layers.unlocked(layer):
        stock_float8.remove_stock_float8(layer)
    assert len(layer.trainable_weights) == 2


def test_a_layer_does_not_tell_a_policy_with_a_mode_from_being_quantized():
    policy = keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", "float32", amax_history_length=1
    )
    layer = keras.layers.Dense(1, dtype=policy)
    assert layer.quantization_mode == quantized().quantization_mode
    assert not stock_float8.is_quantized(layer)
    assert stock_float8.is_quantized(quantized())


class Refuses(keras.layers.Layer):
    """Says why it is not quantized."""

    def quantize(self, mode=None, **kwargs):
        raise NotImplementedError("for a reason")


class RefusesVisibly(keras.layers.Layer):
    """Says so by the function of this package."""

    def quantize(self, mode=None, **kwargs):
        stock_float8.refuse_quantization("for a reason")


def test_keras_with_a_report_does_not_tell_why_a_layer_was_not_quantized():
    """Keras without one, up to 3.15, tells it in a warning."""
    has_report = hasattr(keras.quantizers, "QuantizationReport")
    for cls, times in [(Refuses, 0 if has_report else 1), (RefusesVisibly, 1)]:
        model = keras.Sequential([keras.Input((2,)), cls()])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.quantize("int8")
        texts = [str(each.message) for each in caught]
        assert texts.count("for a reason") == times
