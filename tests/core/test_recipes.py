import dataclasses
import json
import pickle
import re
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_policy_ext as kpe
from keras_policy_ext import formats, recipes
from keras_policy_ext.recipes import CurrentScaling, DelayedScaling
from keras_policy_ext.recipes.fields import FP8_FORMATS

pytestmark = pytest.mark.any_backend

FORMATS = st.sampled_from(FP8_FORMATS)
DELAYED = st.builds(
    DelayedScaling,
    amax_history_length=st.integers(1, 10**6),
    margin=st.integers(0, recipes.LARGEST_MARGIN),
    fp8_format=FORMATS,
    amax_compute=st.sampled_from(["max", "most_recent"]),
    initial_scale=st.sampled_from(["current", 1.0]),
)
CURRENT = st.builds(
    CurrentScaling, fp8_format=FORMATS, power_of_two=st.booleans()
)
RECIPES = DELAYED | CURRENT


@given(RECIPES)
def test_spec_is_read_back_exactly(recipe):
    assert recipes.parse(recipe.spec) == recipe
    assert recipes.get(recipe.spec) == recipe


@given(RECIPES)
def test_config_is_read_back_exactly_through_json(recipe):
    config = json.loads(json.dumps(recipe.get_config()))
    assert type(recipe).from_config(config) == recipe
    serialized = json.loads(json.dumps(recipes.serialize(recipe)))
    assert recipes.get(serialized) == recipe
    assert recipes.get({"name": recipe.name, **config}) == recipe


@given(RECIPES)
def test_pickle_and_repr_keep_every_field(recipe):
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    scope = {
        "DelayedScaling": DelayedScaling,
        "CurrentScaling": CurrentScaling,
    }
    assert eval(repr(recipe), scope) == recipe


@given(RECIPES, RECIPES)
def test_equality_and_hash_are_over_all_fields(a, b):
    same = type(a) is type(b) and a.get_config() == b.get_config()
    assert (a == b) == same
    assert (a.spec == b.spec) == same
    if same:
        assert hash(a) == hash(b)


@given(st.text(max_size=40))
def test_any_text_is_a_recipe_or_a_value_error(text):
    try:
        recipe = recipes.parse(text)
    except ValueError:
        return
    assert recipes.parse(recipe.spec) == recipe


@pytest.mark.parametrize(
    ("recipe", "spec"),
    [
        (DelayedScaling(), ""),
        (DelayedScaling(amax_history_length=16), "16"),
        (DelayedScaling(margin=1), "delayed(margin=1)"),
        (
            DelayedScaling(margin=1, amax_history_length=16),
            "delayed(amax_history_length=16,margin=1)",
        ),
        (DelayedScaling(initial_scale=1.0), "delayed(initial_scale=1.0)"),
        (CurrentScaling(), "current"),
        (CurrentScaling(power_of_two=True), "current(power_of_two=True)"),
        (
            CurrentScaling(fp8_format="e4m3", power_of_two=True),
            "current(fp8_format='e4m3',power_of_two=True)",
        ),
    ],
)
def test_spec_has_only_changed_fields_in_field_order(recipe, spec):
    assert recipe.spec == spec


@pytest.mark.parametrize(
    ("spec", "recipe"),
    [
        ("delayed", DelayedScaling()),
        ("delayed()", DelayedScaling()),
        (" current ( power_of_two = True ) ", None),
        ("current( power_of_two = True )", CurrentScaling(power_of_two=True)),
        ("delayed(margin=0)", DelayedScaling()),
    ],
)
def test_parse_takes_equivalent_spellings(spec, recipe):
    if recipe is None:
        with pytest.raises(ValueError, match="Cannot read"):
            recipes.parse(spec)
    else:
        assert recipes.parse(spec) == recipe


@pytest.mark.parametrize(
    "spec",
    [
        "0",
        "-3",
        "1.5",
        "delayed(",
        "delayed(16)",
        "delayed(**{})",
        "delayed(margin=1,margin=2)",
        "delayed(margin=__import__('os'))",
        "delayed(margin=1)(margin=2)",
        "delayed(margin=1) or f()",
        "delayed(wrong=1)",
        "delayed(margin=-1)",
        "delayed(margin=18)",
        "16 16",
        "Delayed",
    ],
)
def test_malformed_specs_are_value_errors(spec):
    with pytest.raises(ValueError):
        recipes.parse(spec)


def make(cls, field):
    """A function that makes a recipe with a value of a field."""
    return lambda value: cls(**{field: value})


