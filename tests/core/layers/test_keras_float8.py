"""Layers in Keras's own float8, without the extension that takes them over."""

import keras
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import _extensions
from keras_policy_ext.files import keras_float8
from stock_float8 import dense, short, trained

pytestmark = pytest.mark.any_backend

MISSING = "extension that is not installed, 'keras_float8'. Received: "


@pytest.fixture(autouse=True)
def no_extension(monkeypatch):
    monkeypatch.setattr(_extensions, "_on_demand", {})
    monkeypatch.setattr(keras_float8, "_extension", None)


def test_a_layer_is_left_to_keras_and_the_report_says_why():
    model = dense(keras.layers, short())
    (skipped,) = kpe.convert(model).skipped
    assert "takes it over, 'keras_float8', is not installed" in skipped.reason
    assert type(model.layers[0]) is keras.layers.Dense


@pytest.mark.parametrize("suffix", ["keras", "weights.h5"])
def test_a_file_is_refused_by_name(suffix, tmp_path):
    path = tmp_path / f"stock.{suffix}"
    stock = trained(dense(keras.layers, short()))
    if suffix == "keras":
        stock.save(path)
        with pytest.raises(ValueError, match=f"{MISSING}.*stock.keras"):
            kpe.load_model(path)
    else:
        stock.save_weights(path)
    model = dense(keras.layers, "float32")
    with pytest.raises(ValueError, match=MISSING):
        kpe.load_weights(model, path, as_saved=True)
    ours = dense(kpe.layers, short())
    with pytest.raises(ValueError, match=f"{MISSING}a file for layer"):
        ours.load_weights(path)


def test_names_of_keras_are_no_attributes():
    layer = dense(kpe.layers, short()).layers[0]
    assert not hasattr(layer, "inputs_scale")
    assert not hasattr(layer, "kernel_amax_history")
