import copy
import importlib
import threading

import keras
import ml_dtypes
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import policies
from keras_policy_ext._keras import global_policy
from keras_policy_ext.policies import Float8DTypePolicy, get
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling

SOURCES = {
    "mixed_bfloat16": ("bfloat16", "float32"),
    "mixed_float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "float32": ("float32", "float32"),
    "float64": ("float64", "float64"),
}
NOT_FLOATING = ["int8", "int32", "uint8", "bool", "complex64"]
FLOAT8_DTYPES = ["float8_e4m3fn", "float8_e5m2"]


def stock_float8(source="mixed_bfloat16", length=16):
    return keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", source, length
    )


def built_dense(dtype, units=2):
    layer = keras.layers.Dense(units, dtype=dtype)
    layer.build((None, 4))
    return layer


# Construction


@pytest.mark.parametrize("source", SOURCES)
def test_a_policy_computes_and_stores_as_its_source(source):
    policy = Float8DTypePolicy(source)
    assert (policy.compute_dtype, policy.variable_dtype) == SOURCES[source]
    assert policy.name == policy.source_name == source
    assert policy.source_policy == keras.DTypePolicy(source)
    assert policy.default_policy == keras.DTypePolicy(source)


def test_a_policy_answers_float8_as_mode_and_none_to_keras():
    policy = Float8DTypePolicy("float32")
    assert policy.mode == "float8"
    assert policy.quantization_mode is None


def test_the_default_is_delayed_scaling_over_1024_steps():
    policy = Float8DTypePolicy("float32")
    assert policy.recipe == DelayedScaling()
    assert policy.amax_history_length == 1024
    assert policy.rules == ()


@pytest.mark.parametrize(
    "policy",
    [
        Float8DTypePolicy("float32", amax_history_length=16),
        Float8DTypePolicy("float32", amax_history_length=np.int64(16)),
        Float8DTypePolicy(
            "float32", recipe=DelayedScaling(amax_history_length=16)
        ),
        Float8DTypePolicy("float32", recipe="16"),
        Float8DTypePolicy("float32", recipe="delayed", amax_history_length=16),
        Float8DTypePolicy("float8/16_from_float32"),
        Float8DTypePolicy("float8/16_from_float32", amax_history_length=16),
        Float8DTypePolicy("float8/16_from_float32", recipe="16"),
        Float8DTypePolicy("float8_from_float32", amax_history_length=16),
        Float8DTypePolicy("float8_from_float32", recipe="16"),
        Float8DTypePolicy("float8", "float32", amax_history_length=16),
        Float8DTypePolicy("float8", "float32", 16),
        Float8DTypePolicy(
            mode="float8", source_name="float32", amax_history_length=16
        ),
        Float8DTypePolicy(keras.DTypePolicy("float32"), recipe="16"),
        Float8DTypePolicy(np.float32, recipe="16"),
        Float8DTypePolicy(stock_float8("float32")),
        Float8DTypePolicy(Float8DTypePolicy("float8/16_from_float32")),
        Float8DTypePolicy(
            "float32",
            recipe={"name": "delayed", "amax_history_length": 16},
        ),
    ],
)
def test_all_spellings_of_one_policy_are_equal(policy):
    assert policy == get("float8/16_from_float32")
    assert policy.amax_history_length == 16
    assert type(policy.amax_history_length) is int


@pytest.mark.parametrize(
    "arguments",
    [
        {"source_name": "float8/16_from_float32", "amax_history_length": 8},
        {"source_name": "float8/16_from_float32", "recipe": "current"},
        {"source_name": "float8/16_from_float32", "recipe": DelayedScaling()},
        {"source_name": "float8/current_from_float32", "recipe": "16"},
        {
            "source_name": "float8/current_from_float32",
            "amax_history_length": 16,
        },
        {
            "source_name": "float32",
            "recipe": DelayedScaling(),
            "amax_history_length": 16,
        },
        {
            "source_name": "float32",
            "recipe": DelayedScaling(amax_history_length=16),
            "amax_history_length": 1024,
        },
        {
            "source_name": "float32",
            "recipe": CurrentScaling(),
            "amax_history_length": 1024,
        },
        {
            "source_name": 'float8_from_float32;rules=[["a",null]]',
            "rules": [("b", None)],
        },
    ],
)
def test_name_recipe_and_length_that_disagree_are_refused(arguments):
    with pytest.raises(ValueError, match="disagree"):
        Float8DTypePolicy(**arguments)


