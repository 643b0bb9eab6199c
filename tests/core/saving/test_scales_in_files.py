"""A file says whether scales are powers of two, also one that did not say it.

The default depends on the device; a saved policy must not.
"""

import json

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import policies
from keras_policy_ext.backends import devices
from keras_policy_ext.policies.float8 import of_file
from keras_policy_ext.recipes import BlockScaling, RowwiseScaling

NAMES = ("rowwise", "block")
WEIGHTS = "model.weights.h5"


def policy(recipe, **options):
    return kpe.Float8DTypePolicy("float32", recipe=recipe, **options)


# What a name means in a program


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("name", "asks"),
    [
        ("cpu", False),
        ("cpu_bf16", False),
        ("h200", False),
        ("v100", False),
        ("mps", False),
        ("a100", True),
        ("ada", True),
        ("b200", True),
        ("mi300", True),
        ("v5e", True),
    ],
)
def test_the_device_decides_where_it_costs_speed(name, asks):
    with devices.pretend(name):
        assert policy("block").recipe.power_of_two is asks
        assert kpe.get("float8/block_from_float32").recipe.power_of_two is asks
        assert policy(BlockScaling()) == policy("block")
        # The scales of rows multiply the sum: 16 bits hold the rest.
        assert policy("rowwise").recipe.power_of_two is False
        assert policy("rowwise(power_of_two=True)").recipe.power_of_two is True


@pytest.mark.any_backend
@pytest.mark.parametrize("name", NAMES)
def test_a_policy_always_says_which_scales_it_has(name):
    made = policy(name)
    assert made.recipe.power_of_two is False
    spec = f"{name}(power_of_two=False)"
    assert made.full_name == f"float8/{spec}_from_float32"
    assert made.get_config()["recipe"]["config"]["power_of_two"] is False
    for other in (
        kpe.get(made.full_name),
        of_file(made.full_name),
        kpe.Float8DTypePolicy.from_config(made.get_config()),
        policies.deserialize(policies.serialize(made)),
    ):
        assert other == made
        assert hash(other) == hash(made)
    rule = policy("current", rules=[("a", f"float8/{name}_from_float32")])
    assert spec in rule.full_name


@pytest.mark.any_backend
def test_a_recipe_alone_leaves_it_open_and_does_not_round():
    for recipe in (RowwiseScaling(), BlockScaling()):
        assert recipe.power_of_two is None
        assert recipe.quantization("inputs", "forward").scale_rounding == (
            "nearest"
        )
        assert kpe.recipes.parse(recipe.spec) == recipe
        assert kpe.recipes.deserialize(kpe.recipes.serialize(recipe)) == recipe
    with pytest.raises(TypeError, match="True, False or None"):
        RowwiseScaling(power_of_two=1)


@pytest.mark.any_backend
def test_a_recipe_that_leaves_it_open_agrees_with_a_policy_that_does_not():
    rounded = policy("rowwise(power_of_two=True)")
    assert kpe.Float8DTypePolicy(rounded, recipe="rowwise") == rounded
    with pytest.raises(ValueError, match="disagree"):
        kpe.Float8DTypePolicy(rounded, recipe="rowwise(power_of_two=False)")


# What a name means in a file


@pytest.mark.any_backend
@pytest.mark.parametrize("name", NAMES)
def test_a_config_that_does_not_say_it_has_powers_of_two(name):
    full = f"float8/{name}_from_float32"
    rounded = policy(f"{name}(power_of_two=True)")
    read = kpe.Float8DTypePolicy.from_config
    fields = {"forward": "float8", "kernel_grad": "float8"}
    for recipe in (name, {"name": name}, {"name": name, **fields}):
        config = {"source_name": "float32", "recipe": recipe}
        assert read(config) == rounded
        serialized = {**policies.serialize(rounded), "config": config}
        assert kpe.get(serialized) == rounded
    assert read({"source_name": full}) == rounded
    assert of_file(full) == rounded
    rules = [["head", full], ["tail", None], ["rest", "float32"]]
    config = {"source_name": "float32", "recipe": "current", "rules": rules}
    assert read(config).for_path("head") == rounded
    packed = ',["tail",null],["rest","float32"]]'
    named = f'float8/current_from_float32;rules=[["head","{full}"]{packed}'
    assert of_file(named) == read(config)


@pytest.mark.any_backend
def test_wrong_rules_in_a_config_are_refused_as_in_a_call():
    for rules in ("head", [["head"]], [["a", None], ["a", None]], [1], None):
        with pytest.raises((TypeError, ValueError), match="Received"):
            kpe.Float8DTypePolicy.from_config(
                {"source_name": "float32", "rules": rules}
            )
    with pytest.raises(ValueError, match="Cannot read this as a float8"):
        of_file("float8/rowwise_from_")


def saved_as_before(name, folder):
    """A model in a file that does not say whether it has powers of two."""
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(6, name="one")]
    )
    model.build((None, 8))
    kpe.convert(model, f"{name}(power_of_two=True)")
    model.save(folder, zipped=False)
    said = f"{name}(power_of_two=True)"
    config = (folder / "config.json").read_text("utf-8")
    assert '"power_of_two": true' in config
    open_config = json.loads(config.replace('"power_of_two": true, ', ""))
    (folder / "config.json").write_text(json.dumps(open_config))
    with h5py.File(folder / WEIGHTS, "a") as file:
        group = file["layers/dense/float8_state/vars"]
        for key in ("policy", "given"):
            text = group[key][()].tobytes().decode()
            assert said in text
            del group[key]
            text = text.replace(said, name)
            group[key] = np.frombuffer(text.encode(), "uint8")
    return model


@pytest.mark.parametrize("name", NAMES)
def test_an_older_file_has_powers_of_two(name, tmp_path):
    folder = tmp_path / "model"
    model = saved_as_before(name, folder)
    x = np.linspace(-1, 1, 16, dtype="float32").reshape(2, 8)
    for loaded in (
        kpe.load_model(folder),
        keras.saving.load_model(folder),
    ):
        (layer,) = loaded.layers
        assert layer.float8_policy == policy(f"{name}(power_of_two=True)")
        np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    # What it was given is read as the file meant it, also when saved again.
    loaded.save(tmp_path / "again", zipped=False)
    again = kpe.load_model(tmp_path / "again")
    assert kpe.convert(again).converted == ()
    (layer,) = again.layers
    assert layer.float8_policy == policy(f"{name}(power_of_two=True)")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_device_keeps_its_scales(name, tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6)])
    kpe.convert(model, name)
    model.save(tmp_path / "model.keras")
    with devices.pretend("b200"):
        (layer,) = kpe.load_model(tmp_path / "model.keras").layers
    assert layer.float8_policy.recipe.power_of_two is False
