"""What a training step observes, where float8 in stock Keras goes wrong."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from float8_dense import dense, policy, same_state
from keras_policy_ext import reference
from keras_policy_ext.recipes import OPERANDS
from steps import gradients, mean_square, no_grad, normal, numpy, state_of, step

# Reuse


class Twice(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.inner = layer
        self.build((None, 8))

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        return self.inner(self.inner(x, training=training), training=training)


def test_two_uses_in_a_step_observe_the_larger_amax():
    layer = dense()
    layer.kernel.assign(np.eye(8, dtype="float32") * 3.0)
    x = normal(4, 8)
    model = Twice(layer)
    between = numpy(layer(x, training=False))
    step(model, keras.optimizers.SGD(0.0), x, mean_square)
    observed = state_of(layer)
    assert np.abs(between).max() > 2 * np.abs(x).max()
    assert observed["inputs"][1][0] == np.abs(between).max()
    assert observed["kernel"][1][0] == 3.0


@pytest.mark.full
def test_a_shared_layer_is_stable_for_many_steps():
    layer = dense()
    layer.kernel.assign(np.eye(8, dtype="float32"))
    model = Twice(layer)
    optimizer = keras.optimizers.SGD(0.0)
    x = normal(4, 8)
    amax = np.abs(x).max()
    for _ in range(200):
        step(model, optimizer, x, mean_square)
    for operand in OPERANDS:
        scale, history = state_of(layer)[operand]
        assert 0 < scale < 1
        assert np.all(np.isfinite(history))
    assert state_of(layer)["inputs"][1].max() <= amax * (1 + 2**-3)


@keras.saving.register_keras_serializable("tests")
class Cell(keras.layers.Layer):
    """A recurrent cell whose one matmul is a float8 Dense."""

    def __init__(self, units, dtype=None, **kwargs):
        super().__init__(dtype=dtype, **kwargs)
        self.state_size = units
        self.output_size = units
        self.dense = kpe.layers.Dense(units, dtype=dtype, name="dense")

    def build(self, input_shape):
        self.dense.build((None, input_shape[-1] + self.state_size))

    def call(self, x, states, training=None):
        x = ops.concatenate([x, states[0]], axis=-1)
        h = ops.tanh(self.dense(x, training=training))
        return h, [h]


@pytest.mark.full
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.slow_except("False")
def test_a_recurrent_cell_is_stable_for_many_steps(unroll):
    cell = Cell(8, dtype=policy())
    model = keras.Sequential(
        [keras.Input((5, 4)), keras.layers.RNN(cell, unroll=unroll)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = normal(16, 5, 4), normal(16, 8)
    history = model.fit(x, y, batch_size=4, epochs=12, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
    assert history.history["loss"][-1] < history.history["loss"][0]
    states = state_of(cell.dense)
    for operand in OPERANDS:
        assert np.all(states[operand][1] > 0)
    # In a scan the amax is a sum over five steps: an upper bound.
    bound = 1 if unroll else 5
    kernel_amax = np.abs(numpy(cell.dense.kernel)).max()
    assert states["kernel"][1][0] == pytest.approx(kernel_amax, rel=0.1)
    assert states["inputs"][1].max() <= bound * np.abs(x).max() * 1.001


@pytest.mark.full
def test_more_than_eight_uses_stay_bounded():
    layer = dense()
    layer.kernel.assign(np.eye(8, dtype="float32"))
    x = normal(4, 20, 8)
    model = keras.Sequential(
        [keras.Input((20, 8)), keras.layers.TimeDistributed(layer)]
    )
    step(model, keras.optimizers.SGD(0.0), x, mean_square)
    amax = np.abs(x).max()
    observed = state_of(layer)
    assert amax * 0.999 <= observed["inputs"][1][0] <= 3 * amax
    assert observed["kernel"][1][0] == pytest.approx(1.0)


# What was not observed stays


def trained_dense(**kwargs):
    layer = dense(**kwargs)
    optimizer = keras.optimizers.SGD(0.01)
    for i in range(3):
        step(layer, optimizer, normal(4, 8, seed=i), mean_square)
    return layer, optimizer


@pytest.mark.full
def test_a_gradient_without_training_leaves_the_state_as_it_was():
    layer, optimizer = trained_dense()
    before = state_of(layer)
    step(layer, optimizer, normal(4, 8, scale=9), mean_square, training=False)
    assert same_state(before, state_of(layer))


def test_a_forward_pass_leaves_the_state_as_it_was():
    layer, _ = trained_dense()
    before = state_of(layer)
    for training in (True, False, None):
        layer(normal(4, 8, scale=9), training=training)
    assert same_state(before, state_of(layer))


class OneOfTwo(keras.Model):
    def __init__(self, used, unused):
        super().__init__()
        self.used = used
        self.unused = unused

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        self.unused(x, training=training)
        return self.used(x, training=training)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_layer_outside_the_loss_keeps_its_state():
    model = OneOfTwo(dense(), trained_dense()[0])
    before = state_of(model.unused)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = normal(8, 8)
    kept = numpy(model.unused(x, training=False))
    model.fit(x, normal(8, 8), epochs=2, verbose=0)
    assert same_state(before, state_of(model.unused))
    np.testing.assert_array_equal(kept, numpy(model.unused(x, training=False)))
    assert state_of(model.used)["outputs_grad"][1][0] > 0


def test_an_all_zero_tensor_is_observed():
    layer, optimizer = trained_dense()
    step(layer, optimizer, np.zeros((4, 8), "float32"), mean_square)
    assert state_of(layer)["inputs"][1][0] == 0


# No lag


def test_the_first_step_is_already_scaled():
    layer = dense(inputs=64)
    x = normal(16, 64, scale=1e-4)
    y = numpy(layer(x, training=True))
    exact = x @ numpy(layer.kernel)
    assert reference.sqnr_db(exact, y) > 25


def test_the_second_step_uses_what_the_first_observed():
    layer = dense()
    optimizer = keras.optimizers.SGD(0.0)
    step(layer, optimizer, normal(4, 8), mean_square)
    first = state_of(layer)["inputs"][1][0]
    step(layer, optimizer, normal(4, 8, scale=100), mean_square)
    used, _ = state_of(layer)["inputs"]
    assert used == np.float32(1) / (np.float32(448) / np.float32(first))


# What is not finite


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_non_finite_input_never_enters_the_history(poison):
    layer, optimizer = trained_dense()
    before = state_of(layer)
    x = normal(4, 8)
    x[1, 2] = poison
    _, _, grads = gradients(layer, x, mean_square)
    with no_grad():
        optimizer.apply(grads[2:], layer.trainable_variables[2:])
    after = state_of(layer)
    np.testing.assert_array_equal(before["inputs"][1], after["inputs"][1])
    y = numpy(layer(normal(4, 8), training=False))
    assert np.all(np.isfinite(y))


@pytest.mark.full
def test_a_spike_is_forgotten_after_the_history_has_passed():
    layer, _ = trained_dense(dtype=policy(length=4))
    step(layer, keras.optimizers.SGD(0.0), normal(4, 8) * 1e30, mean_square)
    assert state_of(layer)["inputs"][1].max() > 1e29
    quiet = keras.optimizers.SGD(0.0)
    for i in range(4):
        step(layer, quiet, normal(4, 8, seed=i), mean_square)
    assert state_of(layer)["inputs"][1].max() < 10