@pytest.mark.parametrize("length", [0, -3])
def test_a_history_shorter_than_one_is_refused(length):
    with pytest.raises(ValueError, match="integer >= 1"):
        Float8DTypePolicy("float32", amax_history_length=length)


@pytest.mark.parametrize("length", [True, 1.0, "16", None])
def test_a_history_length_that_is_no_integer_is_refused(length):
    with pytest.raises(TypeError, match="integer >= 1"):
        Float8DTypePolicy("float32", amax_history_length=length)


@pytest.mark.parametrize("source", NOT_FLOATING + FLOAT8_DTYPES)
def test_a_source_that_does_not_compute_in_floating_point_is_refused(source):
    for spelling in (source, f"float8_from_{source}"):
        with pytest.raises(ValueError, match="floating point"):
            Float8DTypePolicy(spelling)


@pytest.mark.parametrize(
    "source", ["int8_from_float32", "float8_from_int8_from_float32"]
)
def test_a_quantized_source_is_refused(source):
    with pytest.raises(ValueError, match="plain policy"):
        Float8DTypePolicy(source)


def test_a_map_as_source_is_refused():
    with pytest.raises(ValueError, match="plain policy"):
        Float8DTypePolicy(keras.dtype_policies.DTypePolicyMap())


def test_a_source_whose_fields_would_be_lost_is_refused():
    class WithFields(keras.DTypePolicy):
        pass

    with pytest.raises(ValueError, match="settings would be lost"):
        Float8DTypePolicy(WithFields("float32"))


@pytest.mark.parametrize(
    "source", ["banana", "float8", 3, True, 1.5, object(), [], "mixed_int8"]
)
def test_nonsense_is_refused_with_what_is_allowed(source):
    if source == "float8":
        source = "float8/16"
    with pytest.raises(ValueError, match=r"Allowed: .*float8_from_<source>"):
        Float8DTypePolicy(source)


@pytest.mark.parametrize("mode", ["int8", "int4", "", "float32", 8])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match="Allowed: 'float8'"):
        Float8DTypePolicy(mode, "float32")
    with pytest.raises(ValueError, match="Allowed: 'float8'"):
        Float8DTypePolicy(mode=mode, source_name="float32")


def test_too_many_arguments_are_refused():
    for args, kwargs in [
        (("float8", "float32", 16, 3), {}),
        (("float8", "float32", 16), {"amax_history_length": 16}),
        (("float8", "float32"), {"mode": "float8"}),
    ]:
        with pytest.raises(TypeError, match="too many arguments"):
            Float8DTypePolicy(*args, **kwargs)


@pytest.mark.parametrize("args", [(), (None,), ("float8",), ("float8", None)])
def test_no_source_means_the_global_policy(args):
    keras.config.set_dtype_policy("mixed_float16")
    assert Float8DTypePolicy(*args) == Float8DTypePolicy("mixed_float16")


def test_no_source_under_a_global_float8_policy_means_its_source():
    outer = Float8DTypePolicy("mixed_float16", recipe="current")
    for policy in (outer, stock_float8("mixed_float16")):
        keras.config.set_dtype_policy(policy)
        assert Float8DTypePolicy() == Float8DTypePolicy("mixed_float16")


def test_the_recipe_says_the_history_length():
    assert Float8DTypePolicy("float32", recipe="current").recipe == (
        CurrentScaling()
    )
    current = Float8DTypePolicy("float32", recipe=CurrentScaling())
    assert current.amax_history_length is None


