"""Masks in the graphs of tf_keras."""

import re
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext.migration import load_legacy_model, migrate_config
from legacy_files import functional_config, layer_in_graph, write_h5


def tokens(name):
    return layer_in_graph(
        name, "InputLayer", [], batch_input_shape=[None, 4], dtype="float32"
    )


def embedding(name, of):
    return layer_in_graph(
        name,
        "Embedding",
        [[[of, 0, 0, {}]]],
        input_dim=5,
        output_dim=2,
        mask_zero=True,
    )


def concatenation(name, *of, axis=-1):
    node = [[x, 0, 0, {}] for x in of]
    return layer_in_graph(name, "Concatenate", [node], axis=axis)


def lstm(of):
    return layer_in_graph("lstm", "LSTM", [[[of, 0, 0, {}]]], units=1)


def test_name_that_keras_gives_to_an_operation_of_a_mask_is_kept(tmp_path):
    # The name that Keras would give next to any concatenation.
    name = f"concatenate_{keras.backend.get_uid('concatenate')}"
    layers = [
        tokens("x"),
        embedding("table", "x"),
        concatenation(name, "table", "table"),
        lstm(name),
    ]
    arrays = {
        "table": {"e:0": np.arange(10, dtype="float32").reshape(5, 2) / 10},
        "lstm": {
            "k:0": np.full((4, 4), 0.5, "float32"),
            "r:0": np.full((1, 4), 0.25, "float32"),
            "b:0": np.zeros(4, "float32"),
        },
    }
    config = functional_config(layers, ["x"], "lstm")

    model = load_legacy_model(write_h5(tmp_path / "m.h5", config, arrays))

    assert isinstance(model.get_layer(name), keras.layers.Concatenate)
    padded = ops.convert_to_numpy(model(np.array([[1, 2, 0, 0]])))
    seen = ops.convert_to_numpy(model(np.array([[0, 0, 1, 2]])))
    np.testing.assert_allclose(padded, seen, rtol=1e-6)
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert [x.name for x in again.layers] == [x.name for x in model.layers]


def test_name_with_a_count_beyond_all_costs_no_time(tmp_path):
    far = "dense_999999999"
    layers = [
        layer_in_graph("x", "InputLayer", [], batch_input_shape=[None, 1]),
        layer_in_graph(far, "Dense", [[["x", 0, 0, {}]]], units=1),
    ]
    arrays = {far: {"k:0": np.ones((1, 1), "f4"), "b:0": np.ones(1, "f4")}}
    config = functional_config(layers, ["x"], far)

    model = load_legacy_model(write_h5(tmp_path / "m.h5", config, arrays))

    assert model.layers[-1].name == far


def told(layers, inputs, output):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        migrate_config(functional_config(layers, inputs, output))
    return " ".join(str(w.message) for w in caught)


@pytest.mark.parametrize(
    "of, axis, is_told",
    [
        (("a", "b"), -1, True),
        (("a", "a"), -1, False),
        (("a", "b"), 1, False),
    ],
)
def test_masks_that_keras_3_joins_otherwise_are_told(of, axis, is_told):
    layers = [
        tokens("x"),
        tokens("y"),
        embedding("a", "x"),
        embedding("b", "y"),
        concatenation("both", *of, axis=axis),
        lstm("both"),
    ]

    words = told(layers, ["x", "y"], "lstm")

    assert ("Concatenate 'both'" in words) == is_told


def test_masks_that_no_layer_reads_are_not_told():
    layers = [
        tokens("x"),
        tokens("y"),
        embedding("a", "x"),
        embedding("b", "y"),
        concatenation("both", "a", "b"),
    ]

    assert told(layers, ["x", "y"], "both") == ""


def attention(name, of):
    node = [[of, 0, 0, {"value": [of, 0, 0]}]]
    return layer_in_graph(
        name, "MultiHeadAttention", [node], num_heads=1, key_dim=2
    )


@pytest.mark.parametrize("is_masked", [True, False])
def test_attention_after_masked_attention_is_told(is_masked):
    table = embedding("table", "x")
    table["config"]["mask_zero"] = is_masked
    layers = [
        tokens("x"),
        table,
        attention("first", "table"),
        attention("second", "first"),
    ]

    words = told(layers, ["x"], "second")

    named = re.findall(r"MultiHeadAttention '(\w+)'", words)
    assert named == (["second"] if is_masked else [])


def test_masks_are_followed_through_many_residual_blocks():
    # Each block doubles the number of ways back to the start.
    layers = [tokens("x"), embedding("add_0", "x")]
    for i in range(60):
        node = [[f"add_{i}", 0, 0, {}], [f"add_{i}", 0, 0, {}]]
        layers.append(layer_in_graph(f"add_{i + 1}", "Add", [node]))
    layers += [attention("first", "add_60"), attention("second", "first")]

    assert "'second'" in told(layers, ["x"], "second")
