"""Recurrent cells and layers in float8, around every loop of Keras."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.ext.delayed.observations import UNIT
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import OPERANDS
from recurrent import BATCH, FEATURES, STEPS, UNITS, assert_close
from saving_models import (
    JIT,
    assert_equal,
    float8,
    own_weights,
    randomized,
    settled,
)
from steps import gradients, mean_square, normal, numpy

LAYERS = ["LSTM", "GRU", "SimpleRNN"]


def made(name, policy=None, layers=kpe.layers, **kwargs):
    """A built layer; the same weights each time."""
    keras.utils.set_random_seed(0)
    kwargs = {"name": "layer", **kwargs}
    layer = getattr(layers, name)(UNITS, dtype=policy, **kwargs)
    layer.build((BATCH, STEPS, FEATURES))
    return layer


def sequences():
    return normal(BATCH, STEPS, FEATURES)


def newest(cell, kernel):
    """The amaxes that were observed last, by operand."""
    variable = cell.float8_state.of(getattr(cell, kernel))
    history = source_of(variable.recipe).layout.history(numpy(variable))
    return dict(zip(OPERANDS, history[:, 0], strict=True))


class Flat(keras.Model):
    """All that a recurrent layer returns, in one tensor."""

    mask = np.arange(STEPS) < np.array([[3], [2], [1], [3]])

    def __init__(self, layer, masked=False):
        super().__init__()
        self.layer = layer
        self.options = {"mask": self.mask} if masked else {}
        self.build((BATCH, STEPS, FEATURES))

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        options = {k: ops.convert_to_tensor(v) for k, v in self.options.items()}
        returned = self.layer(x, training=training, **options)
        flat = [ops.reshape(y, (-1,)) for y in keras.tree.flatten(returned)]
        return ops.concatenate(flat)


# Under any other policy


@pytest.mark.full_except("SimpleRNN")
@pytest.mark.parametrize("name", LAYERS)
def test_under_a_plain_policy_a_layer_is_the_stock_one(name):
    options = {"dropout": 0.3, "recurrent_dropout": 0.3}
    layer, stock = (
        made(name, "mixed_bfloat16", layers, **options)
        for layers in (kpe.layers, keras.layers)
    )
    assert_equal(layer.weights, stock.weights)
    assert type(layer.cell) is getattr(kpe.layers, name + "Cell")
    outputs = []
    for each in (layer, stock):
        keras.utils.set_random_seed(0)  # of dropout on torch
        outputs.append(numpy(each(sequences(), training=True)))
    np.testing.assert_array_equal(*outputs)
    assert layer.get_config() == stock.get_config()


def test_a_layer_draws_the_seeds_that_the_stock_one_draws():
    for layers in (kpe.layers, keras.layers):
        keras.utils.set_random_seed(3)
        layers.LSTM(2, dropout=0.5)
        after = keras.initializers.RandomNormal()((3,))
        if layers is kpe.layers:
            ours = after
    np.testing.assert_array_equal(numpy(ours), numpy(after))


# The loop of a layer, against the loop of `RNN` around its cell


LOOPS = {
    "masked": (
        "LSTM",
        {
            "dropout": 0.3,
            "recurrent_dropout": 0.3,
            "return_sequences": True,
            "return_state": True,
        },
    ),
    "unrolled": (
        "GRU",
        {
            "reset_after": False,
            "recurrent_dropout": 0.3,
            "unroll": True,
            "bias_initializer": "normal",
        },
    ),
    "backwards": (
        "SimpleRNN",
        {"dropout": 0.3, "go_backwards": True, "use_bias": False},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.slow_except("backwards")
def test_a_layer_computes_what_its_cell_does_step_by_step(kind):
    name, options = LOOPS[kind]
    layer = made(name, float8(), **options)
    config = layer.get_config()
    loop = ("return_sequences", "return_state", "go_backwards", "unroll")
    plain = keras.layers.RNN(
        type(layer.cell).from_config(layer.cell.get_config()),
        **{key: config[key] for key in loop},
    )
    plain.build((BATCH, STEPS, FEATURES))
    rng = np.random.default_rng(0)
    for variable in layer.cell.float8_state.matrices:
        variable.assign(settled(rng, variable.shape))
    plain.set_weights(layer.get_weights())
    results = []
    for each in (layer, plain):
        keras.utils.set_random_seed(0)  # of dropout on torch
        seed = each.cell.seed_generator.state
        seed.assign(np.zeros(seed.shape, "uint32"))
        model = Flat(each, masked=kind == "masked")
        outputs, x_grad, grads = gradients(
            model, sequences(), mean_square, compiled=True
        )
        kernels = [
            grad
            for v, grad in zip(model.trainable_variables, grads, strict=True)
            if not v.overwrite_with_gradient
        ]
        results.append([outputs, x_grad, *kernels])
    assert_close(*results)


# What a loop observes


@pytest.mark.full
@pytest.mark.parametrize(
    "jit",
    {"jax": [True], "tensorflow": [True, False], "torch": [False]}[
        keras.backend.backend()
    ],
)
def test_amaxes_of_a_loop_are_bounded_for_any_number_of_steps(jit):
    layer = made("SimpleRNN", float8())
    model = keras.Sequential([keras.Input((STEPS, FEATURES)), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit)
    x, y = sequences(), normal(BATCH, UNITS, seed=1)
    seen = []

    def watch(epoch, logs):
        model.get_weights()  # the JAX trainer brings the variables up to date
        seen.append(newest(layer.cell, "recurrent_kernel"))

    history = model.fit(
        np.tile(x, (35, 1, 1)),
        np.tile(y, (35, 1)),
        batch_size=BATCH,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=watch)],
    )
    assert np.all(np.isfinite(history.history["loss"]))
    # All inputs are multiplied at once, and a kernel is one tensor.
    inputs = newest(layer.cell, "kernel")
    assert inputs["inputs"] == np.abs(x).max()
    for kernel in ("kernel", "recurrent_kernel"):
        amax = np.abs(numpy(getattr(layer.cell, kernel))).max()
        observed = newest(layer.cell, kernel)["kernel"]
        np.testing.assert_allclose(observed, amax, rtol=1e-6)
    # In the loop the sum over the steps is an upper bound.
    layer.return_sequences = True
    states = numpy(layer(x))[:, :-1]
    for amaxes in seen:
        assert np.abs(states).max() * 0.99 <= amaxes["inputs"]
        assert amaxes["inputs"] <= STEPS * np.abs(states).max() * 1.01
        # What the gates get from inputs and state has one gradient.
        assert inputs["outputs_grad"] * 0.9 <= amaxes["outputs_grad"]
        assert amaxes["outputs_grad"] <= STEPS * inputs["outputs_grad"] * 1.1
    growth = seen[-1]["inputs"] / seen[0]["inputs"]
    assert abs(growth - 1) < 0.01


@pytest.mark.full
def test_a_stateful_layer_goes_on_where_it_was():
    whole = made("LSTM", float8(), return_sequences=True)
    half = made("LSTM", float8(), stateful=True)
    rng = np.random.default_rng(0)
    for variable in whole.cell.float8_state.matrices:
        variable.assign(settled(rng, variable.shape))
    half.set_weights(whole.get_weights())
    x = normal(BATCH, 2 * STEPS, FEATURES)
    after = numpy(whole(x))[:, STEPS - 1 :: STEPS]
    assert_close([half(x[:, :STEPS])], [after[:, 0]])
    assert_close([half(x[:, STEPS:])], [after[:, 1]])
    half.reset_state()
    assert_close([half(x[:, :STEPS])], [after[:, 0]])


def observed(model, cell, x, training=None):
    """Uses and slots of the inputs, as one gradient carries them."""
    grads = gradients(model, x, mean_square, training, compiled=True)[2]
    state = cell.float8_state.of(cell.kernel)
    (row,) = (
        numpy(grad)[OPERANDS.index("inputs")]
        for variable, grad in zip(model.trainable_variables, grads, strict=True)
        if variable is state
    )
    return row[0] / UNIT, row[1:9].max() / UNIT


@pytest.mark.full
def test_training_that_is_not_said_observes_where_a_gradient_is_taken():
    layer, x = made("SimpleRNN", float8()), sequences()
    model = keras.Sequential([keras.Input((STEPS, FEATURES)), layer])
    assert observed(model, layer.cell, x) == (1, np.abs(x).max())


@pytest.mark.full
def test_a_layer_used_twice_observes_the_larger_inputs():
    layer, x = made("SimpleRNN", float8()), sequences()

    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.build((BATCH, STEPS, FEATURES))

        def build(self, input_shape):
            pass

        def call(self, x, training=None):
            return self.layer(x) + self.layer(3 * x)

    largest = np.abs(np.float32(3) * x).max()
    assert observed(Twice(), layer.cell, x, training=True) == (2, largest)


@pytest.mark.full
def test_a_frozen_layer_keeps_its_state_and_passes_gradients_on():
    layer = made("SimpleRNN", float8(), unroll=True)
    randomized(keras.Sequential([keras.Input((STEPS, FEATURES)), layer]))
    before = layer.get_weights()
    layer.trainable = False
    _, x_grad, grads = gradients(layer, sequences(), mean_square)
    assert np.abs(numpy(x_grad)).max() > 0
    assert len(grads) == 0
    assert_equal(layer.get_weights(), before)


# Inside stock layers


def cells(model):
    found = model._flatten_layers(include_self=False)
    return [x for x in found if isinstance(x, kpe.layers.Float8Mixin)]


@pytest.mark.full
def test_stock_wrappers_of_float8_cells_train_in_float8():
    layers = kpe.layers
    with kpe.policy_scope(float8("mixed_bfloat16")):
        inputs = keras.Input((4,), dtype="int32")
        x = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        x = keras.layers.Bidirectional(layers.LSTM(2, return_sequences=True))(x)
        stack = [layers.GRUCell(3), layers.SimpleRNNCell(2)]
        x = keras.layers.RNN(stack)(x)
        x = keras.layers.Reshape((1, 2, 1))(x)
        timed = layers.SimpleRNN(2, unroll=True)
        x = keras.layers.TimeDistributed(timed)(x)
        model = keras.Model(inputs, x)
    tokens = np.arange(16).reshape(4, 4) % 9
    model.compile("sgd", "mse", jit_compile=JIT)
    assert np.isfinite(model.train_on_batch(tokens, normal(4, 1, 2)))
    assert len(cells(model)) == 5
    for cell in cells(model):
        assert cell.quantization_mode == "float8"
        for kernel in ("kernel", "recurrent_kernel"):
            amaxes = newest(cell, kernel)
            assert all(0 < amax < np.inf for amax in amaxes.values())
    for layer in model.layers:
        assert layer.quantization_mode is None
        assert layer.compute_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_a_float8_cell_runs_in_no_fused_kernel(name, monkeypatch):
    def fused(*args, **kwargs):
        raise AssertionError("the loop that may be cuDNN's was called")

    monkeypatch.setattr(getattr(keras.layers, name), "inner_loop", fused)
    layer = made(name, float8())
    assert np.all(np.isfinite(numpy(layer(sequences()))))
    # Bidirectional goes by this.
    assert layer.use_cudnn is False
    assert made(name).use_cudnn == "auto"
    layer = made(name, float8(), use_cudnn=True)
    with pytest.raises(ValueError, match="Received: use_cudnn=True"):
        layer(sequences())


def recurrent_model(policy=None, layers=kpe.layers):
    stack = [
        keras.Input((STEPS, FEATURES)),
        layers.LSTM(3, return_sequences=True, dtype=policy, name="first"),
        keras.layers.Bidirectional(
            layers.GRU(2, dtype=policy, name="gru"), dtype=policy, name="second"
        ),
    ]
    return keras.Sequential(stack, name="model")


def test_a_rule_takes_a_cell_out_also_after_saving(tmp_path):
    rules = [("model/first/lstm_cell", None), (".*/backward_gru/.*", None)]
    model = recurrent_model(float8(rules=rules))
    model.save(tmp_path / "model.keras")
    for each in (model, keras.saving.load_model(tmp_path / "model.keras")):
        modes = {cell.path: cell.quantization_mode for cell in cells(each)}
        assert modes == {
            "model/first/lstm_cell": None,
            "model/second/forward_gru/gru_cell": "float8",
            "model/second/backward_gru/gru_cell": None,
        }


@pytest.mark.parametrize("route", ["keras", "json"])
def test_a_saved_model_comes_back_bit_for_bit(route, tmp_path):
    model = randomized(recurrent_model(float8("mixed_bfloat16")))
    if route == "keras":
        model.save(tmp_path / "model.keras")
        again = keras.saving.load_model(tmp_path / "model.keras")
    else:
        again = keras.models.model_from_json(model.to_json())
        model.save_weights(tmp_path / "model.weights.h5")
        again.load_weights(tmp_path / "model.weights.h5")
    assert [type(cell) for cell in cells(again)] == [
        kpe.layers.LSTMCell,
        kpe.layers.GRUCell,
        kpe.layers.GRUCell,
    ]
    assert_equal(again.weights, model.weights)
    for cell, twin in zip(cells(model), cells(again), strict=True):
        assert twin.dtype_policy == cell.dtype_policy
        assert twin.path == cell.path


def test_weights_go_to_stock_layers_and_back(tmp_path):
    model = randomized(recurrent_model(float8()))
    stock = recurrent_model(None, keras.layers)
    model.save_weights(tmp_path / "float8.weights.h5")
    stock.load_weights(tmp_path / "float8.weights.h5")
    assert_equal(stock.weights, own_weights(model))
    stock.save_weights(tmp_path / "stock.weights.h5")
    other = recurrent_model(float8())
    other.load_weights(tmp_path / "stock.weights.h5")
    assert_equal(own_weights(other), stock.weights)


# Layers that exist already


@pytest.mark.full
def test_an_adopted_layer_is_one_that_was_made_in_float8():
    layer = made("LSTM", "mixed_bfloat16", keras.layers)
    x = sequences()
    before = numpy(layer(x))
    for each in (layer, layer.cell):
        to_float8_class(each, float8("mixed_bfloat16"))
    twin = made("LSTM", float8("mixed_bfloat16"))
    assert type(layer) is type(twin)
    assert type(layer.cell) is type(twin.cell)
    assert layer.use_cudnn is twin.use_cudnn is False
    assert [v.path for v in layer.weights] == [v.path for v in twin.weights]
    twin.set_weights(layer.get_weights())  # amaxes of the kernels included
    np.testing.assert_array_equal(numpy(layer(x)), numpy(twin(x)))
    for each in (layer, layer.cell):
        to_stock_class(each)
    assert type(layer.cell) is keras.layers.LSTMCell
    np.testing.assert_array_equal(numpy(layer(x)), before)
