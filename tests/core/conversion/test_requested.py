"""Which policy `convert` gives: its words, and conversion in several steps."""

import re

import keras
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.conversion.requested import Requested
from small_models import LITTLE

CURRENT = "float8/current_from_float32"


def stack(*layers, name="stack"):
    return keras.Sequential([keras.Input((8,)), *layers], name=name)


def dense(name, **kwargs):
    return keras.layers.Dense(8, name=name, **kwargs)


def trunk_and_head(trunk, head="head"):
    """A Functional model with a new layer on one that is there."""
    outputs = dense(head)(trunk.layers[-1].output)
    return keras.Model(trunk.inputs, outputs, name="model")


def policies_of(report):
    return [(entry.path, entry.policy) for entry in report.converted]


# Words


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("curent", "current"),
        ("rowwsie", "rowwise"),
        ("Current", "current"),
        ("mxfp_8", "mxfp8"),
        ("Tensorwise", "current"),
        ("blockwise", "block"),
        ("hybrid", "current"),
        ("e4m3", "current(fp8_format='e4m3')"),
        ("FP8", "float8"),
        ("mixed_fp8", "mixed_float8"),
    ],
)
def test_words_that_name_nothing_are_refused_alike_with_what_was_meant(
    word, meant
):
    model = stack(dense("a"))
    for call in (
        lambda: kpe.convert(model, word),
        lambda: kpe.convert(model, recipe=word),
        lambda: kpe.get(word),
        lambda: kpe.set_dtype_policy(word),
        lambda: kpe.Float8DTypePolicy(word),
        lambda: kpe.Float8DTypePolicy("float32", recipe=word),
        lambda: kpe.recipes.get(word),
    ):
        with pytest.raises(ValueError, match="Did you mean") as caught:
            call()
        message = str(caught.value)
        assert message.startswith(repr(word))
        hint = re.search(
            r"Did you mean (the recipe )?(.*?)(, as in.*)?\? ", message
        )
        assert hint[2] in (repr(meant), "'current'", "'mxfp8'"), message
    assert type(model.layers[0]) is keras.layers.Dense


@pytest.mark.any_backend
def test_a_word_that_is_near_nothing_gets_no_suggestion():
    for call in (kpe.get, kpe.recipes.get, kpe.Float8DTypePolicy):
        with pytest.raises(ValueError, match=r"^'banana' .*Allowed") as caught:
            call("banana")
        assert "Did you mean" not in str(caught.value)


@pytest.mark.any_backend
def test_float8_means_the_default_recipe_everywhere():
    with kpe.policy_scope("mixed_float16"):
        default = kpe.Float8DTypePolicy("mixed_float16", recipe="current")
        assert kpe.get("float8") == default
        assert kpe.Float8DTypePolicy(recipe="float8") == default
        with kpe.policy_scope("float8"):
            assert kpe.dtype_policy() == default
    assert kpe.recipes.get("float8") == kpe.recipes.CurrentScaling()
    for arguments in ({"policy": "float8"}, {"recipe": "float8"}, {}):
        model = stack(dense("a", dtype="bfloat16"), dense("b"))
        assert policies_of(kpe.convert(model, **arguments)) == [
            ("stack/a", "float8/current_from_bfloat16"),
            ("stack/b", CURRENT),
        ]


@pytest.mark.any_backend
def test_a_recipe_may_be_given_by_its_own_name():
    for arguments in (
        {"recipe": "current"},
        {"recipe": kpe.recipes.CurrentScaling()},
        {"policy": "float8", "recipe": "current"},
        {"policy": "float8", "recipe": "float8"},
        {"policy": CURRENT, "recipe": "current"},
    ):
        report = kpe.convert(stack(dense("a")), **arguments)
        assert policies_of(report) == [("stack/a", CURRENT)]


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("tensorwise", "current"),
        ("tensorwise(power_of_two=True)", "current(power_of_two=True)"),
    ],
)
def test_torchaos_name_of_a_recipe_is_read_and_never_written(word, meant):
    written = f"float8/{meant}_from_float32"
    assert kpe.recipes.get(word).spec == meant
    for policy in (
        kpe.get(f"float8/{word}_from_float32"),
        kpe.Float8DTypePolicy("float32", recipe=word),
        keras.layers.Dense(8, dtype=f"float8/{word}_from_float32").dtype_policy,
    ):
        assert policy.full_name == written
        assert "tensorwise" not in repr((policy, policy.get_config()))
    for arguments in ({"policy": word}, {"recipe": word}):
        report = kpe.convert(stack(dense("a")), **arguments)
        assert policies_of(report) == [("stack/a", written)]
    with pytest.raises(ValueError, match="both give a recipe"):
        kpe.convert(stack(dense("a")), word, recipe="delayed")


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "rowwise", "recipe": "current"}, "both give a recipe"),
        ({"policy": CURRENT, "recipe": "rowwise"}, "disagree"),
        ({"policy": "float32", "recipe": "current"}, "'float32' is not"),
        ({"recipe": "fp8"}, "Did you mean 'current'"),
    ],
)
def test_policy_and_recipe_that_disagree_are_refused(arguments, message):
    model = stack(dense("a"))
    with pytest.raises(ValueError, match=message):
        kpe.convert(model, **arguments)
    assert type(model.layers[0]) is keras.layers.Dense


