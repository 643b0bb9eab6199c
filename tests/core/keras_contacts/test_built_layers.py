"""Why `_keras/built_layers.py` is needed. See `_keras/__init__.py`."""

import warnings

import keras
import numpy as np
import pytest

from keras_policy_ext._keras import built_layers
from public_api import lists_with, members_about

BACKEND = keras.backend.backend()


def built_dense():
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    return layer


def test_a_built_layer_takes_neither_variables_nor_layers():
    layer = built_dense()
    for value in (keras.Variable(1.0), keras.layers.Dense(1)):
        with pytest.raises(ValueError, match="add new"):
            layer.another = value
    with built_layers.unlocked(layer):
        layer.another = keras.Variable(1.0)
    assert members_about(keras.layers.Layer, "lock", "untrack") == []


class Plain(keras.layers.Layer):
    """Takes one argument."""

    def call(self, inputs):
        return inputs


class Trains(keras.layers.Layer):
    """Is told whether it trains."""

    def call(self, inputs, training=None):
        return inputs * 2 if training else inputs


def test_a_layer_goes_on_as_the_class_it_was_made_of():
    x = np.ones((1, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), Plain()])
    layer = model.layers[0]
    layer.__class__ = Trains
    assert keras.ops.max(model(x, training=True)) == 1
    built_layers.swap_class(layer, Trains)
    assert keras.ops.max(model(x, training=True)) == 2


def with_attributes_put_back(remember):
    """A layer that got a variable and whose attributes are as before."""
    layer = keras.layers.Layer()
    objects, containers = remember(layer)
    attributes = [(each, dict(vars(each))) for each in objects]
    contents = [(each, list(each)) for each in containers]
    layer.another = variable = keras.Variable(1.0)
    for each, kept in attributes:
        vars(each).clear()
        vars(each).update(kept)
    for each, kept in contents:
        each.clear()
        each.extend(kept) if isinstance(each, list) else each.update(kept)
    return lists_with(layer, variable)


def test_keras_keeps_variables_in_more_than_attributes():
    kept = with_attributes_put_back(lambda layer: ([layer], []))
    assert {"variables", "weights"} <= set(kept)
    assert with_attributes_put_back(built_layers.bookkeeping) == []


@pytest.mark.skipif(BACKEND != "torch", reason="torch has parameters")
def test_a_layer_on_torch_keeps_its_variables_in_a_dictionary_too():
    layer = built_dense()
    assert any(each is layer.kernel.value for each in layer.parameters())
    assert not any(each is layer.kernel.value for each in vars(layer).values())
    objects, _ = built_layers.bookkeeping(layer)
    assert any(each is layer.torch_params for each in objects)


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="TensorFlow wraps what is assigned"
)
def test_an_optimizer_on_tensorflow_keeps_lists_in_wrappers():
    optimizer = keras.optimizers.SGD()
    wrappers = [
        each
        for each in vars(optimizer).values()
        if isinstance(each, list)
        and type(each).__module__.startswith("tensorflow.")
    ]
    assert wrappers
    objects, _ = built_layers.bookkeeping(optimizer)
    assert {id(x) for x in wrappers} <= {id(x) for x in objects}


def quantize_warnings(prepare):
    layer = keras.layers.ReLU(name="relu")
    prepare(layer)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), layer])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.quantize("int8")
    return [x for x in caught if "relu" in str(x.message).lower()]


def test_quantize_of_a_model_warns_of_layers_that_have_nothing_to_quantize():
    assert quantize_warnings(lambda layer: None)
    assert not quantize_warnings(built_layers.skip_in_quantize)


class AsLeaf(built_layers.QuantizedAsLeaf, keras.layers.Dense):
    """A `Dense` that is to be quantized with a state in it."""


@pytest.mark.skipif(
    hasattr(keras.quantizers, "QuantizationReport"),
    reason="Model.quantize visits all layers from Keras 3.16 on",
)
@pytest.mark.parametrize("cls", [keras.layers.Dense, AsLeaf])
def test_quantize_of_a_model_passes_by_layers_with_others_in_them(cls):
    layer = cls(1)
    layer.float8_state = keras.layers.Layer()
    layer.float8_state.built = True
    built_layers.skip_in_quantize(layer.float8_state)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.quantize("int8", type_check=False)
    assert (layer.quantization_mode == "int8") == (cls is AsLeaf)


def test_a_layer_that_is_deleted_as_an_attribute_stays_in_keras():
    for delete, stays in [(delattr, True), (built_layers.detach, False)]:
        layer = keras.layers.Layer()
        layer.inner = built_dense()
        kernel = layer.inner.kernel
        delete(layer, "inner")
        assert ("weights" in lists_with(layer, kernel)) == stays


