import json
import pickle

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_policy_ext import policies, policy_names
from keras_policy_ext.policies import Float8DTypePolicy, get
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling
from keras_policy_ext.recipes.fields import FP8_FORMATS

SOURCES = st.sampled_from(
    [
        "mixed_bfloat16",
        "mixed_float16",
        "bfloat16",
        "float16",
        "float32",
        "float64",
    ]
)
FORMATS = st.sampled_from(FP8_FORMATS)
RECIPES = st.builds(
    DelayedScaling,
    amax_history_length=st.just(1024) | st.integers(1, 5000),
    margin=st.integers(0, 8),
    fp8_format=FORMATS,
    amax_compute=st.sampled_from(["max", "most_recent"]),
    initial_scale=st.sampled_from(["current", 1.0]),
) | st.builds(CurrentScaling, fp8_format=FORMATS, power_of_two=st.booleans())


def is_pattern(text):
    try:
        Float8DTypePolicy("float32", rules=[(text, None)])
    except ValueError:
        return False
    return True


TRICKY = [
    "_from_",
    ";rules=x",
    ";rules=\\[",
    '"',
    "\\d+",
    "é",
    "\n",
    "float8/16_from_x",
    "",
]
PATTERNS = st.sampled_from(TRICKY) | st.text(max_size=12).filter(is_pattern)
FLOAT8 = st.builds(Float8DTypePolicy, SOURCES, recipe=RECIPES)
RULES = st.lists(
    st.tuples(PATTERNS, st.none() | SOURCES | FLOAT8),
    max_size=4,
    unique_by=lambda rule: rule[0],
)
POLICIES = st.builds(Float8DTypePolicy, SOURCES, recipe=RECIPES, rules=RULES)

RICH = Float8DTypePolicy(
    "mixed_bfloat16",
    recipe=DelayedScaling(amax_history_length=16, margin=1),
    rules=[
        ("head", None),
        ("emb.*", "float32"),
        (".*/attention", "float8/current_from_mixed_bfloat16"),
    ],
)


def through_json(config):
    return json.loads(json.dumps(config))


# The grammar


@given(POLICIES)
def test_every_full_name_is_read_back_exactly(policy):
    again = get(policy.full_name)
    assert again == policy
    assert again.full_name == policy.full_name
    assert Float8DTypePolicy(policy.full_name) == policy


@given(POLICIES, POLICIES)
def test_full_names_are_equal_only_for_equal_policies(a, b):
    assert (a.full_name == b.full_name) == (a == b)


@given(POLICIES)
def test_full_names_are_printable_ascii_lines(policy):
    assert policy.full_name.isascii()
    assert policy.full_name.isprintable()


@given(POLICIES)
def test_repr_evaluates_to_the_policy(policy):
    assert eval(repr(policy)) == policy


@given(
    st.text(max_size=30)
    | st.text(max_size=15).map("float8_from_float32;rules={}".format)
    | st.text(max_size=15).map("float8/{}_from_float32".format)
)
def test_any_text_is_a_policy_or_a_value_error(text):
    try:
        policy = get(text)
    except ValueError:
        return
    assert isinstance(policy, keras.DTypePolicy)


@given(
    spec=st.sampled_from(["", "16", "current", "delayed(margin=1)"]),
    source=SOURCES,
    rules=st.lists(
        st.tuples(st.text(max_size=9), st.none() | st.text(max_size=9))
    ),
)
def test_names_are_taken_apart_as_they_were_put_together(spec, source, rules):
    parts = policy_names.parse(policy_names.render(spec, source, rules))
    assert parts == ("float8", spec or None, source, tuple(rules))
    if spec:
        name = policy_names.render(spec, source, rules, "qat")
        assert policy_names.parse(name) == ("qat", *parts[1:])


def test_dtype_names_are_not_taken_for_policy_names():
    for name in ("float8", "float8_e4m3fn", "float8_e5m2", "mixed_float16"):
        assert not policy_names.is_full_name(name)


# Configs


@given(POLICIES)
@settings(max_examples=30)
def test_configs_survive_json_and_keras(policy):
    config = through_json(policy.get_config())
    assert Float8DTypePolicy.from_config(config) == policy
    serialized = through_json(keras.dtype_policies.serialize(policy))
    assert keras.dtype_policies.deserialize(serialized) == policy
    assert keras.dtype_policies.get(serialized) == policy
    assert policies.serialize(policy) == keras.dtype_policies.serialize(policy)
    assert policies.deserialize(serialized) == policy


