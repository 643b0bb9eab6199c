"""Why `_keras/stock_float8.py` is needed. See `_keras/__init__.py`."""

import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext._keras import built_layers, stock_float8
from public_api import functions_about, members_about
from steps import numpy


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


def test_keras_refuses_adapters_by_the_mode_from_3_16_on():
    layer = quantized()
    if not hasattr(layer, "_check_lora_supported"):
        layer.enable_lora(1)
        return
    with pytest.raises(NotImplementedError, match="FLOAT8"):
        layer.enable_lora(1)


@pytest.mark.parametrize("change", [kpe.convert, kpe.freeze])
def test_converted_and_frozen_layers_take_adapters(change):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    change(model)
    model.layers[0].enable_lora(1)
    before = numpy(model(np.ones((1, 2), "float32")))
    model.layers[0].lora_kernel_a.assign(np.ones((2, 1)))
    model.layers[0].lora_kernel_b.assign(np.ones((1, 1)))
    after = numpy(model(np.ones((1, 2), "float32")))
    np.testing.assert_allclose(after - before, 2.0, rtol=1e-6)


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


def test_the_warning_is_at_the_line_that_quantizes(monkeypatch):
    monkeypatch.setattr(keras.quantizers, "QuantizationReport", 0, False)
    layer = kpe.layers.Dense(2, dtype="float8_from_float32", name="mine")
    model = keras.Sequential([keras.Input((2,)), layer])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.quantize("int8")
    here = [str(each.message) for each in caught if each.filename == __file__]
    # Keras 3.16 counts the layer in a warning of its own.
    assert sum(text.startswith("Layer 'mine' follows") for text in here) == 1
