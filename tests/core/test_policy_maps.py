"""Maps of Keras with float8 in them: each layer follows what its path says."""

import warnings

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.policies.of_layers import policy_of, source_policy_of
from refusals import refused
from steps import normal, numpy
from stock_policies import stock_float8

JIT = keras.backend.backend() == "jax"
CURRENT = "float8/current_from_mixed_bfloat16"
OURS = kpe.get(CURRENT)


def map_of(entries, default="mixed_bfloat16"):
    policy_map = keras.dtype_policies.DTypePolicyMap(default_policy=default)
    for pattern, policy in entries.items():
        policy_map[pattern] = policy
    return policy_map


def two_layers(first, second, layers=keras.layers):
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, dtype=first, name="first"),
            layers.Dense(8, dtype=second, name="second"),
        ],
        name="model",
    )


def modes(*layers):
    return [layer.quantization_mode for layer in layers]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(OURS, id="ours"),
        pytest.param(
            stock_float8(),
            id="Keras",
            marks=pytest.mark.extension("keras_float8"),
        ),
    ],
)
def test_a_map_is_converted_as_the_policies_that_it_says(policy):
    plain = "mixed_bfloat16"
    policy_map = map_of({".*/first": policy})
    reports = [
        kpe.convert(two_layers(policy, plain)),
        kpe.convert(two_layers(policy_map, policy_map)),
    ]
    direct, mapped = (report.as_dict() for report in reports)
    assert mapped == direct
    (entry,) = reports[1].converted
    assert (entry.path, entry.policy) == (
        "model/first",
        kpe.get(policy).full_name,
    )


def test_a_policy_with_rules_in_a_map_keeps_its_rules():
    ruled = kpe.Float8DTypePolicy("float32", rules=[(".*/second", None)])
    policy_map = map_of({".*": ruled}, "float32")
    model = two_layers(policy_map, policy_map, kpe.layers)
    assert modes(*model.layers) == ["float8", None]
    model = two_layers(policy_map, policy_map)
    report = kpe.convert(model)
    assert [entry.path for entry in report.converted] == ["model/first"]
    assert "a rule" in report.skipped[0].reason


def test_a_map_in_a_map_is_looked_up_too():
    inner = map_of({".*/first": OURS})
    layer = two_layers(map_of({".*": inner}), "float32", kpe.layers).layers[0]
    assert layer.float8_policy == OURS
    assert source_policy_of(layer).name == "mixed_bfloat16"


def test_a_layer_that_is_not_built_has_the_default_of_its_map():
    layer = keras.layers.Dense(8, dtype=map_of({".*": OURS}))
    assert policy_of(layer).name == "mixed_bfloat16"


def test_policies_whose_names_a_map_has_removed_keep_their_dtypes():
    policy_map = keras.dtype_policies.DTypePolicyMap(
        policy_map={
            ".*/first": stock_float8("mixed_bfloat16", 4),
            ".*/second": keras.DTypePolicy("mixed_bfloat16"),
        }
    )
    model = two_layers(policy_map, policy_map, kpe.layers)
    policy_map.get_config()
    first, second = model.layers
    assert policy_of(first).full_name == "float8/4_from_mixed_bfloat16"
    assert source_policy_of(second).name == "mixed_bfloat16"


def test_a_model_under_a_map_reverts_to_the_plain_policies():
    policy_map = map_of({".*/first": OURS})
    model = two_layers(policy_map, policy_map)
    kpe.convert(model)
    kpe.revert(model)
    assert [type(layer) for layer in model.layers] == [keras.layers.Dense] * 2
    assert not kpe.convert(two_layers("float32", "float32"), "float8").skipped
    assert [policy_of(x).name for x in model.layers] == ["mixed_bfloat16"] * 2


ATTENTION = {
    "MultiHeadAttention": ((2, 8), "query_dense", "key_dense"),
    "GroupQueryAttention": ((8, 2, 1), "_query_dense", "_key_dense"),
}


@pytest.mark.full_except("GroupQueryAttention-ours", "MultiHeadAttention-ours")
@pytest.mark.parametrize(
    "policy", [OURS, stock_float8()], ids=["ours", "Keras"]
)
@pytest.mark.parametrize("name", ATTENTION)
def test_projections_follow_a_map_as_they_follow_rules(name, policy):
    arguments, query, key = ATTENTION[name]
    policy_map = map_of({".*/query": policy})
    layer = getattr(kpe.layers, name)(*arguments, dtype=policy_map)
    x = normal(2, 5, 16)
    layer(x, x)
    query, key = getattr(layer, query), getattr(layer, key)
    assert modes(layer, query, key) == [None, "float8", None]
    assert query.float8_policy.recipe == kpe.get(policy).recipe
    assert not any("scale" in v.name for v in query.trainable_variables)
    again = type(layer).from_config(layer.get_config())
    again(x, x)
    assert [x.quantization_mode for x in again._flatten_layers()] == [
        x.quantization_mode for x in layer._flatten_layers()
    ]


