"""Whole models that Keras's own `quantize("float8")` has made, in files."""

import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import float8_layers, states_of
from saving_models import in_shards
from steps import normal, numpy, state_of
from stock_float8 import (
    LENGTH,
    assert_same_numbers,
    inputs_for,
    own_numbers,
    short,
    stock_numbers,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)


@keras.saving.register_keras_serializable("test_stock_float8_files")
class Block(keras.layers.Layer):
    """Makes its layer itself, in the source policy."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(4, "tanh", name="inner")

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x):
        return x + self.inner(x)


@keras.saving.register_keras_serializable("test_stock_float8_files")
class EightWeights(keras.layers.Layer):
    """As many variables as a layer in float8, of other shapes."""

    def build(self, input_shape):
        shapes = [(4, 4), (4,), (), (4,), (), (4,), (), (3,)]
        self.parts = [
            self.add_weight(shape=s, initializer="ones", trainable=False)
            for s in shapes
        ]

    def call(self, x):
        return x @ self.parts[0]


def plain_model(policy=None):
    """A model before it is quantized; one layer may be made in float8."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 4))
    x = keras.layers.MultiHeadAttention(2, 2, name="attention")(inputs, inputs)
    x = EightWeights()(Block(name="block")(x))
    x = keras.layers.EinsumDense("abc,cd->abd", (6, 3), name="einsum")(x)
    x = keras.layers.Dense(3, name="short", dtype=policy)(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="plain")(x))


def stock_model():
    model = plain_model(short())
    for name in ("attention", "block", "einsum"):
        for layer in model.get_layer(name)._flatten_layers():
            if type(layer) in (keras.layers.Dense, keras.layers.EinsumDense):
                layer.quantize("float8")
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def steps(model, seeds):
    for seed in seeds:
        y = normal(8, 6, 2, seed=100 + seed)
        model.train_on_batch(inputs_for(model, seed), y)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A trained model in stock float8, and its files."""
    model = stock_model()
    steps(model, range(3))
    folder = tmp_path_factory.mktemp("stock")
    model.save(folder / "model.keras")
    model.save(folder / "model", zipped=False)
    model.save_weights(folder / "model.weights.h5")
    in_shards(model, folder)
    with (
        zipfile.ZipFile(folder / "model.keras") as archive,
        zipfile.ZipFile(
            folder / "packed.keras", "w", zipfile.ZIP_DEFLATED
        ) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    return model, folder


def stock_layers(model):
    return [x for x in model._flatten_layers() if hasattr(x, "inputs_scale")]


def assert_taken_over(stock_model, model):
    """Each layer in float8 has the numbers of the stock one of its path."""
    by_name = {layer.name: layer for layer in stock_layers(stock_model)}
    found = float8_layers(model)
    assert {layer.name for layer in found} == by_name.keys()
    for layer in found:
        theirs = by_name[layer.name]
        np.testing.assert_array_equal(numpy(layer.kernel), numpy(theirs.kernel))
        assert_same_numbers(own_numbers(layer), stock_numbers(theirs))
        length = LENGTH if layer.name == "short" else 1024
        assert layer.float8_policy.amax_history_length == length


@pytest.mark.full
@pytest.mark.parametrize("name", ["model.keras", "model", "packed.keras"])
@pytest.mark.slow_except("model")
def test_a_stock_model_comes_back_in_this_float8(name, stock, tmp_path):
    theirs, folder = stock
    model = kpe.load_model(folder / name)
    assert len(stock_layers(theirs)) == 7
    assert_taken_over(theirs, model)
    for layer in float8_layers(model):
        assert type(layer).__module__.startswith("keras_policy_ext")
    for a, b in zip(
        theirs.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    attention = model.get_layer("attention")
    assert type(attention) is kpe.layers.MultiHeadAttention
    assert attention.dtype_policy.full_name == "float8_from_float32"
    model.save(tmp_path / "again.keras")
    assert_taken_over(theirs, kpe.load_model(tmp_path / "again.keras"))


@pytest.mark.full
def test_a_stock_model_trains_on_and_is_reverted(stock):
    model = kpe.load_model(stock[1] / "model.keras")
    x, y = inputs_for(model), normal(8, 6, 2)
    losses = model.fit(x, y, epochs=5, batch_size=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    kpe.revert(model)
    assert not float8_layers(model)
    assert not stock_layers(model)


def test_keras_loads_no_composite_of_its_own_float8(stock):
    """Expires with Keras's repair: `rewritten_model` can then go."""
    _, folder = stock
    with pytest.raises(ValueError, match="could not be loaded"):
        keras.saving.load_model(folder / "model.keras")


@pytest.mark.parametrize(
    "name", ["model.keras", "model.weights.h5", "shards.weights.json"]
)
def test_weights_load_as_saved_into_a_plain_model(name, stock):
    theirs, folder = stock
    model = plain_model()
    kpe.load_weights(model, folder / name, as_saved=True)
    assert_taken_over(theirs, model)


def test_weights_load_into_a_model_converted_in_part(stock):
    theirs, folder = stock
    model = plain_model()
    kpe.convert(model, "float8/4_from_float32", include="attention|short")
    kpe.load_weights(model, folder / "model.weights.h5")
    by_name = {layer.name: layer for layer in stock_layers(theirs)}
    assert len(float8_layers(model)) == 5
    for layer in float8_layers(model):
        for operand, (scale, _) in state_of(layer).items():
            expected = getattr(by_name[layer.name], f"{operand}_scale")
            assert scale == numpy(expected)
    np.testing.assert_array_equal(
        numpy(model.get_layer("einsum").kernel), numpy(by_name["einsum"].kernel)
    )


def test_a_stock_file_that_does_not_fit_changes_nothing(stock, tmp_path):
    _, folder = stock
    path = tmp_path / "damaged.weights.h5"
    path.write_bytes((folder / "model.weights.h5").read_bytes())
    with h5py.File(path, "a") as file:
        file["layers/dense/vars/7"][()] = -1
    model = plain_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match="is damaged"):
        kpe.load_weights(model, path, as_saved=True)
    assert not states_of(model)
    for value, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, numpy(variable))


@pytest.mark.parametrize("as_saved", [False, True])
def test_a_model_in_the_float8_of_keras_reads_its_own_file(as_saved, tmp_path):
    def quantized():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.quantize("float8")
        return model

    theirs, model = quantized(), quantized()
    theirs.save_weights(tmp_path / "model.weights.h5")
    path = tmp_path / "model.weights.h5"
    kpe.load_weights(model, path, as_saved=as_saved)
    for found, expected in zip(model.weights, theirs.weights, strict=True):
        np.testing.assert_array_equal(numpy(found), numpy(expected))
