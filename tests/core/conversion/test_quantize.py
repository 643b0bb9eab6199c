"""Keras's own quantization beside this package's layers."""

import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import mostly
from steps import normal, numpy

POLICY = "float8/4_from_float32"


X = normal(2, 4, 6)


def model(layers):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4, 6)),
            layers.Conv1D(6, 2),
            layers.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d"),
            layers.Dense(3, activation="tanh"),
        ]
    )


def warned(stack, mode):
    """The warnings of `Model.quantize`, but those of other layers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stack.quantize(mode)
    texts = [str(w.message) for w in caught if w.category is UserWarning]
    return [text for text in texts if "InputLayer" not in text]


def told(stack, mode):
    """The warnings of `Model.quantize` that are of this package."""
    return [text for text in warned(stack, mode) if "Received: " in text]


def modes(stack):
    return [layer.quantization_mode for layer in stack.layers]


@pytest.mark.full_except("converted-float8", "made-float8", "made-int8")
@pytest.mark.parametrize("mode", ["int8", "float8"])
@pytest.mark.parametrize("how", ["converted", "made"])
def test_a_layer_in_float8_stays_so_and_says_what_to_do(how, mode):
    stack = model(keras.layers)
    if how == "made":
        with kpe.policy_scope(POLICY):
            stack = model(kpe.layers)
    kpe.convert(stack, POLICY)
    before = [numpy(v) for v in stack.variables]
    texts = told(stack, mode)
    assert len(texts) == 3
    for layer, text in zip(stack.layers, texts, strict=True):
        assert layer.name in text and POLICY in text
        assert f"Received: {mode!r}" in text
        assert "`keras_policy_ext.revert(model)` first" in text
        with pytest.raises(NotImplementedError, match="first, then quantize"):
            layer.quantize(mode)
    assert modes(stack) == ["float8"] * 3
    for variable, value in zip(stack.variables, before, strict=True):
        np.testing.assert_array_equal(numpy(variable), value)


@pytest.mark.skipif(
    not hasattr(keras.quantizers, "QuantizationReport"),
    reason="Model.quantize makes a report from Keras 3.16 on",
)
def test_a_report_of_keras_has_no_layer_in_float8_among_the_quantized():
    stack = model(keras.layers)
    *_, last = stack.layers
    kpe.convert(stack, POLICY, exclude=f"/{last.name}$")
    report = stack.quantize("int8")
    assert [path for path, *_ in report.quantized] == [last.path]


@pytest.mark.full
@pytest.mark.parametrize("times", mostly([1, 2], 2))
@pytest.mark.parametrize(
    "layers", mostly([keras.layers, kpe.layers], keras.layers)
)
def test_a_reverted_model_is_quantized_as_a_stock_one(layers, times):
    stack, stock = model(layers), model(keras.layers)
    for _ in range(times):
        kpe.convert(stack, POLICY)
        assert len(told(stack, "int8")) == 3
        kpe.revert(stack)
    for each in (stack, stock):
        assert len(warned(each, "int8")) == 1  # of the convolution
    assert modes(stack) == modes(stock) == [None, "int8", "int8"]
    np.testing.assert_array_equal(numpy(stack(X)), numpy(stock(X)))


@pytest.mark.parametrize("layers", [keras.layers, kpe.layers])
def test_a_converted_layer_under_a_plain_policy_is_quantized(layers):
    stack, stock = model(layers), model(keras.layers)
    kpe.convert(stack, POLICY)
    for layer in stack.layers:
        layer.dtype_policy = stock.dtype_policy
    for each in (stack, stock):
        assert len(warned(each, "int8")) == 1
    assert modes(stack) == modes(stock) == [None, "int8", "int8"]
    np.testing.assert_array_equal(numpy(stack(X)), numpy(stock(X)))


@pytest.mark.parametrize("mode", mostly(["int8", "int4"], "int8"))
def test_a_plain_layer_is_quantized_as_the_stock_one(mode, tmp_path):
    ours, stock = model(kpe.layers), model(keras.layers)
    before = numpy(ours(X))
    assert len(warned(ours, mode)) == len(warned(stock, mode)) == 1
    assert modes(ours) == modes(stock) == [None, mode, mode]
    outputs = numpy(ours(X))
    assert not np.array_equal(outputs, before)
    np.testing.assert_array_equal(outputs, numpy(stock(X)))
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert modes(loaded) == modes(ours)
    np.testing.assert_array_equal(numpy(loaded(X)), outputs)
    report = kpe.convert(ours, POLICY)
    assert [e.class_name for e in report.converted] == ["Conv1D"]
    kpe.revert(ours)
    np.testing.assert_array_equal(numpy(ours(X)), outputs)


@pytest.mark.skipif(
    keras.__version__.startswith("3.12."),
    reason="Model.quantize has filters from Keras 3.13 on",
)
def test_filters_see_the_layer_and_not_its_state():
    stack = model(kpe.layers)
    stack.quantize("int8", filters=f"^{stack.layers[-1].name}$")
    assert modes(stack) == [None, None, "int8"]


def test_a_plain_layer_is_told_how_to_get_into_float8():
    stack = model(kpe.layers)
    text = told(stack, "float8")[-1]
    assert "Received: 'float8'" in text
    assert "`keras_policy_ext.convert(model)`" in text
    assert "Float8DTypePolicy" in text
    assert modes(stack) == [None] * 3


def test_subclasses_are_quantized_where_the_type_is_not_checked():
    class Renamed(kpe.layers.Dense):
        """As a subclass of a stock layer."""

    layer = Renamed(3)
    layer.build((None, 6))
    with pytest.raises(NotImplementedError, match="Renamed"):
        layer.quantize("int8")
    layer.quantize("int8", type_check=False)
    assert layer.quantization_mode == "int8"


@pytest.mark.parametrize("policy", [POLICY, "float8/current_from_float32"])
def test_a_quantized_layer_cannot_follow_float8(policy):
    layer = kpe.layers.Dense(3)
    layer.build((None, 6))
    layer.quantize("int8")
    before = numpy(layer(X))
    with pytest.raises(ValueError, match="is quantized by Keras"):
        layer.dtype_policy = policy
    assert layer.quantization_mode == "int8"
    np.testing.assert_array_equal(numpy(layer(X)), before)
