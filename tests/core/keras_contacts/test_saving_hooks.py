"""Why `_keras/saving_hooks.py` is needed. See `_keras/__init__.py`."""

import copy
import inspect
import json
import pickle
import warnings

import h5py
import keras
import pytest

import keras_policy_ext as kpe
from keras_policy_ext._keras import saving_hooks
from public_api import functions_about, members_about


def dense_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def test_keras_does_not_warn_of_groups_in_a_file_that_no_layer_reads(tmp_path):
    dense_model().save(tmp_path / "model", zipped=False)
    with h5py.File(tmp_path / "model" / "model.weights.h5", "a") as file:
        file["layers/dense/another/vars/0"] = [1.0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keras.saving.load_model(tmp_path / "model")
    assert [str(x.message) for x in caught] == []
    assert functions_about("after_load", "on_load", "load_hook") == []


def test_files_folders_and_copies_are_read_by_two_functions(
    tmp_path, monkeypatch
):
    from keras.src.saving import saving_lib

    read = []

    def note(source, *args, **kwargs):
        read.append(source)

    for name in ("_load_model_from_fileobj", "_load_model_from_dir"):
        monkeypatch.setattr(saving_lib, name, note)
    model = dense_model()
    copy.deepcopy(model)
    model.save(tmp_path / "model.keras")
    keras.saving.load_model(tmp_path / "model.keras")
    model.save(tmp_path / "model", zipped=False)
    keras.saving.load_model(tmp_path / "model")
    memory, file, folder = read
    assert memory.tell() >= 0 and not hasattr(memory, "name")
    assert file.name == str(tmp_path / "model.keras")
    assert folder == str(tmp_path / "model")
    assert members_about(keras.Model, "deepcopy") == []


@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.Adam,
        keras.losses.MeanSquaredError,
        keras.metrics.MeanSquaredError,
        lambda: keras.layers.Dense(1),
        dense_model,
    ],
    ids=["optimizer", "loss", "metric", "layer", "model"],
)
def test_whatever_keras_pickles_as_a_file_is_restored(make):
    original = make()
    restored = pickle.loads(pickle.dumps(original))
    assert type(restored) is type(original)
    assert restored.name == original.name


def test_a_layer_is_not_asked_whether_it_can_be_exported():
    assert members_about(keras.layers.Layer, "export") == []
    assert members_about(keras.Model, "export") == ["export"]


def refuse(*_):
    raise TypeError("refused")


def test_a_type_error_of_the_check_before_an_export_is_raised(monkeypatch):
    monkeypatch.setattr(keras.Model, "export", lambda self, format: format)
    saving_hooks.before_export(refuse)
    with pytest.raises(TypeError, match="refused"):
        dense_model().export("onnx")
    with pytest.raises(TypeError, match="positional argument"):
        dense_model().export("onnx", "another")


@pytest.mark.parametrize("metadata", ["{}", "[1]", "no JSON", None])
def test_a_type_error_of_what_describes_a_model_is_raised(
    monkeypatch, metadata
):
    from keras.src.saving import saving_lib

    name = "_serialize_model_as_json"
    monkeypatch.setattr(saving_lib, name, lambda model: ("config", metadata))
    saving_hooks.add_to_metadata(refuse)
    serialize = getattr(saving_lib, name)
    if metadata == "{}":
        with pytest.raises(TypeError, match="refused"):
            serialize(None)
    else:  # No dict of JSON: it is not described.
        assert serialize(None) == ("config", metadata)


@keras.saving.register_keras_serializable("contacts")
class Original(keras.layers.Layer):
    """A layer that files name."""


def test_to_register_a_class_under_a_name_takes_it_from_the_class_before():
    name = "contacts>Original"
    assert keras.saving.get_registered_object(name) is Original
    derived = type("Original", (Original,), {})
    saving_hooks.serialize_as(derived, Original)
    assert keras.saving.get_registered_name(derived) == name
    assert keras.saving.get_registered_object(name) is Original
    try:
        keras.saving.register_keras_serializable("contacts")(derived)
        assert keras.saving.get_registered_object(name) is derived
    finally:
        keras.saving.register_keras_serializable("contacts")(Original)


def test_a_file_written_on_torch_names_a_private_class_of_optimizer():
    model = dense_model()
    model.compile("sgd", "mse")
    optimizer = model.get_compile_config()["optimizer"]
    is_private = "keras.src" in optimizer["module"]
    assert is_private == (keras.backend.backend() == "torch")


def test_keras_loads_a_model_with_its_weights_or_a_config_that_shares_none():
    """Nothing public makes the model of a file without its weights."""
    assert "weights" not in str(inspect.signature(keras.saving.load_model))
    policy = keras.initializers.Ones()
    config = keras.saving.serialize_keras_object([policy, policy])
    with_ids = [dict(each, shared_object_id=7) for each in config]
    first, second = keras.saving.deserialize_keras_object(with_ids)
    assert first is not second
    text = json.dumps(dict(enumerate(with_ids))).encode()
    made = saving_hooks.model_of(text, None, safe_mode=True)
    assert made["0"] is made["1"]


def test_a_frozen_model_is_refused_where_its_config_cannot_be_read(monkeypatch):
    monkeypatch.setattr(saving_hooks, "_saving_lib", None)
    with pytest.raises(ImportError, match="_model_from_config"):
        saving_hooks.model_of(b"{}", None, safe_mode=True)


class Remembers(keras.layers.Layer):
    """Has a file beside the weights."""

    word = ""

    def save_assets(self, folder):
        with open(f"{folder}/word.txt", "w") as file:
            file.write(self.word)

    def load_assets(self, folder):
        with open(f"{folder}/word.txt") as file:
            self.word = file.read()


def test_assets_are_read_while_weights_of_a_model_are_and_not_alone(tmp_path):
    assert functions_about("load_assets") == []
    layer = Remembers()
    layer.word = "kept"
    model = keras.Sequential([keras.Input((2,)), layer])
    model.save(tmp_path / "model", zipped=False)
    layer.word = ""
    model.load_weights(tmp_path / "model" / "model.weights.h5")
    assert layer.word == ""
    saving_hooks.load_assets(model, tmp_path / "model" / "assets")
    assert layer.word == "kept"


def test_assets_that_are_damaged_are_an_error(tmp_path):
    layer = Remembers(name="remembers")
    model = keras.Sequential([keras.Input((2,)), layer])
    model.save(tmp_path / "model", zipped=False)
    for path in (tmp_path / "model" / "assets").rglob("word.txt"):
        path.unlink()
    with pytest.raises(ValueError, match="'remembers' did not load"):
        saving_hooks.load_assets(model, tmp_path / "model" / "assets")


def test_a_file_does_not_say_the_policy_of_a_model_itself(tmp_path):
    path = tmp_path / "model.keras"
    with kpe.policy_scope("mixed_bfloat16"):
        inputs = keras.Input((2,))
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    assert "dtype" not in model.get_config()
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert loaded.dtype_policy.name == "float32"
    assert kpe.load_model(path).dtype_policy.name == "mixed_bfloat16"
