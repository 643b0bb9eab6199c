"""Integers in files of safetensors, and in our own that are damaged."""

import json

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.export import plain
from steps import normal, numpy


def frozen(**how):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(7, name="dense")
    model = keras.Sequential([keras.Input((65,)), layer], name="m")
    kpe.freeze(model, **how)
    return model


@pytest.mark.parametrize(
    "weights", ["int8", "int4", "int3", "int2", "float4_e2m1fn"]
)
def test_a_file_of_safetensors_has_them_in_a_byte(weights, tmp_path):
    model = frozen(weights=weights, granularity="group")
    path = tmp_path / "model.safetensors"
    kpe.export(model, path, format="safetensors")
    found = plain.read(path)["m/dense/kernel"]
    stored = model.layers[0].kernel.stored
    assert (found.weights, found.granularity) == (weights, "group32")
    np.testing.assert_array_equal(found.codes, stored.codes)
    np.testing.assert_array_equal(found.dequantized(), stored.dequantized())


def damaged(group, change):
    """Change the header of a frozen layer's group."""
    header = json.loads(group["stored"][()].tobytes())
    change(header)
    del group["stored"]
    group["stored"] = np.frombuffer(json.dumps(header).encode(), "uint8")


def cut(group):
    codes = group["kernel"][()][:-1]
    del group["kernel"]
    group["kernel"] = codes


DAMAGES = {
    "no shapes": lambda g: damaged(g, lambda h: h.pop("shapes")),
    "another shape": lambda g: damaged(
        g, lambda h: h["shapes"].update(kernel=[65, 9])
    ),
    "no size": lambda g: damaged(
        g, lambda h: h["shapes"].update(kernel=[-65, -7])
    ),
    "of no kernel": lambda g: damaged(g, lambda h: h["shapes"].update(b=[7])),
    "a byte less": cut,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(damage, tmp_path):
    model = frozen(weights="int4")
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    before = numpy(model(normal(2, 65)))
    with h5py.File(path, "a") as file:
        DAMAGES[damage](file["layers/dense/vars"])
    for call in (
        lambda: model.load_weights(path),
        lambda: kpe.load_weights(model, path),
    ):
        with pytest.raises(ValueError, match="damaged") as error:
            call()
        assert "Allowed" in str(error.value)
    np.testing.assert_array_equal(numpy(model(normal(2, 65))), before)


def test_a_file_loads_dequantized_into_a_stock_model(tmp_path):
    model = frozen(weights="int4", granularity="group")
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    other = keras.Sequential(
        [keras.Input((65,)), keras.layers.Dense(7, name="dense")], name="m"
    )
    kpe.load_weights(other, path, dequantize=True)
    x = normal(3, 65)
    np.testing.assert_allclose(
        numpy(other(x)), numpy(model(x)), rtol=1e-5, atol=1e-5
    )


def test_a_file_with_the_first_name_of_the_policy_loads(tmp_path, monkeypatch):
    model = frozen(weights="int4", granularity="group")
    policy = model.layers[0].float8_policy
    with monkeypatch.context() as patch:
        patch.setattr(type(policy.recipe), "mode", "float8")
        assert policy.full_name.startswith("float8/frozen(weights='int4'")
        model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].float8_policy == policy
    np.testing.assert_array_equal(
        numpy(loaded(normal(2, 65))), numpy(model(normal(2, 65)))
    )


@pytest.mark.parametrize("weights", ["int4", "int3"])
def test_codes_out_of_range_are_refused(weights):
    model = frozen(weights=weights)
    kernel = model.layers[0].kernel
    codes = np.full(kernel.shape, 100, "uint8")
    with pytest.raises(ValueError, match="codes out of range"):
        kernel.assign(codes)


@pytest.mark.full
@pytest.mark.extension("cli")
def test_the_command_keeps_what_a_model_was_trained_for(tmp_path):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(7, name="dense")
    model = keras.Sequential([keras.Input((65,)), layer], name="m")
    kpe.convert(model, "int4(group=32)")
    model.save(tmp_path / "in.keras")
    given = ["shrink", str(tmp_path / "in.keras"), str(tmp_path / "out.keras")]
    import keras_policy_ext_cli

    assert keras_policy_ext_cli.main(given) == 0
    recipe = kpe.load_model(tmp_path / "out.keras").layers[0].kernel.recipe
    assert (recipe.weights, recipe.per) == ("int4", "group32")
