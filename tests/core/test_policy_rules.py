"""Rules of a policy: which layers are taken out, by path."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.policies import Float8DTypePolicy, get
from stock_policies import stock_float8

RULED = Float8DTypePolicy(
    "mixed_bfloat16",
    rules=[
        ("model/head", None),
        ("model/exact(1)", "float32"),
        (".*/attention/.*", "float8/current_from_mixed_float16"),
        (".*/attention/query", "float32"),
        ("emb.*", "float16"),
    ],
)
FLOAT8 = Float8DTypePolicy("mixed_bfloat16")


@pytest.mark.parametrize(
    ("path", "policy"),
    [
        ("model/head", keras.DTypePolicy("mixed_bfloat16")),
        ("model/head/dense", FLOAT8),
        ("a/model/head", FLOAT8),
        ("model/exact(1)", keras.DTypePolicy("float32")),
        ("m/attention/query", get("float8/current_from_mixed_float16")),
        ("embedding", keras.DTypePolicy("float16")),
        ("m/embedding", FLOAT8),
        ("dense", FLOAT8),
        (None, FLOAT8),
    ],
)
def test_the_first_rule_that_fully_matches_decides(path, policy):
    assert RULED.for_path(path) == policy


def test_a_policy_without_rules_is_its_own_policy_for_every_path():
    assert FLOAT8.for_path("any/path") is FLOAT8
    assert FLOAT8.for_path(None) is FLOAT8


def test_keras_gets_the_plain_policy_of_every_path():
    for path in ("model/head", "m/attention/query", "embedding", "dense"):
        plain, ours = RULED[path], RULED.for_path(path)
        assert type(plain) is keras.DTypePolicy
        assert plain.compute_dtype == ours.compute_dtype
        assert plain.variable_dtype == ours.variable_dtype


@pytest.mark.parametrize(
    "policy",
    [
        keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32", 8),
        Float8DTypePolicy("float32", amax_history_length=8),
    ],
    ids=["Keras's", "ours"],
)
def test_a_float8_policy_in_a_map_of_keras_is_followed(policy):
    policy_map = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policy_map["model/in_float8"] = policy
    layers = [
        kpe.layers.Dense(3, dtype=policy_map, name=name)
        for name in ("in_float8", "plain")
    ]
    keras.Sequential([keras.Input((4,)), *layers], name="model")
    assert [x.quantization_mode for x in layers] == ["float8", None]
    assert layers[0].float8_policy.amax_history_length == 8
    assert len(layers[0].float8_state.matrices) == 1
    assert layers[1].float8_policy is None


def test_a_policy_is_a_consistent_mapping_of_its_patterns():
    assert list(RULED) == [pattern for pattern, _ in RULED.rules]
    assert len(RULED) == 5
    assert all(pattern in RULED for pattern in RULED)
    assert "model" not in RULED and 3 not in RULED
    assert dict(RULED.items())["emb.*"] == keras.DTypePolicy("float16")
    assert RULED["model/exact(1)"] == keras.DTypePolicy("float32")


def test_rules_may_be_a_dict_or_an_iterator():
    expected = (("a", None), ("b", keras.DTypePolicy("float16")))
    for rules in (
        {"a": None, "b": "float16"},
        iter([["a", None], ("b", keras.DTypePolicy("float16"))]),
        [("a", None), ("b", np.float16)],
    ):
        assert Float8DTypePolicy("float32", rules=rules).rules == expected


def test_a_rule_takes_the_float8_policy_of_keras():
    policy = Float8DTypePolicy("float32", rules=[("a", stock_float8())])
    assert policy.for_path("a") == get("float8/16_from_mixed_bfloat16")


@pytest.mark.parametrize(
    "rules",
    ["a", 3, None, [("a",)], ["ab"], [("a", None, 1)], [(3, None)], b"ab"],
)
def test_rules_of_the_wrong_form_are_type_errors(rules):
    with pytest.raises(TypeError, match=r"pairs \(pattern, policy\)"):
        Float8DTypePolicy("float32", rules=rules)


@pytest.mark.parametrize(
    "rules",
    [
        [("(", None)],
        [("a", None), ("a", "float16")],
        [("a", "banana")],
        [("a", "int8")],
        [("a", "int8_from_float32")],
        [("a", Float8DTypePolicy("float32", rules=[("b", None)]))],
    ],
)
def test_rules_that_mean_nothing_are_value_errors(rules):
    with pytest.raises(ValueError, match="Allowed"):
        Float8DTypePolicy("float32", rules=rules)