@pytest.mark.skipif(BACKEND != "torch", reason="torch has parameters")
def test_parameters_on_torch_have_the_order_in_which_layers_came_in():
    layers = [keras.layers.Dense(2, name="outer") for _ in range(2)]
    for layer, when in zip(layers, ["before", "after"], strict=True):
        inner = keras.layers.Dense(3)
        inner.build((None, 2))
        if when == "before":
            layer.inner = inner
        layer.build((None, 2))
        if when == "after":
            with built_layers.unlocked(layer):
                layer.inner = inner

    def units():
        return [
            [parameter.shape[-1] for parameter in layer.parameters()]
            for layer in layers
        ]

    assert units() == [[3, 3, 2, 2], [2, 2, 3, 3]]
    built_layers.track_again(layers)
    assert units() == [[3, 3, 2, 2], [3, 3, 2, 2]]


class Codes(keras.Variable):
    """A variable of another class."""


def test_a_layer_makes_its_variables_itself_and_of_one_class():
    layer = keras.layers.Layer()
    assert type(layer.add_weight(shape=())) is keras.Variable
    assert members_about(keras.layers.Layer, "track_variable") == []
    variable = Codes(1.0, trainable=False)
    built_layers.track(layer, variable)
    assert "weights" in lists_with(layer, variable)
    layer.weight = variable
    assert sum(v is variable for v in layer.weights) == 1


def test_a_variable_whose_attribute_gets_another_one_stays_in_keras():
    def assign(layer, old, new):
        layer.weight = new

    for replace, stays in [
        (assign, True),
        (built_layers.replace_variable, False),
    ]:
        layer = keras.layers.Layer()
        layer.weight = old = keras.Variable(1.0)
        new = keras.Variable(2.0)
        replace(layer, old, new)
        assert layer.weight is new
        assert ("weights" in lists_with(layer, old)) == stays
        assert "weights" in lists_with(layer, new)


def test_weights_are_paired_with_a_file_by_their_order():
    class Cell(keras.layers.Layer):
        def __init__(self, names):
            super().__init__()
            for name in names:
                weight = self.add_weight(name=name, shape=())
                weight.assign(float(name == "kernel"))
                setattr(self, name, weight)
            self.built = True

    first, second = Cell(["kernel", "bias"]), Cell(["bias", "kernel"])
    store = {}
    first.save_own_variables(store)
    second.load_own_variables(store)
    assert float(second.kernel.numpy()) == 0
    built_layers.order_variables(second, ["kernel", "bias"])
    assert [v.name for v in second.weights] == ["kernel", "bias"]
    second.load_own_variables(store)
    assert float(second.kernel.numpy()) == 1
    assert members_about(keras.layers.Layer, "order", "sort") == []


@pytest.mark.skipif(BACKEND != "torch", reason="torch has parameters")
def test_a_sequential_model_keeps_parameters_of_its_shorter_forms(tmp_path):
    layers = [keras.layers.Dense(1) for _ in range(2)]
    keras.Sequential([keras.Input((1,)), *layers]).save(tmp_path / "m.keras")
    model = keras.saving.load_model(tmp_path / "m.keras")
    kept = [
        each
        for each in model._tracker.config["layers"][1]
        if isinstance(each, keras.Model) and each is not model._functional
    ]
    assert kept
    kernel = model.layers[0].kernel
    model.layers[0].kernel.value  # noqa: B018
    with built_layers.unlocked(model.layers[0]):
        built_layers.replace_variable(
            model.layers[0], kernel, keras.Variable([[2.0]])
        )
    built_layers.track_again([*reversed(model.layers), model])
    held = [p for each in kept for p in each.parameters()]
    assert not any(p is kernel.value for p in held)


def test_keras_sets_weights_until_one_does_not_fit():
    stock = keras.layers.Dense(1)
    stock.build((None, 1))
    wrong = [np.ones((1, 1)), np.ones((2,))]
    with pytest.raises(ValueError):
        stock.set_weights(wrong)
    assert float(stock.kernel[0][0]) == 1  # Why it is needed.


def test_a_layer_is_told_when_it_is_built():
    assert members_about(keras.layers.Layer, "when_", "post_", "after_") == []

    class Told(built_layers.ToldWhenBuilt, keras.layers.Dense):
        def when_built(self):
            self.told = [v.name for v in self.weights]

    layer = Told(1)
    layer.build((None, 1))
    assert layer.told == ["kernel", "bias"]
