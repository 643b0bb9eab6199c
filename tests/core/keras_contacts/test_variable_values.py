"""Why `_keras/variable_values.py` is needed. See `_keras/__init__.py`."""

import keras
import numpy as np
import pytest

from keras_policy_ext._keras import calls, variable_values
from keras_policy_ext.ext.delayed._keras import TellsItsValue
from public_api import lists_with, members_about

BACKEND = keras.backend.backend()


class Reads(keras.layers.Layer):
    """Says how it reads its weight in a call."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(2,), initializer="ones")
        self.built = True

    def call(self, inputs):
        self.read = self.weight.value
        self.own = variable_values.value_without_autocast(self.weight)
        return inputs


def dtype_of(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def test_keras_hands_out_casts_of_variables_and_offers_no_other_way():
    layer = Reads(dtype="mixed_bfloat16")
    layer(np.ones((1, 2), "float32"))
    assert dtype_of(layer.read) == "bfloat16"
    assert dtype_of(layer.own) == "float32"
    assert members_about(keras.Variable, "cast", "read", "raw") == []
    assert members_about(keras.Variable, "value") == ["value"]


class ReadsInTraining(keras.callbacks.Callback):
    """Reads a variable before each step of `fit`.

    Not by way of `self.model`, which would fill the variables on JAX.
    """

    def __init__(self, variable):
        super().__init__()
        self.variable = variable

    def on_train_batch_begin(self, batch, logs=None):
        try:
            keras.ops.convert_to_numpy(self.variable.value)
            self.can_be_read = True
        except TypeError:
            self.can_be_read = False
        self.has_value = variable_values.has_value(self.variable)


def test_variables_are_empty_while_the_jax_trainer_works_and_full_elsewhere():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    reads = ReadsInTraining(model.layers[0].kernel)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[reads])
    assert reads.can_be_read == (BACKEND != "jax")
    assert reads.has_value == reads.can_be_read
    assert variable_values.has_value(model.layers[0].kernel)


class Listens(TellsItsValue, keras.Variable):
    """Counts what it is told of its value."""

    told = assigned = 0

    def value_made(self, value):
        self.told += 1

    def assign(self, value):
        self.assigned += 1
        return super().assign(value)


def test_a_variable_gets_its_value_without_a_call_of_a_public_method():
    variable = Listens(np.ones(2, "float32"))
    assert (variable.told, variable.assigned) == (1, 0)
    assert members_about(keras.Variable, "initial", "made") == []


@pytest.mark.parametrize(
    ("layer", "name", "stored"),
    [
        (keras.layers.Dense(2), "kernel", variable_values.stored_kernel),
        (
            keras.layers.EinsumDense("ab,bc->ac", (2,)),
            "kernel",
            variable_values.stored_kernel,
        ),
        (
            keras.layers.Conv1D(2, 1),
            "kernel",
            variable_values.stored_kernel,
        ),
        (
            keras.layers.Embedding(3, 2),
            "embeddings",
            variable_values.stored_embeddings,
        ),
    ],
    ids=["Dense", "EinsumDense", "Conv1D", "Embedding"],
)
def test_keras_merges_adapters_into_what_it_offers(layer, name, stored):
    layer.build((None, 3, 2) if "Conv" in type(layer).__name__ else (None, 2))
    variable = getattr(layer, name)
    assert stored(layer) is variable
    layer.enable_lora(1)
    assert getattr(layer, name) is not variable
    assert stored(layer) is variable
    assert "variables" in lists_with(layer, variable)


def test_keras_gives_values_to_variables_that_nobody_has_any_more():
    given = []

    def zeros(shape, dtype=None):
        given.append(tuple(shape))
        return keras.ops.zeros(shape, dtype)

    with keras.StatelessScope():
        _, dropped = (
            keras.Variable(initializer=zeros, shape=(n,), dtype="float32")
            for n in (2, 3)
        )
        variable_values.cancel_initialization(dropped)
    assert (2,) in given and (3,) not in given
    given.clear()
    with keras.StatelessScope():
        keras.Variable(initializer=zeros, shape=(5,), dtype="float32")
    assert (5,) in given


@pytest.mark.skipif(BACKEND != "torch", reason="only PyTorch has modules")
def test_a_variable_keeps_its_tensor_whatever_its_module_has():
    torch = pytest.importorskip("torch")
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    (holder,) = (
        each
        for each in layer.modules()
        if isinstance(each, torch.nn.ParameterDict)
    )
    kernel, path = layer.kernel, layer.kernel.path
    part = torch.nn.Parameter(torch.ones(2, 2))
    holder[path] = part
    assert kernel.value is not part
    variable_values.read_from(kernel, holder, path)
    assert kernel.value is part
    assert isinstance(kernel, keras.Variable)


@pytest.mark.skipif(BACKEND != "torch", reason="only PyTorch has parameters")
def test_a_variable_copies_what_is_assigned_and_holds_what_replaces_it():
    torch = pytest.importorskip("torch")
    variable = keras.Variable([1.0, 2.0])
    other = torch.nn.Parameter(torch.ones(2))
    variable.assign(other)
    assert variable.value is not other
    variable_values.replace(variable, other)
    assert variable.value is other


def test_a_variable_makes_a_tensor_and_has_no_numbers_but_its_own():
    """Why `ComputedVariable` has what Keras keeps in attributes."""
    assert members_about(keras.Variable, "compute", "view") == []

    class Twice(variable_values.ComputedVariable, keras.Variable):
        @property
        def value(self):
            return keras.ops.cast(self.held.value * 2, self.dtype)

    held = keras.Variable([1, 2], dtype="uint8", name="a", trainable=False)
    twice = Twice(held, "float32")
    assert (twice.name, twice.path) == (held.name, held.path)
    assert tuple(twice.shape) == (2,) and twice.ndim == 1
    assert twice.dtype == "float32" and not twice.trainable
    assert "dtype=float32" in repr(twice)
    numbers = keras.ops.convert_to_numpy(keras.ops.add(twice, 1.0))
    np.testing.assert_array_equal(numbers, [3, 5])
    with calls.autocast_scope("bfloat16"):
        assert twice.dtype == "bfloat16" and held.dtype == "uint8"
    assert vars(twice).keys() == {"held", "_dtype", "_autocast"}
