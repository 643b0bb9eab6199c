"""Why `_keras/walking.py` is needed. See `_keras/__init__.py`."""

import keras
import pytest

from keras_policy_ext._keras import walking
from public_api import functions_about, lists_with, members_about

BACKEND = keras.backend.backend()


def nested_model():
    """A model, the model in it, and the layers in that, in order."""
    first, last = keras.layers.Dense(2), keras.layers.Dense(3)
    inner = keras.Sequential([first, last])
    model = keras.Sequential([inner, keras.layers.ReLU()])
    return model, inner, first, last


def test_keras_offers_no_public_way_to_walk_a_model():
    model, inner, first, _ = nested_model()
    assert "layers" in lists_with(model, inner)
    assert lists_with(model, first) == []
    assert members_about(keras.Model, "flatten", "walk", "sublayer") == []
    assert not hasattr(keras.layers.MultiHeadAttention(1, 2), "layers")


def test_keras_walks_deeper_layers_in_another_order():
    model, inner, first, last = nested_model()
    in_order = [model, inner, first, last, model.layers[1]]
    assert walking.layers_within(model) == in_order
    assert list(model._flatten_layers()) != in_order


@pytest.mark.skipif(BACKEND != "torch", reason="a layer is a module on torch")
def test_a_layer_on_torch_has_no_layer_among_its_attributes():
    layer = keras.layers.Bidirectional(keras.layers.LSTM(1))
    assert "forward_layer" not in vars(layer)
    assert walking.attributes(layer)["forward_layer"] is layer.forward_layer


def test_weights_of_a_layer_include_those_of_the_layers_in_it():
    layer = keras.layers.Bidirectional(keras.layers.SimpleRNN(1))
    layer.build((None, 2, 2))
    kernel = layer.forward_layer.cell.kernel
    assert {"variables", "weights"} <= set(lists_with(layer, kernel))
    assert walking.own_weights(layer) == []
    assert walking.tracked_variables(layer) == []


def test_keras_has_no_functions_to_look_into_layers():
    assert functions_about("submodule", "sublayer", "walk", "flatten_l") == []


def test_keras_does_not_track_what_a_function_reads():
    table = keras.layers.Embedding(3, 2)
    table.build()
    held = table.embeddings
    layer = keras.layers.Lambda(lambda x: x * held)
    assert walking.captured_variables(layer) == [held]
    assert layer.variables == []


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow tracks values")
def test_tensorflow_holds_the_values_of_attributes_once_more():
    model, inner, *_ = nested_model()
    model.part = inner
    held = {n for n, v in vars(model).items() if isinstance(v, dict) and v}
    tracking = {n for n in held if n.startswith("_self_unconditional_")}
    assert tracking
    assert not tracking & walking.attributes(model).keys()