LENGTH = make(DelayedScaling, "amax_history_length")
NO_INTEGERS = [True, np.bool_(True), 4.0, np.float32(4), "4", None, [4]]
REFUSED = [  # The call, what it is given, the error, and words in its text.
    (LENGTH, [0, -3, np.int64(0)], ValueError, "integer >= 1"),
    (LENGTH, NO_INTEGERS, TypeError, "amax_history_length"),
    (make(DelayedScaling, "margin"), [-1, 18], ValueError, "margin"),
    (make(DelayedScaling, "margin"), [True, 1.5, "1"], TypeError, "margin"),
    *(
        (make(cls, "fp8_format"), ["e5m2", "E4M3", None, 1], ValueError, words)
        for cls in (DelayedScaling, CurrentScaling)
        for words in ("'hybrid' or 'e4m3' or 'hybrid_fnuz'",)
    ),
    (
        make(DelayedScaling, "amax_compute"),
        ["mean", None, 1],
        ValueError,
        "'max' or 'most_recent'",
    ),
    (
        make(DelayedScaling, "initial_scale"),
        [0, 2.0, True, "one", None, float("nan")],
        ValueError,
        "'current' or 1.0",
    ),
    (
        make(CurrentScaling, "power_of_two"),
        [1, 0, "True", None],
        TypeError,
        "True or False",
    ),
    (
        CurrentScaling().format_of,
        ["forward", "output", "x", None],
        ValueError,
        "inputs, kernel, outputs_grad",
    ),
    (
        CurrentScaling.from_config,
        [{"margin": 1}],
        ValueError,
        "fp8_format, power_of_two",
    ),
    (CurrentScaling.from_config, [3], TypeError, "Allowed: a recipe object"),
    (
        recipes.get,
        [3, 16, 1.0, True, [], {"class_name": "CurrentScaling", "config": 3}],
        TypeError,
        "Allowed: a recipe object",
    ),
    (
        recipes.get,
        ["unknown", "rowwise2", "none"],
        ValueError,
        "rowwise, block",
    ),
    (
        recipes.get,
        [{}, {"config": {}}, {"class_name": "X"}],
        ValueError,
        "Allowed: ",
    ),
    (recipes.parse, [None, 3], TypeError, "Allowed: a recipe object"),
    (
        recipes.parse,
        ["current(power_of_two=print('x'))"],  # It evaluates nothing.
        ValueError,
        "Cannot read",
    ),
    (recipes.deserialize, [None, b"current"], TypeError, "Allowed: a recipe"),
    (recipes.serialize, ["current"], TypeError, "Allowed: a recipe object"),
]


@pytest.mark.parametrize(
    ("call", "value", "error", "words"),
    [(call, x, *told) for call, values, *told in REFUSED for x in values],
)
def test_what_is_wrong_is_refused_with_what_is_allowed(
    call, value, error, words
):
    with pytest.raises(error, match=re.escape(words)) as raised:
        call(value)
    assert "Allowed: " in str(raised.value)


def test_the_largest_margin_leaves_one_number():
    largest = formats.get("float8_e4m3fn").max * 2.0**-recipes.LARGEST_MARGIN
    smallest = formats.get("float8_e4m3fn").smallest_subnormal
    assert smallest <= largest < 2 * smallest


def test_none_means_current_scaling():
    assert recipes.get(None) == CurrentScaling()


def test_an_empty_spec_is_delayed_scaling():
    assert recipes.parse("") == DelayedScaling()
    assert DelayedScaling().amax_history_length == 1024


def test_a_recipe_object_is_returned_as_it_is():
    recipe = CurrentScaling()
    assert recipes.get(recipe) is recipe


def test_names_come_in_order_of_definition():
    assert recipes.names()[:2] == ("current", "rowwise")


@pytest.mark.parametrize("value", [np.int64(4), np.int8(4), np.uint32(4), 4])
def test_numpy_integers_become_python_integers(value):
    recipe = DelayedScaling(amax_history_length=value, margin=value)
    assert recipe == DelayedScaling(amax_history_length=4, margin=4)
    assert type(recipe.amax_history_length) is int
    assert type(recipe.margin) is int


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1)])
def test_an_initial_scale_of_one_becomes_a_float(value):
    recipe = DelayedScaling(initial_scale=value)
    assert type(recipe.initial_scale) is float
    assert recipe == DelayedScaling(initial_scale=1.0)


