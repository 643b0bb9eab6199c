"""Plain `keras.saving.load_model` says which float8 layers it lost."""

import copy
import io
import pickle
import threading
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import (
    BUILDERS,
    DELAYED,
    converted,
    float8_layers,
    float_weights,
    stock,
)

LOST = "layers that were in float8"


def complaints(load, *args):
    """What is warned of float8, and what was loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(*args)
    return model, [x for x in caught if LOST in str(x.message)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A converted model with a block, and the files of it."""
    model = converted("blocks")
    folder = tmp_path_factory.mktemp("lost")
    model.save(folder / "model.keras")
    model.save(folder / "model", zipped=False)
    return model, folder


@pytest.mark.full_except("model")
@pytest.mark.parametrize("name", ["model.keras", "model"])
def test_lost_layers_are_counted_once_with_the_way_to_keep_them(name, saved):
    model, folder = saved
    loaded, found = complaints(keras.saving.load_model, folder / name)
    (warning,) = found
    before, now = len(float8_layers(model)), len(float8_layers(loaded))
    assert 0 < now < before
    message = str(warning.message)
    assert message.startswith(f"{before - now} of the {before} layers")
    assert "keras_policy_ext.load_model(path)" in message
    assert str(folder / name) in message
    assert warning.filename == __file__, "points at the user's line"


def test_what_is_loaded_is_what_keras_loads(saved):
    _, folder = saved
    load = keras.src.saving.saving_lib._load_model_from_fileobj
    for_all = None, True, True  # Custom objects, compile and safe mode.
    with (folder / "model.keras").open("rb") as file:
        loaded, (_,) = complaints(load, file, *for_all)
        plain, silence = complaints(load.__wrapped__, file, *for_all)
    assert not silence
    for a, b in zip(loaded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full_except("deepcopy")
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_in_memory_loses_nothing(copied, saved):
    model, _ = saved
    other, found = complaints(copied, model)
    assert not found
    classes = [[type(x) for x in float8_layers(m)] for m in (model, other)]
    assert classes[0] == classes[1]
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full_except("mixed")
@pytest.mark.parametrize("kind", BUILDERS)
def test_kpe_loses_nothing_and_says_nothing(kind, tmp_path):
    converted(kind).save(tmp_path / "model.keras")
    _, found = complaints(kpe.load_model, tmp_path / "model.keras")
    assert not found


def test_layers_that_come_back_by_themselves_are_not_warned_of(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    for policy in (DELAYED, "float8/current_from_float32", None):
        kpe.convert(model, policy) if policy else kpe.revert(model)
        model.save(tmp_path / "model.keras")
        path = tmp_path / "model.keras"
        loaded, found = complaints(keras.saving.load_model, path)
        assert len(float8_layers(loaded)) == bool(policy)
        assert not found


def test_frozen_attention_comes_back_without_a_word(tmp_path):
    """Its two products are in float8, and it has no kernel itself."""
    inputs = keras.Input((3, 4))
    attention = keras.layers.MultiHeadAttention(2, 2)
    model = keras.Model(inputs, attention(inputs, inputs))
    kpe.convert(model, "float8/current_from_float32", attention="float8")
    kpe.freeze(model)
    model.save(tmp_path / "model.keras")
    path = tmp_path / "model.keras"
    loaded, found = complaints(keras.saving.load_model, path)
    assert len(float8_layers(loaded)) == 5
    assert not found


def test_current_scaling_which_has_no_state_is_counted_too(tmp_path):
    model = stock("blocks")
    kpe.convert(model, "float8/current_from_float32", include="block/")
    model.save(tmp_path / "model.keras")
    path = tmp_path / "model.keras"
    _, (warning,) = complaints(keras.saving.load_model, path)
    assert str(warning.message).startswith("2 of the 2 layers")


def test_weights_alone_load_into_a_float32_model_in_silence(saved):
    model, folder = saved
    other = stock("blocks")
    _, found = complaints(other.load_weights, folder / "model.keras")
    assert not found
    for a, b in zip(float_weights(model), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_file_object_loads_as_ever(saved):
    """Keras takes one in this function; what it is called is not known."""
    _, folder = saved
    content = io.BytesIO((folder / "model.keras").read_bytes())
    content.name = str(folder / "model.keras")
    load = keras.src.saving.saving_lib.load_model
    loaded, found = complaints(load, content)
    assert loaded.built and not found


def test_compressed_archives_are_counted_too(saved, tmp_path):
    _, folder = saved
    path = tmp_path / "packed.keras"
    with (
        zipfile.ZipFile(folder / "model.keras") as archive,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    _, found = complaints(keras.saving.load_model, path)
    assert len(found) == 1


def test_no_array_is_read_to_count(saved, monkeypatch):
    from keras_policy_ext.saving import keras_hooks

    def read(*args):
        raise AssertionError("an array was read")

    _, folder = saved
    monkeypatch.setattr(h5py.Dataset, "__getitem__", read)
    with pytest.warns(UserWarning, match=LOST):
        keras_hooks.warn_of_lost_float8(stock("blocks"), folder / "model.keras")


def test_one_thread_that_uses_kpe_does_not_silence_another(saved, monkeypatch):
    from keras_policy_ext.saving import keras_hooks

    _, folder = saved
    found = []

    def load():
        keras_hooks.warn_of_lost_float8(stock("blocks"), folder / "model")

    monkeypatch.setattr(warnings, "warn", lambda *a, **k: found.append(a))
    with keras_hooks.loading("another.keras"):
        load()
        assert not found
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert len(found) == 1


def test_a_file_that_is_gone_or_damaged_since_ends_no_load(tmp_path):
    from keras_policy_ext.saving import keras_hooks

    model = stock("blocks")
    (tmp_path / "model.keras").write_bytes(b"PK\x03\x04 damaged")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.weights.h5").write_bytes(b"\x89HDF")
    paths = "gone.keras", "model.keras", "model", "gone"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in paths:
            keras_hooks.warn_of_lost_float8(model, tmp_path / name)
        keras_hooks.warn_of_lost_float8(model, "hf://who/what")
