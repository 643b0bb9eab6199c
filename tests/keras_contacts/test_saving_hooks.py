"""Why `_keras/saving_hooks.py` is needed. See `_keras/__init__.py`."""

import inspect
import warnings

import h5py
import keras

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


def test_a_layer_is_not_asked_whether_it_can_be_exported():
    assert members_about(keras.layers.Layer, "export") == []
    assert members_about(keras.Model, "export") == ["export"]


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


class Takes(keras.layers.Layer):
    """Has an argument and leaves the config to Keras."""

    def __init__(self, size=2, **kwargs):
        super().__init__(**kwargs)


class Overrides(Takes):
    """Overrides `get_config` and adds nothing."""

    def __init__(self, size=3, **kwargs):
        super().__init__(**kwargs)

    def get_config(self):
        return super().get_config()


def test_keras_takes_an_overridden_get_config_for_one_of_the_author():
    """Without its mark the arguments of the constructor are not saved."""
    assert Takes().get_config()["size"] == 2
    assert saving_hooks.is_default(Takes.get_config)
    assert "size" not in Overrides().get_config()
    assert not saving_hooks.is_default(Overrides.get_config)


def test_a_file_does_not_say_whether_the_loss_is_scaled():
    assert (
        "auto_scale_loss" in inspect.signature(keras.Model.compile).parameters
    )
    model = dense_model()
    model.compile("sgd", "mse", auto_scale_loss=False)
    assert "auto_scale_loss" not in model.get_compile_config()
    saving_hooks.amend_compile_config(model, {"auto_scale_loss": False})
    assert model.get_compile_config()["auto_scale_loss"] is False


def test_a_file_written_on_torch_names_a_private_class_of_optimizer():
    model = dense_model()
    model.compile("sgd", "mse")
    optimizer = model.get_compile_config()["optimizer"]
    is_private = "keras.src" in optimizer["module"]
    assert is_private == (keras.backend.backend() == "torch")
