"""Stock layers under float8 policies."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import policies
from keras_policy_ext.policies import Float8DTypePolicy, get
from stock_policies import built_dense


def stock_layers():
    layers = keras.layers
    return {
        "dense": (layers.Dense(2), (3, 4)),
        "einsum_dense": (layers.EinsumDense("ab,bc->ac", 2), (3, 4)),
        "layer_normalization": (layers.LayerNormalization(), (3, 4)),
        "conv2d": (layers.Conv2D(2, 2), (1, 4, 4, 3)),
        "lstm": (layers.LSTM(2), (2, 3, 4)),
        "activation": (layers.Activation("relu"), (3, 4)),
        "time_distributed": (
            layers.TimeDistributed(layers.Dense(2)),
            (2, 3, 4),
        ),
        "bidirectional": (layers.Bidirectional(layers.GRU(2)), (2, 3, 4)),
    }


def test_every_stock_layer_runs_and_reports_its_source_policy():
    keras.config.set_dtype_policy(Float8DTypePolicy("mixed_bfloat16"))
    for name, (layer, shape) in stock_layers().items():
        y = layer(np.ones(shape, "float32"))
        assert layer.compute_dtype == "bfloat16", name
        assert layer.variable_dtype == "float32", name
        assert layer.quantization_mode is None, name
        assert keras.backend.standardize_dtype(y.dtype) == "bfloat16", name


def test_attention_and_embedding_run_under_a_global_policy():
    keras.config.set_dtype_policy(Float8DTypePolicy("mixed_bfloat16"))
    attention = keras.layers.MultiHeadAttention(2, 3)
    x = np.ones((2, 4, 6), "float32")
    assert keras.backend.standardize_dtype(attention(x, x).dtype) == "bfloat16"
    embedding = keras.layers.Embedding(5, 3)
    y = embedding(np.ones((2, 2), "int32"))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"


def test_a_stock_model_trains_under_a_global_policy():
    keras.config.set_dtype_policy(Float8DTypePolicy("mixed_bfloat16"))
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.zeros((8, 1), "float32")
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_stock_layers_follow_the_plain_part_of_rules():
    policy = Float8DTypePolicy(
        "mixed_bfloat16", rules=[("head.*", "float32"), ("other", "float16")]
    )
    head = keras.layers.Dense(2, dtype=policy, name="head")
    body = keras.layers.Dense(2, dtype=policy, name="body")
    x = np.ones((1, 3), "float32")
    assert keras.backend.standardize_dtype(head(body(x)).dtype) == "float32"
    assert (head.compute_dtype, body.compute_dtype) == ("float32", "bfloat16")


def test_setting_the_policy_of_one_layer_leaves_the_shared_policy_alone():
    policy = Float8DTypePolicy("mixed_bfloat16")
    first, second = built_dense(policy), built_dense(policy)
    policies.set_layer_policy(first, "mixed_float16")
    assert first.dtype_policy == keras.DTypePolicy("mixed_float16")
    assert first.compute_dtype == "float16"
    assert second.dtype_policy is policy
    assert policy == Float8DTypePolicy("mixed_bfloat16")


def test_setting_the_policy_of_a_layer_that_has_its_own_rule_works_too():
    policy = Float8DTypePolicy("mixed_bfloat16", rules=[("head", "float32")])
    layer = keras.layers.Dense(2, dtype=policy, name="head")
    layer.build((None, 4))
    policies.set_layer_policy(layer, Float8DTypePolicy("mixed_float16"))
    assert layer.dtype_policy == Float8DTypePolicy("mixed_float16")
    assert policy.rules == (("head", keras.DTypePolicy("float32")),)


@pytest.mark.parametrize("made", ["stock", "own"])
@pytest.mark.parametrize("shared", ["mixed_float8", "loss scale"])
@pytest.mark.extension("mixed")
def test_a_built_stock_layer_cannot_write_into_a_shared_policy(made, shared):
    if shared == "loss scale":
        shared = kpe.LossScaleDTypePolicy()
    shared = get(shared)
    home = keras.layers if made == "stock" else kpe.layers
    layer = home.Dense(2, dtype=shared, name="head")
    layer.build((None, 4))
    if made == "stock":
        with pytest.raises(TypeError, match="set_layer_policy"):
            layer.dtype_policy = "float32"
        assert layer.dtype_policy is shared
    else:
        layer.dtype_policy = "float32"
        assert layer.dtype_policy == keras.DTypePolicy("float32")
    policies.set_layer_policy(layer, "mixed_float16")
    assert layer.compute_dtype == "float16"
    assert "head" not in shared


def test_a_layer_refuses_a_policy_and_keeps_the_one_that_it_shares():
    shared = Float8DTypePolicy("mixed_bfloat16")
    layer = kpe.layers.Dense(2, dtype=shared)
    layer.build((None, 4))
    with pytest.raises(ValueError, match="does not fit"):
        policies.set_layer_policy(layer, "float8/16_from_float32")
    assert layer.dtype_policy is shared


@pytest.mark.parametrize("finish", [False, True])
def test_int8_quantization_after_training_works_with_a_policy_of_its_own(
    finish,
):
    policy = Float8DTypePolicy("mixed_bfloat16")
    first, second = built_dense(policy), built_dense(policy)
    if finish:
        with pytest.raises(TypeError, match="only the policy is not set"):
            first.quantize("int8")
        policies.set_layer_policy(first, "int8_from_mixed_bfloat16")
    else:
        policies.set_layer_policy(first, "mixed_bfloat16")
        first.quantize("int8")
    assert first.quantization_mode == "int8"
    assert first.dtype_policy.name == "int8_from_mixed_bfloat16"
    y = first(np.ones((1, 4), "float32"))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert second.quantization_mode is None


def test_keras_derives_policies_from_a_global_float8_policy():
    keras.config.set_dtype_policy(Float8DTypePolicy("mixed_float16"))
    assert keras.DTypePolicy().name == "mixed_float16"
    policy_map = keras.dtype_policies.DTypePolicyMap()
    assert policy_map.name == "map_mixed_float16"
    assert policy_map.compute_dtype == "float16"
