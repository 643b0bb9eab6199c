"""What files say of optimizers and layers, also in earlier versions."""

import pathlib

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import (
    DELAYED,
    float8_layers,
    float_weights,
    predictions,
    states_of,
)
from saving_models import assert_equal
from steps import numpy

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:__array__:DeprecationWarning",
    "ignore:Skipping nested container",  # where a layer did not load
    "ignore:.*layers that were in float8",  # see test_lost_float8.py
)
GOLDENS = pathlib.Path(__file__).parents[2] / "goldens" / "files"


@keras.saving.register_keras_serializable("test_loading")
class OwnCompile(keras.Sequential):
    def compile(self, name, **kwargs):
        super().compile(optimizer=name, loss="mse", **kwargs)
        self.compiled_by = name

    def get_compile_config(self):
        return {"name": self.compiled_by}

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))


def test_an_optimizer_that_the_user_names_stays_a_name(tmp_path):
    model = OwnCompile([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("SGD")
    kpe.convert(model)
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    assert loaded.compiled_by == "SGD"
    assert type(loaded.optimizer) is type(model.optimizer)


def test_a_layer_of_the_package_gets_the_policy_that_was_saved(tmp_path):
    """A block that makes float8 layers, whose policy was changed since."""
    model = keras.Sequential([keras.Input((4,)), Float8Block()])
    kpe.convert(model, "float8/8_from_float32")
    model.save(tmp_path / "model", zipped=False)
    loaded = kpe.load_model(tmp_path / "model")
    (layer,) = float8_layers(loaded)
    assert layer.dtype_policy.full_name == "float8/8_from_float32"
    assert_equal(states_of(model), states_of(loaded))


@keras.saving.register_keras_serializable("test_loading")
class Float8Block(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = kpe.layers.Dense(4, dtype=DELAYED)

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x):
        return self.inner(x)


@keras.saving.register_keras_serializable("test_loading")
class Attention(keras.layers.MultiHeadAttention):
    """A user's own, whose `__init__` knows nothing of float8."""

    def call(self, query, value, key=None, **kwargs):
        return super().call(query, value, key, **kwargs)


@keras.saving.register_keras_serializable("test_loading")
class Attentive(keras.layers.Layer):
    def build(self, input_shape):
        self.attention = keras.layers.MultiHeadAttention(2, 3)
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        return self.attention(x, x)


@pytest.mark.full_except("a subclass", "as saved")
@pytest.mark.parametrize("kind", ["a block's", "a subclass", "as saved"])
def test_attention_computes_its_products_as_it_did(kind, tmp_path):
    inputs = keras.Input((5, 4))
    attention = Attention(2, 3)
    if kind == "a subclass":
        outputs = attention(inputs, inputs)
    else:
        outputs = Attentive()(inputs)
    model = keras.Model(inputs, outputs)
    other = keras.models.clone_model(model)
    kpe.convert(model, DELAYED, attention="float8")
    model.save(tmp_path / "model.keras")
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")
    if kind == "as saved":
        kpe.load_weights(other, tmp_path / "model.keras", as_saved=True)
    else:
        plain = keras.saving.load_model(tmp_path / "model.keras")
        assert_equal(float_weights(model), float_weights(plain))
        other = kpe.load_model(tmp_path / "model.keras")
    modes = [m.quantization_mode for m in attention_layers(model)]
    assert modes == ["float8"]
    assert modes == [m.quantization_mode for m in attention_layers(other)]
    np.testing.assert_array_equal(numpy(model(x)), numpy(other(x)))


def attention_layers(model):
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.MultiHeadAttention)
    ]


# Files of earlier versions (see tests/saved_files.py)

LOADERS = {"keras": keras.saving.load_model, "kpe": kpe.load_model}


@pytest.mark.full
@pytest.mark.parametrize(
    "name, loader",
    [("layers", "keras"), ("layers", "kpe"), ("converted", "kpe")],
)
def test_files_of_earlier_versions_load(name, loader):
    model = LOADERS[loader](GOLDENS / f"{name}.keras")
    names = [x.dtype_policy.full_name for x in float8_layers(model)]
    assert names == [DELAYED] * {"layers": 2, "converted": 7}[name]
    with np.load(GOLDENS / f"{name}.npz") as numbers:
        assert_numbers(numbers, "weight", model.weights)
        assert_numbers(numbers, "slot", model.optimizer.variables)
        expected = numbers["outputs"]
    # Frameworks sum, and compute tanh and softmax, with other roundings. Where
    # that decides between two float8 numbers, one of the 24 inputs or more of
    # the last layer is off by 2^-3 at most; let two of them be.
    error = np.linalg.norm(predictions(model) - expected)
    assert error < 2**-3 * 2 / 24 * np.linalg.norm(expected)


def assert_numbers(numbers, kind, variables):
    names = sorted(name for name in numbers.files if name.startswith(kind))
    assert_equal([numbers[name] for name in names], variables)