# Names


@pytest.mark.parametrize(
    ("full_name", "policy"),
    [
        ("float8_from_mixed_bfloat16", Float8DTypePolicy("mixed_bfloat16")),
        (
            "float8/16_from_mixed_bfloat16",
            Float8DTypePolicy("mixed_bfloat16", amax_history_length=16),
        ),
        (
            "float8/current_from_float32",
            Float8DTypePolicy("float32", recipe="current"),
        ),
        (
            "float8/delayed(amax_history_length=16,margin=1)_from_float16",
            Float8DTypePolicy(
                "float16",
                recipe=DelayedScaling(amax_history_length=16, margin=1),
            ),
        ),
        (
            'float8_from_float32;rules=[["head",null],["a\\"",'
            '"float8/current_from_float32"]]',
            Float8DTypePolicy(
                "float32",
                rules=[
                    ("head", None),
                    ('a"', Float8DTypePolicy("float32", recipe="current")),
                ],
            ),
        ),
    ],
)
def test_full_names_say_everything(full_name, policy):
    assert policy.full_name == full_name
    assert get(full_name) == policy


def test_mixed_float8_is_an_alias():
    assert get("mixed_float8") == Float8DTypePolicy("mixed_bfloat16")
    assert Float8DTypePolicy("mixed_float8") == get("mixed_float8")
    with_rules = get('mixed_float8;rules=[["head",null]]')
    assert with_rules.rules == (("head", None),)


@pytest.mark.parametrize(
    "name",
    [
        "float8/16",
        "float8/_from_float32",
        "float8x_from_float32",
        "float8_from_",
        "float8_from_float32;rules=",
        "float8_from_float32;rules={}",
        'float8_from_float32;rules=[["a"]]',
        'float8_from_float32;rules=[["a",3]]',
        "float8_from_float32;rules=[[1,null]]",
        "float8_from_float32 ",
        "mixed_float8;",
        "float8/banana_from_float32",
        "float8/0_from_float32",
        "float8/-3_from_float32",
    ],
)
def test_malformed_full_names_are_value_errors(name):
    with pytest.raises(ValueError):
        get(name)


def test_repr_is_readable_and_can_be_evaluated():
    for policy, text in [
        (Float8DTypePolicy("float32"), "Float8DTypePolicy('float32')"),
        (
            get("float8/16_from_float32"),
            "Float8DTypePolicy('float32', amax_history_length=16)",
        ),
        (
            get("float8/current_from_float32"),
            "Float8DTypePolicy('float32', recipe='current')",
        ),
        (
            Float8DTypePolicy("float32", rules=[("a", None)]),
            "Float8DTypePolicy('float32', rules=(('a', None),))",
        ),
    ]:
        assert repr(policy) == text
        assert eval(text) == policy


# Equality and immutability

DIFFERENT = [
    Float8DTypePolicy("float32"),
    Float8DTypePolicy("mixed_bfloat16"),
    Float8DTypePolicy("float32", amax_history_length=16),
    Float8DTypePolicy("float32", recipe="current"),
    Float8DTypePolicy("float32", recipe=DelayedScaling(margin=1)),
    Float8DTypePolicy("float32", rules=[("a", None)]),
    Float8DTypePolicy("float32", rules=[("a", "float16")]),
    Float8DTypePolicy("float32", rules=[("a", "mixed_float8")]),
    Float8DTypePolicy("float32", rules=[("a", None), ("b", None)]),
    Float8DTypePolicy("float32", rules=[("b", None), ("a", None)]),
]


def test_equality_and_hash_are_over_all_fields():
    assert len(set(DIFFERENT)) == len(DIFFERENT)
    for i, policy in enumerate(DIFFERENT):
        for j, other in enumerate(DIFFERENT):
            assert (policy == other) == (i == j)
            assert (policy != other) == (i != j)
        twin = get(policy.full_name)
        assert twin is not policy
        assert hash(twin) == hash(policy)


