"""Recurrent cells and layers in float8, around every loop of Keras."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import reference
from keras_policy_ext.frameworks.operations import UNIT
from keras_policy_ext.layers.class_swap import enter_float8, leave_float8
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import OPERANDS
from saving_models import (
    JIT,
    assert_equal,
    float8,
    own_weights,
    randomized,
    settled,
)
from steps import gradients, mean_square, normal, numpy

BATCH, STEPS, FEATURES, UNITS = 4, 3, 3, 2

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


def assert_close(some, others, tolerance=2e-6):
    """Equal up to the order of float32 sums; the scale is that of each."""
    for one, other in zip(some, others, strict=True):
        one, other = numpy(one), numpy(other)
        atol = tolerance * max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


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


# One step of a cell, against NumPy


def cell_of(name, source="float32", **kwargs):
    keras.utils.set_random_seed(0)
    policy = float8(source, recipe="current")
    cell = getattr(kpe.layers, name)(
        UNITS, bias_initializer="normal", dtype=policy, **kwargs
    )
    cell.build((None, FEATURES))
    return cell


class Once(keras.Model):
    """One step of a cell; inputs and states in one tensor."""

    def __init__(self, cell):
        super().__init__(dtype=cell.dtype_policy)
        self.cell = cell
        self.states = len(keras.tree.flatten(cell.state_size))
        self.build((None, FEATURES + self.states * UNITS))

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        cuts = [FEATURES + i * UNITS for i in range(self.states)]
        x, *states = ops.split(x, cuts, axis=1)
        return self.cell(x, states, training=training)[0]


def quantized(x, dtype):
    scale = reference.scale_from_amax(reference.amax(x), dtype)
    return reference.quantize_dequantize(x, scale, dtype)


e4m3 = functools.partial(quantized, dtype="float8_e4m3fn")
e5m2 = functools.partial(quantized, dtype="float8_e5m2")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def columns(x, count):
    return np.split(x, count, axis=-1)


def emulated(name, x, states, weights, g, reset_after=True):
    """Outputs, gradients of inputs, states but the carry, and weights."""
    kernel, recurrent, bias = weights
    kernel_q, recurrent_q, x_q = e4m3(kernel), e4m3(recurrent), e4m3(x)
    (h, *carry), inner_bias = states, 0.0
    if name == "GRUCell" and reset_after:
        bias, inner_bias = bias
    z = x_q @ kernel_q + bias
    inner = e4m3(h) @ recurrent_q + inner_bias
    h_grad = recurrent_grad = 0.0
    if name == "SimpleRNNCell":
        y = np.tanh(z + inner)
        dz = d_inner = g * (1 - y**2)
    elif name == "LSTMCell":
        i, f, c, o = columns(z + inner, 4)
        i, f, c, o = sigmoid(i), sigmoid(f), np.tanh(c), sigmoid(o)
        new = f * carry[0] + i * c
        y = o * np.tanh(new)
        d_new = g * o * (1 - np.tanh(new) ** 2)
        parts = [
            d_new * c * i * (1 - i),
            d_new * carry[0] * f * (1 - f),
            d_new * i * (1 - c**2),
            g * np.tanh(new) * o * (1 - o),
        ]
        dz = d_inner = np.concatenate(parts, axis=-1)
    else:
        u, r = (
            sigmoid(a + b)
            for a, b in zip(columns(z, 3)[:2], columns(inner, 3), strict=False)
        )
        third = recurrent_q[:, -UNITS:]
        reset = e4m3(r * h) @ third
        if reset_after:
            reset = r * columns(inner, 3)[2]
        candidate = np.tanh(columns(z, 3)[2] + reset)
        y = u * h + (1 - u) * candidate
        d_candidate = g * (1 - u) * (1 - candidate**2)
        d_reset = d_candidate * columns(inner, 3)[2]
        if not reset_after:
            d_reset = e5m2(d_candidate) @ third.T * h
        gates = [
            g * (h - candidate) * u * (1 - u),
            d_reset * r * (1 - r),
        ]
        dz = np.concatenate([*gates, d_candidate], axis=-1)
        d_inner = np.concatenate([*gates, d_candidate * r], axis=-1)
        h_grad = g * u
        if not reset_after:
            d_inner = np.concatenate(gates, axis=-1)
            h_grad = h_grad + e5m2(d_candidate) @ third.T * r
            recurrent_grad = [e4m3(r * h).T @ e5m2(d_candidate)]
    h_grad = h_grad + e5m2(d_inner) @ recurrent_q[:, : d_inner.shape[1]].T
    grads = [e4m3(h).T @ e5m2(d_inner)]
    grads += recurrent_grad if isinstance(recurrent_grad, list) else []
    bias_grad = dz.sum(0)
    if name == "GRUCell" and reset_after:
        bias_grad = np.stack([bias_grad, d_inner.sum(0)])
    x_grad = np.concatenate([e5m2(dz) @ kernel_q.T, h_grad], axis=1)
    recurrent_grad = np.concatenate(grads, axis=1)
    return y, x_grad, [x_q.T @ e5m2(dz), recurrent_grad, bias_grad]


@pytest.mark.parametrize(
    "name, options",
    [
        ("LSTMCell", {}),
        ("GRUCell", {}),
        ("GRUCell", {"reset_after": False}),
        ("SimpleRNNCell", {}),
    ],
)
def test_a_step_is_that_of_quantized_kernels_inputs_and_states(name, options):
    model = Once(cell_of(name, **options))
    width = FEATURES + model.states * UNITS
    x, g = normal(BATCH, width, seed=1), normal(BATCH, UNITS, seed=2)
    parts = np.split(x, range(FEATURES, width, UNITS), axis=1)
    expected = emulated(
        name, parts[0], parts[1:], map(numpy, own_weights(model)), g, **options
    )
    outputs, x_grad, grads = gradients(
        model, x, lambda y: ops.sum(ops.multiply(y, g)), compiled=True
    )
    assert model.cell.quantization_mode == "float8"
    y, expected_x_grad, expected_grads = expected
    assert_close([outputs], [y])
    reached = slice(0, FEATURES + UNITS)
    assert_close([numpy(x_grad)[:, reached]], [expected_x_grad])
    assert_close(grads, expected_grads)


def test_a_step_in_bfloat16_is_that_in_float32_but_for_roundings():
    x = normal(BATCH, FEATURES + 2 * UNITS, seed=1)
    x = numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))
    g = normal(BATCH, UNITS, seed=2)
    half, whole = (
        gradients(
            Once(cell_of("LSTMCell", source)),
            x,
            lambda y: ops.sum(ops.multiply(ops.cast(y, "float32"), g)),
            compiled=True,
        )
        for source in ("mixed_bfloat16", "float32")
    )
    assert keras.backend.standardize_dtype(half[0].dtype) == "bfloat16"
    # A gate is off by some roundings, 2**-9 each; a gradient that lies near
    # the middle of two codes by one step of e5m2, at most a quarter of it.
    outputs = numpy(ops.cast(half[0], "float32"))
    np.testing.assert_allclose(outputs, numpy(whole[0]), rtol=0, atol=2**-6)
    for one, other in zip(half[2], whole[2], strict=True):
        error = np.linalg.norm(numpy(one) - numpy(other))
        assert error <= 0.25 * np.linalg.norm(numpy(other))


@pytest.mark.parametrize(
    "name, options",
    [
        ("LSTMCell", {}),
        ("GRUCell", {"reset_after": False}),
        ("SimpleRNNCell", {}),
    ],
)
@pytest.mark.parametrize("which", ["dropout", "recurrent_dropout"])
def test_a_float8_cell_drops_what_the_stock_one_drops(name, options, which):
    x, *states = (normal(BATCH, n, seed=n) for n in (FEATURES, UNITS, UNITS))
    states = states[: 2 if name == "LSTMCell" else 1]
    outputs = {}
    for layers, policy in (
        (keras.layers, None),
        (kpe.layers, float8(recipe="current")),
    ):
        for training in (False, True):
            keras.utils.set_random_seed(1)
            cell = getattr(layers, name)(
                UNITS, dtype=policy, **{which: 0.5}, **options
            )
            outputs[layers, training] = numpy(
                cell(x, states, training=training)[0]
            )
    dropped = outputs[kpe.layers, True]
    error = np.linalg.norm(dropped - outputs[keras.layers, True])
    effect = np.linalg.norm(dropped - outputs[keras.layers, False])
    assert error < 0.2 * effect


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


@pytest.mark.parametrize("kind", LOOPS)
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


def test_training_that_is_not_said_observes_where_a_gradient_is_taken():
    layer, x = made("SimpleRNN", float8()), sequences()
    model = keras.Sequential([keras.Input((STEPS, FEATURES)), layer])
    assert observed(model, layer.cell, x) == (1, np.abs(x).max())


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


def test_an_adopted_layer_is_one_that_was_made_in_float8():
    layer = made("LSTM", "mixed_bfloat16", keras.layers)
    x = sequences()
    before = numpy(layer(x))
    for each in (layer, layer.cell):
        enter_float8(each, float8("mixed_bfloat16"))
    twin = made("LSTM", float8("mixed_bfloat16"))
    assert type(layer) is type(twin)
    assert type(layer.cell) is type(twin.cell)
    assert layer.use_cudnn is twin.use_cudnn is False
    assert [v.path for v in layer.weights] == [v.path for v in twin.weights]
    twin.set_weights(layer.get_weights())  # amaxes of the kernels included
    np.testing.assert_array_equal(numpy(layer(x)), numpy(twin(x)))
    for each in (layer, layer.cell):
        leave_float8(each)
    assert type(layer.cell) is keras.layers.LSTMCell
    np.testing.assert_array_equal(numpy(layer(x)), before)
