"""What a conversion leaves alone, and what it says of it."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from small_models import LITTLE, POLICY, sequential
from steps import normal, numpy


@pytest.mark.filterwarnings(LITTLE)
def test_layers_that_stay_say_why():
    inputs = keras.Input((8, 6))
    x = keras.layers.DepthwiseConv1D(3)(inputs)
    x = keras.layers.Dropout(0.1)(x)
    ids = keras.Input((3,), dtype="int32")
    y = keras.layers.Embedding(5, 4)(ids)
    model = keras.Model([inputs, ids], [x, y])
    report = kpe.convert(model, POLICY)
    assert not report.converted
    reasons = {e.class_name: e.reason for e in report.skipped}
    assert "depthwise" in reasons["DepthwiseConv1D"]
    assert "looks up" in reasons["Embedding"]
    assert "tied head" in reasons["Embedding"]
    assert "Dropout" not in reasons


def foreign_layer():
    """A layer around a module of the framework in use."""
    if keras.backend.backend() == "jax":

        def call(params, inputs):
            return inputs @ params

        # With an init_fn, Keras would look for TensorFlow (3.15).
        return keras.layers.JaxLayer(call, params=np.eye(6, dtype="float32"))
    if keras.backend.backend() == "torch":
        import torch

        return keras.layers.TorchModuleWrapper(torch.nn.Linear(6, 6))
    pytest.skip("Keras has no layer around modules of TensorFlow")


def test_modules_of_a_framework_are_left_alone():
    layer = foreign_layer()
    model = keras.Sequential([layer, keras.layers.Dense(2)])
    x = normal(2, 6)
    model(x)
    report = kpe.convert(model, POLICY)
    assert [e.class_name for e in report.converted] == ["Dense"]
    (left,) = report.skipped
    assert left.class_name == type(layer).__name__
    assert "whose arithmetic Keras does not see" in left.reason
    assert numpy(model(x)).shape == (2, 2)


def test_layers_in_integers_and_quantized_ones_stay():
    inputs = keras.Input((6,))
    quantized = keras.layers.Dense(6)
    model = keras.Model(inputs, keras.layers.Dense(2)(quantized(inputs)))
    quantized.quantize("int8")
    report = kpe.convert(model, POLICY)
    assert [e.path for e in report.converted] == [model.layers[2].path]
    assert "quantized it (int8)" in report.skipped[0].reason
    assert numpy(model(normal(2, 6))).shape == (2, 2)


@pytest.mark.extension("count")
def test_reports_are_dicts_and_tables():
    report = kpe.convert(sequential(), POLICY, exclude="conv")
    entries = report.as_dict()
    assert entries["converted"] == [
        {
            "path": report.converted[0].path,
            "class_name": "Dense",
            "policy": POLICY,
            "per_tensor": False,
            "kept_bytes": report.converted[0].kept_bytes,
            "kept_bytes_before": 4,
            "shares_scales": False,
            "looks_up": False,
            "parameters": 10,
            "multiplications": 20,
            "plain_multiplications": 0,
            "plain_parameters": 0,
            "sizes_known": True,
        }
    ]
    assert {e["class_name"] for e in entries["skipped"]} == {
        "Conv1D",
        "LayerNormalization",
    }
    text = report.table(full=True)
    for entry in (*report.converted, *report.skipped):
        assert entry.path in text