# In steps


@pytest.mark.parametrize("policy", [None, "delayed", CURRENT])
def test_a_new_head_gets_the_policy_of_the_conversion_before(policy):
    trunk = stack(dense("a"), dense("b"))
    first = kpe.convert(trunk, policy)
    model = trunk_and_head(trunk)
    report = kpe.convert(model)
    assert policies_of(report) == [("head", first.converted[0].policy)]
    assert not kpe.convert(model).converted


def test_include_and_then_all_converts_the_rest():
    model = stack(dense("a"), dense("b", dtype="bfloat16"))
    kpe.convert(model, "delayed", include="a$")
    assert policies_of(kpe.convert(model)) == [
        ("stack/b", "float8_from_bfloat16")
    ]


def test_rules_of_the_conversion_before_go_on():
    rules = [(".*/?head", None)]
    policy = kpe.Float8DTypePolicy("float32", rules=rules)
    trunk = stack(dense("a"))
    kpe.convert(trunk, policy)
    model = trunk_and_head(trunk)
    report = kpe.convert(model)
    assert not report.converted
    assert "a rule" in report.skipped[-1].reason
    report = kpe.convert(trunk_and_head(trunk, "other"))
    assert policies_of(report) == [("other", "float8_from_float32")]


def test_the_conversion_before_is_known_after_save_and_load(tmp_path):
    trunk = stack(dense("a"))
    kpe.convert(trunk, "delayed")
    trunk.save(tmp_path / "trunk.keras")
    for load in (kpe.load_model, keras.saving.load_model):
        model = trunk_and_head(load(tmp_path / "trunk.keras"))
        assert policies_of(kpe.convert(model)) == [
            ("head", "float8_from_float32")
        ]


def test_two_policies_before_are_refused_where_a_layer_needs_one():
    model = stack(dense("a"), dense("b"), dense("c"))
    kpe.convert(model, "current", include="a$")
    kpe.convert(model, "rowwise", include="b$")
    with pytest.raises(ValueError, match=r"'stack/c'.*current.*rowwise"):
        kpe.convert(model)
    assert type(model.layers[2]) is keras.layers.Dense
    assert not kpe.convert(model, exclude="c$").converted
    assert len(kpe.convert(model, "current").converted) == 2


@pytest.mark.filterwarnings("ignore:`convert` has changed nothing")
@pytest.mark.parametrize("layers", [keras.layers, kpe.layers])
def test_layers_beside_those_made_in_float8_stay_each_time(layers):
    policy = kpe.get(CURRENT)
    made = layers.Dense(8, name="made", dtype=policy)
    model = stack(made, dense("plain"))
    for _ in range(2):
        report = kpe.convert(model)
        assert "its own policy is float32" in report.skipped[-1].reason
        assert type(model.layers[1]) is keras.layers.Dense
    assert model.layers[0].quantization_mode == "float8"


def test_a_call_that_changes_nothing_beside_plain_layers_says_so():
    made = kpe.layers.Dense(8, name="made", dtype=kpe.get(CURRENT))
    model = stack(made, dense("plain"))
    with pytest.warns(UserWarning, match=r"changed nothing.*'stack/plain'"):
        kpe.convert(model)


def test_a_reverted_layer_has_no_policy_from_before():
    model = stack(dense("a"), dense("b"))
    kpe.convert(model, "delayed", include="a$")
    kpe.revert(model)
    assert policies_of(kpe.convert(model)) == [
        ("stack/a", CURRENT),
        ("stack/b", CURRENT),
    ]


@pytest.mark.filterwarnings(LITTLE)
def test_a_frozen_trunk_says_nothing_of_the_head():
    trunk = stack(dense("a"))
    kpe.convert(trunk, "delayed")
    kpe.freeze(trunk)
    model = trunk_and_head(trunk)
    asked = Requested.read(model, None, None)
    assert [p.full_name for p in asked.policies] == [CURRENT]