def test_a_bool_of_numpy_becomes_one_of_python():
    assert CurrentScaling(power_of_two=np.bool_(True)).power_of_two is True


def test_arguments_are_keyword_only_and_fields_frozen():
    with pytest.raises(TypeError):
        DelayedScaling(16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DelayedScaling().margin = 2


@pytest.mark.parametrize("cls", [DelayedScaling, CurrentScaling])
def test_hybrid_is_wide_for_output_gradients_only(cls):
    recipe = cls(fp8_format="hybrid")
    assert recipe.format_of("inputs") == "float8_e4m3fn"
    assert recipe.format_of("kernel") == "float8_e4m3fn"
    assert recipe.format_of("outputs_grad") == "float8_e5m2"


@pytest.mark.parametrize("cls", [DelayedScaling, CurrentScaling])
def test_e4m3_is_the_same_for_all_operands(cls):
    recipe = cls(fp8_format="e4m3")
    used = {recipe.format_of(operand) for operand in recipes.OPERANDS}
    assert used == {"float8_e4m3fn"}
    assert used <= set(formats.names())


@pytest.mark.parametrize(
    ("name", "remembers"),
    [
        ("current", False),
        ("mxfp8", False),
        ("delayed", True),
        ("nvfp4", True),
        ("nvfp4(stochastic_rounding=False)", False),
    ],
)
def test_a_recipe_says_whether_a_kernel_has_a_state(name, remembers):
    assert recipes.get(name).remembers is remembers


def test_scale_options_are_what_scale_from_amax_takes():
    assert DelayedScaling(margin=2).scale_options == {
        "margin": 2,
        "power_of_two": False,
    }
    assert CurrentScaling(power_of_two=True).scale_options == {
        "margin": 0,
        "power_of_two": True,
    }


def test_a_new_recipe_is_one_dataclass(registry):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Tiled(recipes.Recipe):
        name: ClassVar[str] = "tiled"
        granularity: ClassVar[str] = "blockwise"
        tile: tuple[int, int] = (1, 128)

    recipe = Tiled(tile=(2, 2))
    assert "tiled" in recipes.names()
    assert recipes.get("tiled") == Tiled()
    assert recipe.spec == "tiled(tile=(2, 2))"
    assert recipes.parse(recipe.spec) == recipe
    assert recipes.get(recipes.serialize(recipe)) == recipe
    assert recipe.format_of("kernel") == "float8_e4m3fn"
    assert not recipe.remembers


def test_two_recipes_cannot_share_a_name(registry):
    with pytest.raises(ValueError, match="Two recipes have the name"):

        class Other(recipes.Recipe):
            name: ClassVar[str] = "current"


def test_granularity_is_told():
    assert DelayedScaling.granularity == "tensorwise"
    assert CurrentScaling().granularity == "tensorwise"


@pytest.mark.parametrize("fp8_format", FP8_FORMATS)
def test_products_without_state_keep_the_formats(fp8_format):
    delayed = recipes.DelayedScaling(fp8_format=fp8_format, margin=1)
    assert delayed.for_activations == recipes.CurrentScaling(
        fp8_format=fp8_format
    )
    current = recipes.CurrentScaling(fp8_format=fp8_format, power_of_two=True)
    assert current.for_activations is current


@pytest.mark.parametrize("text", ["nope", "nope("])
def test_errors_list_only_recipes_to_train_with(text):
    with pytest.raises(ValueError, match="nvfp4") as raised:
        recipes.get(text)
    assert "frozen" not in str(raised.value)
    assert ", ".join(recipes.names()) in str(raised.value)


# A name is read once


def test_a_name_is_read_and_checked_once():
    spec = "rowwise(kernel_grad='high_precision')"
    first = recipes.parse(spec)
    kpe.get(f"float8/{spec}_from_float32")
    before = recipes.check.cache_info().misses
    kpe.get(f"float8/{spec}_from_float32")
    assert recipes.parse(spec) is first
    assert recipes.check.cache_info().misses == before


def test_a_name_means_the_class_that_was_defined_last(registry):
    def define(fp8_format):
        class Again(CurrentScaling):
            name: ClassVar[str] = "defined_again"

            def quantization(self, operand, matmul):
                return recipes.Quantization(format=fp8_format)

        return Again

    for fp8_format in ("float8_e4m3fn", "float8_e4m3fnuz"):
        cls = define(fp8_format)
        found = recipes.parse("defined_again")
        assert type(found) is cls
        assert found.format_of("inputs") == fp8_format
