"""`Float8DTypePolicy`: how it is made and named, and when two are equal."""

import copy

import keras
import numpy as np
import pytest

from cases import FROM_3_16
from keras_policy_ext.policies import Float8DTypePolicy, get
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling
from stock_policies import FLOAT8_DTYPES, NOT_FLOATING, SOURCES, stock_float8

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
    outers = [Float8DTypePolicy("mixed_float16", recipe="current")]
    if not FROM_3_16:  # From then on Keras refuses its own there.
        outers.append(stock_float8("mixed_float16"))
    for policy in outers:
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
    full_name = "float8/current_from_mixed_bfloat16"
    assert get("mixed_float8") == get(full_name)
    assert get("mixed_float8").full_name == full_name
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