@pytest.mark.full_except(
    "GRU-.*_cell-ours", "LSTM-.*_cell-ours", "SimpleRNN-.*_cell-ours"
)
@pytest.mark.parametrize(
    "policy", [OURS, stock_float8()], ids=["ours", "Keras"]
)
@pytest.mark.parametrize("pattern", [".*", ".*_cell"])
@pytest.mark.parametrize("name", ["SimpleRNN", "GRU", "LSTM"])
@pytest.mark.extension("recurrent")
def test_cells_follow_a_map(name, pattern, policy):
    layer = getattr(kpe.layers, name)(4, dtype=map_of({pattern: policy}))
    y = layer(normal(2, 3, 4))
    assert modes(layer, layer.cell) == [None, "float8"]
    assert layer.cell.float8_policy.recipe == kpe.get(policy).recipe
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"


@pytest.mark.extension("memory")
def test_the_policy_of_a_built_layer_does_not_write_into_its_map():
    policy_map = map_of({".*/first": OURS})
    model = two_layers(policy_map, policy_map, kpe.layers)
    before = dict(policy_map.items())
    model.layers[1].dtype_policy = CURRENT
    assert modes(*model.layers) == ["float8", "float8"]
    kpe.memory(two_layers(policy_map, policy_map), 2, policy="float32")
    assert dict(policy_map.items()) == before


def test_a_map_that_does_not_fit_the_state_of_a_layer_is_refused():
    layer = kpe.layers.Dense(4, dtype="float32")
    layer.build((None, 4))
    with refused(ValueError, layer.name, "float8", "a plain policy"):
        layer.dtype_policy = map_of({".*": "float8_from_float32"}, "float32")
    assert layer.dtype_policy.name == "float32"


def test_a_map_may_be_the_global_policy():
    policy_map = map_of({".*/first": OURS})
    with kpe.policy_scope("float32"):
        earlier = two_layers(None, None)
    with kpe.policy_scope(policy_map):
        made = two_layers(None, None, kpe.layers)
        kept = two_layers(None, None)
        paths = [
            [entry.path for entry in kpe.convert(model).converted]
            for model in (earlier, kept)
        ]
        assert kpe.Float8DTypePolicy().source_name == "mixed_bfloat16"
        assert kpe.get("float8").source_name == "mixed_bfloat16"
    assert modes(*made.layers) == ["float8", None]
    assert paths == [["model/first"]] * 2


def test_a_map_may_be_the_policy_of_a_conversion():
    model = two_layers("float32", "float32")
    report = kpe.convert(model, map_of({".*/first": OURS}))
    (entry,) = report.converted
    assert (entry.path, entry.policy) == (
        "model/first",
        "float8/current_from_float32",
    )
    with pytest.raises(ValueError, match="not a recipe or a float8"):
        kpe.convert(model, map_of({".*": "float32"}))


@pytest.fixture
def fixed():
    return kpe.LossScaleDTypePolicy("mixed_float16", 256)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.extension("mixed")
def test_a_loss_scale_in_a_map_is_the_one_of_the_model(built, fixed):
    policy_map = map_of({".*/first": fixed}, "float32")
    layers = [keras.layers.Dense(4, dtype=policy_map, name="first")]
    model = keras.Sequential(
        [keras.Input((4,)), *layers] if built else layers, name="model"
    )
    kpe.mixed_precision.compile(model, "sgd", "mse", jit_compile=JIT)
    assert not model.optimizer.dynamic
    assert model.optimizer.initial_scale == 256
    scaled = kpe.mixed_precision.wrap_optimizer("sgd", policy_map)
    assert not scaled.dynamic and scaled.initial_scale == 256


@pytest.mark.extension("mixed")
def test_a_loss_scale_that_a_conversion_drops_is_warned_of(fixed):
    policy_map = map_of({".*/first": fixed}, "float32")
    model = two_layers(policy_map, "float32")
    with pytest.warns(UserWarning, match=r"FixedLossScale.*no loss scale"):
        kpe.convert(model, "float8")
    optimizer = kpe.mixed_precision.wrap_optimizer("sgd", fixed)
    kpe.mixed_precision.compile(model, optimizer, "mse")
    assert model.optimizer.initial_scale == 256
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Layers of")
        kpe.convert(two_layers("mixed_float16", "float32"), "float8")


@pytest.mark.extension("mixed")
def test_several_loss_scales_in_a_map_are_refused(fixed):
    other = kpe.LossScaleDTypePolicy("mixed_float16", 512)
    policy_map = map_of({"a": fixed, "b": other}, "float32")
    with pytest.raises(ValueError, match=r"different loss scales.*256.*512"):
        kpe.mixed_precision.wrap_optimizer("sgd", policy_map)


@pytest.mark.extension("mixed")
def test_the_policy_of_a_layer_is_read_out_of_its_map(fixed):
    policy_map = map_of({".*/first": fixed}, "float32")
    model = two_layers(policy_map, policy_map)
    found = map(kpe.mixed_precision.experimental.get_layer_policy, model.layers)
    assert [policy.name for policy in found] == ["mixed_float16", "float32"]
    shown = [each.policy for each in kpe.inspect(model).layers]
    assert shown == ["mixed_float16", "float32"]


def test_a_model_under_a_map_is_saved_and_loaded_in_float8(tmp_path):
    policy_map = map_of({".*/first": OURS}, "float32")
    x = normal(2, 8)
    for layers in (keras.layers, kpe.layers):
        model = two_layers(policy_map, policy_map, layers)
        if layers is keras.layers:
            kpe.convert(model)
        y = numpy(model(x))
        model.save(tmp_path / "model.keras")
        again = kpe.load_model(tmp_path / "model.keras")
        assert modes(*again.layers) == ["float8", None]
        np.testing.assert_array_equal(numpy(again(x)), y)