def test_other_policies_are_never_equal():
    policy = Float8DTypePolicy("float32")
    for other in (
        keras.DTypePolicy("float32"),
        stock_float8("float32", 1024),
        keras.dtype_policies.DTypePolicyMap(keras.DTypePolicy("float32")),
        "float8_from_float32",
        None,
    ):
        assert policy != other
        assert other != policy


def test_a_policy_without_rules_is_true():
    assert Float8DTypePolicy("float32")
    assert len(Float8DTypePolicy("float32")) == 0


@pytest.mark.parametrize("name", ["recipe", "rules", "name", "full_name"])
def test_properties_cannot_be_set(name):
    with pytest.raises(AttributeError):
        setattr(Float8DTypePolicy("float32"), name, None)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.__setitem__("a", "float16"),
        lambda p: p.__delitem__("a"),
        lambda p: p.update({"a": "float16"}),
        lambda p: p.pop("a"),
        lambda p: p.popitem(),
        lambda p: p.clear(),
    ],
)
def test_writes_are_refused_with_what_to_do_instead(write):
    policy = Float8DTypePolicy("float32", rules=[("a", None)])
    with pytest.raises(TypeError, match="rules="):
        write(policy)
    assert policy == Float8DTypePolicy("float32", rules=[("a", None)])


def test_copies_are_the_policy_itself():
    policy = Float8DTypePolicy("float32", rules=[("a", "float16")])
    assert copy.copy(policy) is policy
    assert copy.deepcopy({"a": [policy]})["a"][0] is policy


def test_later_changes_of_the_arguments_do_not_reach_the_policy():
    rules, source = [("a", None)], keras.DTypePolicy("float32")
    policy = Float8DTypePolicy(source, rules=rules)
    rules.append(("b", None))
    source._name = None  # Keras does this to the policies of its maps.
    assert policy == Float8DTypePolicy("float32", rules=[("a", None)])
    assert policy.source_policy.name == "float32"


def test_the_renaming_by_a_map_of_keras_does_no_harm():
    policy = Float8DTypePolicy("mixed_float16", recipe="current")
    policy_map = keras.dtype_policies.DTypePolicyMap()
    policy_map["a"] = policy
    policy_map.get_config()  # Sets `_name` of its policies to None.
    assert policy.name == "mixed_float16"
    assert policy == Float8DTypePolicy("mixed_float16", recipe="current")


def test_the_class_name_is_not_what_kerashub_matches():
    assert "DTypePolicyMap" not in Float8DTypePolicy.__name__
    assert isinstance(
        Float8DTypePolicy("float32"), keras.dtype_policies.DTypePolicyMap
    )


# Rules

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
    assert layers[0].float8_policy.recipe.history_length == 8
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


# get


@pytest.mark.parametrize("name", [*SOURCES, *NOT_FLOATING, *FLOAT8_DTYPES])
def test_get_makes_plain_policies_of_dtype_names(name):
    policy = get(name)
    assert type(policy) is keras.DTypePolicy
    assert policy.name == name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "float32"),
        (np.dtype("float16"), "float16"),
        (np.dtype("int8"), "int8"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        (float, "float32"),
        (bool, "bool"),
    ],
)
def test_get_takes_dtype_objects(dtype, name):
    assert get(dtype) == keras.DTypePolicy(name)


@pytest.mark.parametrize(
    ("module", "attributes"),
    [
        ("torch", {"bfloat16": "bfloat16", "float8_e5m2": "float8_e5m2"}),
        ("jax.numpy", {"bfloat16": "bfloat16", "float32": "float32"}),
        ("tensorflow", {"bfloat16": "bfloat16", "float16": "float16"}),
    ],
)
def test_get_takes_the_dtypes_of_each_framework(module, attributes):
    if module.split(".")[0] != keras.backend.backend():
        pytest.skip("only the framework in use is certain to be installed")
    framework = importlib.import_module(module)
    for attribute, name in attributes.items():
        dtype = getattr(framework, attribute)
        assert get(dtype) == keras.DTypePolicy(name)


