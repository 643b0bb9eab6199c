"""Why `ext/export/_keras/` is needed."""

import importlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from hidden_names import hidden
from keras_policy_ext.ext.export import _keras as hub
from keras_policy_ext.ext.export._keras.symbolic import Symbols, sources


class Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self._query = keras.layers.EinsumDense("btd,dnh->btnh", (None, 2, 3))
        self.others = [keras.layers.Dense(4, name="other")]
        self.size = 7

    def build(self, shape):
        self._query.build(shape)
        self.others[0].build(shape)


@pytest.fixture
def layer():
    made = Attention()
    made.build((None, 5, 4))
    return made


def test_a_stand_in_has_symbols_for_weights_and_all_else_as_it_is(layer):
    symbols = Symbols()
    stand_in = symbols.stand_in(layer)
    kernel = stand_in._query.kernel
    assert isinstance(kernel, keras.KerasTensor)
    assert kernel.shape == (4, 2, 3)
    assert (
        kernel
        is stand_in._query.weights[0]
        is symbols.tensor(layer._query.weights[0])
    )
    assert stand_in.others[0].bias.shape == (4,)
    assert stand_in.size == 7
    assert not hasattr(stand_in, "missing")


def test_a_model_hands_out_stand_ins_for_its_layers(layer):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    stand_in = Symbols().stand_in(model)
    bias = stand_in.get_layer(model.layers[0].name).bias
    assert isinstance(bias, keras.KerasTensor)


def test_results_say_what_they_are_computed_of(layer):
    symbols = Symbols()
    query = symbols.stand_in(layer)._query
    other = symbols.stand_in(layer).others[0]
    both = ops.concatenate(
        [ops.reshape(query.kernel, (4, -1)), other.kernel], axis=-1
    )
    found = symbols.variables(ops.transpose(both))
    assert [id(v) for v in found] == [
        id(layer._query.weights[0]),
        id(layer.others[0].weights[0]),
    ]
    twice = ops.concatenate([other.kernel, other.kernel])
    assert len(symbols.variables(twice)) == 1
    assert sources(other.bias) == [other.bias]
    with pytest.raises(TypeError, match="does not depend on the weights"):
        symbols.variables(keras.KerasTensor((2,)))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int32"])
def test_results_are_computed_of_any_arrays(layer, dtype):
    """Codes of kernels too, though the symbols are floats."""
    symbols = Symbols()
    kernel = symbols.stand_in(layer)._query.kernel
    array = np.arange(24).astype(dtype).reshape(4, 2, 3)

    def of(result):
        got = symbols.evaluate(result, lambda variable: array)
        assert str(got.dtype) == dtype
        return got.tolist()

    matrix = ops.transpose(ops.reshape(kernel, (4, -1)))
    assert of(kernel) == array.tolist()
    assert of(matrix) == array.reshape(4, 6).T.tolist()
    assert of(kernel[1]) == array[1].tolist()
    assert of(ops.expand_dims(kernel, 0)) == array[None].tolist()


def test_a_frozen_layer_with_adapters_shows_the_kernel_first(layer):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    kpe.freeze(model)
    dense = model.layers[0]
    dense.enable_lora(1)
    (kernel,) = (v for v in dense.weights if v.name == "kernel")
    assert dense.weights[0] is not kernel  # Why it is needed.
    symbols = Symbols()
    stand_in = symbols.stand_in(dense)
    (found,) = symbols.variables(stand_in.kernel)
    assert found is kernel
    assert stand_in.weights[0] is stand_in.kernel
    assert stand_in.weights[1] is stand_in.bias


def test_keras_says_where_a_tensor_comes_from():
    """Fails where `sources` has to find another way."""
    x = keras.KerasTensor((2, 3))
    assert ops.transpose(x)._keras_history.operation._inbound_nodes
    assert [id(s) for s in sources(ops.transpose(x))] == [id(x)]


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ModuleNotFoundError("none", name="keras_hub"), "keras-hub 0.3"),
        (ModuleNotFoundError("none", name="keras_hub.src.a"), "keras-hub 0.3"),
        (ImportError("no name 'x'", name="safetensors"), "keras-hub 0.3"),
        (ImportError("for a reason"), "keras-hub 0.3"),
        (ModuleNotFoundError("none", name="safetensors"), "safetensors."),
        (ModuleNotFoundError("none", name="tensorflow.io"), "tensorflow."),
    ],
)
def test_what_keras_hub_lacks_is_named_as_what_to_install(
    error, package, monkeypatch
):
    def fails(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fails)
    for use in (
        lambda: hub.Converter("folder", {}),
        lambda: hub.write_tokenizer(None, "folder"),
    ):
        with pytest.raises(ImportError) as raised:
            use()
        assert f"Install {package}" in str(raised.value)


def test_what_needs_a_history_is_refused():
    symbols = Symbols()
    dense = keras.layers.Dense(2)
    dense.build((None, 2))
    kernel = symbols.tensor(dense.kernel)
    with (
        hidden(keras.KerasTensor, "_keras_history"),
        pytest.raises(TypeError, match=keras.__version__),
    ):
        symbols.variables(ops.transpose(kernel))
