"""Frozen models through the loaders and copies of Keras and Python."""

import copy
import pickle

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import DELAYED, AttentionBlock, Block, Net, Scaled
from frozen_models import frozen_layers, outputs_of
from keras_policy_ext.policies.of_layers import layers_in_float8
from keras_policy_ext.saving import loading
from steps import normal, numpy

SHAPE = (3, 4)  # steps, features


def blocks():
    layers = [Block(4), AttentionBlock(), Scaled(3), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input(SHAPE), *layers])


def functional():
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, keras.layers.Dense(2)(Block(4)(inputs)))


def subclassed():
    model = Net()
    model.build((None, *SHAPE))
    return model


def layer():
    block = Block(4)
    block(normal(1, *SHAPE))
    return block


def loaded(model, folder, **kwargs):
    path = folder / "model.keras"
    model.save(path)
    return keras.saving.load_model(path, **kwargs)


def loaded_from_a_folder(model, folder):
    model.save(folder / "model", zipped=False)
    return keras.saving.load_model(folder / "model")


WAYS = {
    "load_model": loaded,
    "folder": loaded_from_a_folder,
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
}


def assert_alike(model, other):
    policies = [
        [(type(x).__name__, x.float8_policy) for x in layers_in_float8(each)]
        for each in (model, other)
    ]
    assert policies[0] == policies[1] and frozen_layers(other)
    for one, two in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))
    x = normal(2, *SHAPE)
    np.testing.assert_array_equal(outputs_of(model, x), outputs_of(other, x))


@pytest.mark.slow_except("blocks-load_model", "subclassed-pickle")
@pytest.mark.full_except("functional-deepcopy", "functional-folder")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [blocks, functional, subclassed])
def test_layers_that_a_class_makes_anew_are_frozen_again(tmp_path, build, way):
    model = build()
    kpe.freeze(model, granularity="tensor", activations="dynamic")
    assert_alike(model, WAYS[way](model, tmp_path))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_layer_that_makes_layers_is_copied(tmp_path, way):
    block = layer()
    kpe.freeze(block)
    assert_alike(block, WAYS[way](block, tmp_path))


@pytest.mark.full
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("way", [*WAYS, "kpe.load_model"])
@pytest.mark.slow_except("deepcopy")
def test_frozen_in_part_and_converted_in_part(tmp_path, way):
    model = subclassed()
    kpe.freeze(model, include="block")
    kpe.convert(model, DELAYED)
    model.compile("adam", "mse")
    data = normal(2, *SHAPE), normal(2, 3)
    model.fit(*data, verbose=0)
    if way == "kpe.load_model":
        model.save(tmp_path / "model.keras")
        other = kpe.load_model(tmp_path / "model.keras")
    else:
        other = WAYS[way](model, tmp_path)
    assert_alike(model, other)
    for each in (model, other):
        each.fit(*data, verbose=0)
    assert_alike(model, other)


def test_a_copy_is_a_model_of_its_own():
    model = subclassed()
    kpe.freeze(model)
    before = outputs_of(model, normal(2, *SHAPE))
    kpe.thaw(copy.deepcopy(model))
    np.testing.assert_array_equal(outputs_of(model, normal(2, *SHAPE)), before)


@pytest.mark.full
def test_without_its_optimizer(tmp_path):
    model = blocks()
    model.compile("adam", "mse")
    kpe.freeze(model)
    assert loaded(model, tmp_path).compiled
    assert not loaded(model, tmp_path, compile=False).compiled


def test_code_in_a_file_is_not_run_unless_asked(tmp_path):
    layers = [Block(4), keras.layers.Lambda(lambda x: 2 * x)]
    model = keras.Sequential([keras.Input(SHAPE), *layers])
    kpe.freeze(model)
    with pytest.raises(ValueError, match=r"[Ll]ambda"):
        loaded(model, tmp_path)
    assert_alike(model, loaded(model, tmp_path, safe_mode=False))


@pytest.mark.parametrize("way", WAYS)
def test_models_without_frozen_layers_are_left_to_keras(
    tmp_path, way, monkeypatch
):
    monkeypatch.setattr(loading, "load_model", None)
    model = keras.Sequential([keras.Input(SHAPE), keras.layers.Dense(3)])
    other = WAYS[way](model, tmp_path)
    for one, two in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(numpy(one), numpy(two))


def test_a_clone_is_frozen_alike_and_takes_the_weights():
    model = functional()
    kpe.freeze(model, exclude="block")
    clone = keras.models.clone_model(model)
    (head,) = frozen_layers(clone)
    assert not numpy(head._kernel).any()
    clone.set_weights(model.get_weights())
    assert_alike(model, clone)