def test_get_returns_policies_as_they_are():
    for policy in (
        keras.DTypePolicy("int32"),
        Float8DTypePolicy("float32"),
        keras.dtype_policies.get("int8_from_float32"),
        keras.dtype_policies.DTypePolicyMap(),
    ):
        assert get(policy) is policy


def test_get_none_is_the_global_policy():
    keras.config.set_dtype_policy("mixed_float16")
    assert get(None) is keras.config.dtype_policy()


@pytest.mark.parametrize("name", ["int8_from_float32", "int4_from_float32"])
def test_get_leaves_other_quantized_names_to_keras(name):
    assert get(name) == keras.dtype_policies.get(name)


@pytest.mark.parametrize("class_name", ["Policy", "PolicyV1"])
@pytest.mark.parametrize("name", ["mixed_float16", "float32"])
def test_get_reads_the_dicts_of_tf_keras(class_name, name):
    config = {"class_name": class_name, "config": {"name": name}}
    assert get(config) == keras.DTypePolicy(name)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"name": "_infer"},
        {"name": "mixed_float16", "loss_scale": {"class_name": "X"}},
        {"name": "float32", "other": 1},
        {"name": 3},
    ],
)
def test_dicts_of_tf_keras_that_say_more_are_refused(config):
    with pytest.raises(ValueError, match="Received"):
        get({"class_name": "Policy", "config": config})


@pytest.mark.parametrize(
    "wrong",
    [
        "banana",
        "Policy",
        "",
        "float8",
        "float8_e4m3",
        "int8_from_banana",
        "from_",
        "a_from_b",
        3,
        1.5,
        True,
        [],
        object(),
        {},
        {"class_name": "Policy"},
        {"class_name": "banana", "config": {}},
        {"class_name": "Dense", "config": {"units": 2}},
        ml_dtypes.float4_e2m1fn,
    ],
)
def test_what_means_no_policy_is_a_value_error_and_never_a_string(wrong):
    with pytest.raises(ValueError, match="Allowed"):
        get(wrong)


def test_the_float8_policy_of_keras_means_delayed_scaling():
    policy = policies.as_float8(stock_float8("mixed_float16", 7))
    assert policy == get("float8/7_from_mixed_float16")
    assert get(stock_float8("mixed_float16", 7)) == policy


@pytest.mark.parametrize("length", [0, -3, True])
def test_a_history_that_only_keras_accepts_is_refused(length):
    with pytest.raises((TypeError, ValueError), match="integer >= 1"):
        get(stock_float8("float32", length))


# The global policy


def test_set_dtype_policy_takes_names_and_policies():
    policies.set_dtype_policy("float8/16_from_mixed_bfloat16")
    expected = Float8DTypePolicy("mixed_bfloat16", amax_history_length=16)
    assert policies.dtype_policy() == expected
    assert keras.config.dtype_policy() == expected
    policies.set_dtype_policy(keras.DTypePolicy("float16"))
    assert keras.config.dtype_policy().name == "float16"
    policies.set_dtype_policy(stock_float8())
    assert policies.dtype_policy() == expected


@pytest.mark.parametrize("wrong", [*NOT_FLOATING, *FLOAT8_DTYPES, "banana"])
def test_what_is_refused_leaves_the_global_policy_unchanged(wrong):
    before = keras.DTypePolicy("mixed_float16")
    policies.set_dtype_policy(before)
    with pytest.raises(ValueError):
        policies.set_dtype_policy(wrong)
    assert policies.dtype_policy() is before


def test_none_resets_to_the_live_floatx():
    policies.set_dtype_policy("mixed_bfloat16")
    policies.set_dtype_policy(None)
    assert policies.dtype_policy().name == "float32"
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float16"
    assert keras.layers.Dense(1).compute_dtype == "float16"


