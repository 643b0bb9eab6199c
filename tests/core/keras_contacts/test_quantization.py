"""Why `_keras/quantization.py` is needed. See `_keras/__init__.py`."""

import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext._keras import quantization
from steps import numpy


def quantized():
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    layer.quantize("float8")
    return layer


def test_a_layer_does_not_tell_a_policy_with_a_mode_from_being_quantized():
    policy = keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", "float32", amax_history_length=1
    )
    layer = keras.layers.Dense(1, dtype=policy)
    assert layer.quantization_mode == quantized().quantization_mode
    assert not quantization.is_quantized(layer)
    assert not quantization.is_in_float8(layer)
    assert quantization.is_quantized(quantized())
    assert quantization.is_in_float8(quantized())


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
        quantization.refuse_quantization("for a reason")


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