@given(POLICIES)
@settings(max_examples=30)
def test_pickles_keep_every_field(policy):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(policy, protocol)) == policy


def test_a_config_says_its_source_whatever_the_global_policy_is():
    config = Float8DTypePolicy("mixed_float16").get_config()
    keras.config.set_dtype_policy("float64")
    assert Float8DTypePolicy.from_config(config).source_name == "mixed_float16"


def test_the_registered_name_does_not_move_with_the_module():
    config = keras.dtype_policies.serialize(RICH)
    assert config["registered_name"] == "keras_policy_ext>Float8DTypePolicy"
    del config["module"]
    assert keras.dtype_policies.deserialize(config) == RICH


def test_a_dict_without_registration_is_understood_by_get():
    config = {"class_name": "Float8DTypePolicy", "config": RICH.get_config()}
    assert get(config) == RICH


def test_the_config_of_the_float8_policy_of_keras_is_understood():
    stock = keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", "mixed_float16", 7
    )
    expected = get("float8/7_from_mixed_float16")
    assert Float8DTypePolicy.from_config(stock.get_config()) == expected
    assert get(through_json(keras.dtype_policies.serialize(stock))) == expected


def test_serialize_takes_names_and_deserialize_takes_dicts_only():
    config = policies.serialize("mixed_float8")
    assert policies.deserialize(config) == get("mixed_float8")
    with pytest.raises(TypeError, match="Use `get`"):
        policies.deserialize("mixed_float8")


@pytest.mark.parametrize(
    "policy",
    [
        keras.DTypePolicy("mixed_float16"),
        keras.dtype_policies.get("int8_from_float32"),
    ],
)
def test_policies_of_keras_are_serialized_as_keras_does(policy):
    assert policies.deserialize(policies.serialize(policy)) == policy


# Stock layers and models


def test_stock_layers_keep_the_policy_through_their_configs():
    layer = keras.layers.LayerNormalization(dtype=RICH)
    config = through_json(keras.layers.serialize(layer))
    again = keras.layers.deserialize(config)
    assert again.dtype_policy == RICH
    direct = keras.layers.Dense(2, dtype=RICH)
    config = through_json(direct.get_config())
    assert keras.layers.Dense.from_config(config).dtype_policy == RICH


def stock_model():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, dtype=RICH, name="body")(inputs)
    x = keras.layers.LayerNormalization(dtype=RICH, name="emb_norm")(x)
    outputs = keras.layers.Dense(2, dtype=RICH, name="head")(x)
    return keras.Model(inputs, outputs)


def assert_same_model(model, other):
    for layer, twin in zip(model.layers[1:], other.layers[1:], strict=True):
        assert twin.dtype_policy == layer.dtype_policy == RICH
        assert twin.compute_dtype == layer.compute_dtype
        assert twin.quantization_mode is None


def test_a_keras_file_keeps_the_policy_of_every_stock_layer(tmp_path):
    model = stock_model()
    assert model.get_layer("emb_norm").compute_dtype == "float32"
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert_same_model(model, loaded)
    x = np.random.normal(size=(5, 4)).astype("float32")
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(keras.ops.cast(model(x), "float32")),
        keras.ops.convert_to_numpy(keras.ops.cast(loaded(x), "float32")),
    )


def test_cloned_models_keep_the_policy_of_every_stock_layer():
    model = stock_model()
    assert_same_model(model, keras.models.clone_model(model))


def test_a_file_written_under_a_global_policy_is_read_under_another(tmp_path):
    keras.config.set_dtype_policy(RICH)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    path = tmp_path / "model.keras"
    model.save(path)
    keras.config.set_dtype_policy("float32")
    loaded = keras.saving.load_model(path)
    assert loaded.layers[0].dtype_policy == RICH
    assert keras.config.dtype_policy().name == "float32"


def test_a_custom_layer_with_the_policy_reloads(tmp_path):
    @keras.saving.register_keras_serializable(package="test_policies")
    class Block(keras.layers.Layer):
        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.dense = keras.layers.Dense(units, dtype=self.dtype_policy)

        def build(self, input_shape):
            self.dense.build(input_shape)

        def call(self, x):
            return self.dense(x)

        def get_config(self):
            return {**super().get_config(), "units": self.units}

    model = keras.Sequential([keras.Input((4,)), Block(3, dtype=RICH)])
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert loaded.layers[0].dtype_policy == RICH
    assert loaded.layers[0].dense.dtype_policy == RICH