def test_floatx_is_followed_after_keras_has_stored_it():
    policies.set_dtype_policy(None)
    assert keras.config.dtype_policy().name == "float32"  # Stores it.
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float16"
    assert keras.layers.Dense(1).compute_dtype == "float16"
    keras.config.set_floatx("float32")
    assert policies.dtype_policy().name == "float32"
    assert keras.layers.Dense(1).compute_dtype == "float32"


def test_a_policy_that_was_set_is_not_changed_by_floatx():
    policies.set_dtype_policy(None)
    policies.set_dtype_policy("float32")
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float32"
    policies.set_dtype_policy(None)
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_floatx("float32")
    assert policies.dtype_policy().name == "mixed_bfloat16"


def test_layers_keep_the_policy_they_were_built_with():
    policies.set_dtype_policy(None)
    layer = keras.layers.Dense(1)
    keras.config.set_floatx("float16")
    policies.dtype_policy()
    assert layer.compute_dtype == "float32"


def test_scopes_nest_and_restore_the_very_object():
    outer = keras.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(outer)
    with policies.policy_scope("mixed_float8") as policy:
        assert policy == get("mixed_float8")
        assert keras.config.dtype_policy() is policy
        with policies.policy_scope(None):
            assert policies.dtype_policy().name == "float32"
        assert keras.config.dtype_policy() is policy
    assert keras.config.dtype_policy() is outer


def test_a_scope_restores_on_an_exception():
    outer = keras.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(outer)
    with pytest.raises(KeyError), policies.policy_scope("float16"):
        raise KeyError
    assert keras.config.dtype_policy() is outer


def test_a_scope_restores_that_no_policy_was_set():
    policies.set_dtype_policy(None)
    with policies.policy_scope("mixed_float16"):
        pass
    keras.config.set_floatx("float16")
    assert keras.layers.Dense(1).compute_dtype == "float16"


def test_a_refused_scope_changes_nothing():
    outer = keras.DTypePolicy("mixed_float16")
    keras.config.set_dtype_policy(outer)
    with pytest.raises(ValueError), policies.policy_scope("int32"):
        pass
    assert keras.config.dtype_policy() is outer


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_the_global_policy_belongs_to_one_thread_unless_carried():
    def name():
        return keras.config.dtype_policy().name

    policies.set_dtype_policy("mixed_float16")
    carried = policies.carry_policy(name)
    policies.set_dtype_policy("mixed_bfloat16")
    assert in_thread(name) == "float32"
    assert in_thread(carried) == "mixed_float16"
    assert in_thread(lambda: (carried(), name())[1]) == "float32"
    assert carried() == "mixed_float16"
    assert name() == "mixed_bfloat16"
    assert carried.__name__ == "name"


def test_a_carried_policy_is_put_back_on_an_exception():
    def fail():
        raise KeyError

    carried = policies.carry_policy(fail)
    policies.set_dtype_policy("mixed_bfloat16")
    with pytest.raises(KeyError):
        carried()
    assert policies.dtype_policy().name == "mixed_bfloat16"


# Stock layers


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
@pytest.mark.parametrize("shared", ["mixed_float8", kpe.LossScaleDTypePolicy()])
def test_a_built_stock_layer_cannot_write_into_a_shared_policy(made, shared):
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


# Where Keras has moved its internals


def test_without_the_store_of_keras_the_public_functions_have_to_do(
    monkeypatch,
):
    monkeypatch.setattr(global_policy, "_global_state", None)
    with policies.policy_scope("mixed_float8"):
        assert keras.config.dtype_policy() == get("mixed_float8")
        policies.set_dtype_policy(None)
        assert keras.config.dtype_policy().name == "float32"
    policies.set_dtype_policy(None)
    keras.config.set_floatx("float16")
    assert policies.dtype_policy().name == "float16"
    assert keras.layers.Dense(1).compute_dtype == "float16"
