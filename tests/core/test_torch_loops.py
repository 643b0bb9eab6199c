"""Loops of PyTorch as they are written for any model train a float8 one."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from converted_models import states_of
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from steps import numpy
from torch_loops import (
    OPTIMIZERS,
    accumulated,
    adam,
    adamw,
    assert_same_bits,
    batches,
    clipped,
    error_with_kpe_loops,
    forward_error,
    loss_of,
    momentum,
    network,
    plain,
    scaled,
    trained,
    with_zeros,
)

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="torch.optim is PyTorch's"
)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("loop", [plain, with_zeros, accumulated])
@pytest.mark.extension("loops")
def test_a_loop_over_all_parameters_has_the_bits_of_kpe_loops(loop, make):
    found = trained(loop, make, 12, unmodified=True)
    assert_same_bits(found, trained(loop, make, 12, unmodified=False))


def assert_observed_and_as_exact(model, loop, make):
    for state in states_of(model):
        matrix = numpy(state)
        assert np.all(matrix[:, 0] == VALID_MARK)
        assert np.all(matrix[:, 10:] > 0.0), "the whole history is observed"
    assert forward_error(model) <= 1.2 * error_with_kpe_loops(loop, make)


@pytest.mark.full
@pytest.mark.parametrize(
    ("loop", "make"), [(plain, adamw), (clipped, momentum), (scaled, adam)]
)
@pytest.mark.extension("loops")
def test_after_1000_steps_float8_is_as_exact_as_with_kpe_loops(loop, make):
    found = trained(loop, make, 1000, unmodified=True)
    assert_observed_and_as_exact(found, loop, make)


@pytest.mark.full
@pytest.mark.extension("loops")
def test_after_1000_compiled_steps_float8_is_as_exact():
    import torch

    model = network()
    found = trained(plain, adamw, 1000, True, model, torch.compile(model))
    assert_observed_and_as_exact(found, plain, adamw)


@pytest.mark.parametrize("loop", [clipped, scaled])
@pytest.mark.extension("loops")
def test_what_is_done_to_gradients_is_not_done_to_observations(loop):
    """The order of a sum over parameters is all that differs."""
    found = trained(loop, momentum, 4, unmodified=True)
    expected = trained(loop, momentum, 4, unmodified=False)
    for a, b in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=1e-5, atol=1e-6)


@pytest.mark.extension("loops")
def test_the_norm_of_gradients_is_that_of_the_weights():
    import torch

    model = network()
    ((x, y),) = batches(1)
    loss_of(model, x, y).backward()
    weights = [p.grad for p in kpe.loops.parameters(model)]
    expected = torch.linalg.vector_norm(torch.cat([g.ravel() for g in weights]))
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    # Four norms of parts are combined in another order.
    assert abs(found - expected) <= 4 * 2.0**-23 * expected


def test_a_step_that_a_scaler_skips_leaves_no_trace():
    import torch

    model = network()
    optimizer = adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    (x, y), (x_next, y_next) = batches(2)
    before = [numpy(w).copy() for w in model.weights]
    x_inf = x.copy()
    x_inf[0, 0] = np.inf
    scaler.scale(loss_of(model, x_inf, y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(numpy(weight), value)
    scaled_down = network()
    for each in (model, scaled_down):
        optimizer = adam(each.parameters())
        optimizer.zero_grad()
        (8 * loss_of(each, x_next, y_next)).backward()
        optimizer.step()
    assert_same_bits(model, scaled_down)


def test_what_saturates_is_still_seen_by_a_scaler():
    """The cast to float8 makes an infinite gradient finite."""
    import torch

    model = network()
    model.layers[-1].bias.trainable = False
    model.layers[0].bias.trainable = False
    optimizer = adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    ((x, y),) = batches(1)
    scaler.scale(loss_of(model, x, y) * np.inf).backward()
    before = numpy(model.layers[0].kernel).copy()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    np.testing.assert_array_equal(numpy(model.layers[0].kernel), before)


def test_a_backward_pass_that_is_discarded_is_not_observed():
    """As the discriminator's in the generator's half of a GAN."""
    model, other = network(), network()
    (x, y), (x_other, y_other) = batches(2)
    optimizer = adam(model.parameters())
    loss_of(model, 100 * x_other, y_other).backward()
    plain(model, optimizer, None, x, y)
    plain(other, adam(other.parameters()), None, x, y)
    assert_same_bits(model, other)


def test_an_optimizer_of_other_weights_enters_nothing():
    model = network()
    first, last = model.layers
    before = numpy(states_of(model)[1]).copy()
    ((x, y),) = batches(1)
    loss_of(model, x, y).backward()
    adam(first.parameters()).step()
    np.testing.assert_array_equal(numpy(states_of(model)[1]), before)
    assert numpy(states_of(model)[0])[0, 10] == np.abs(x).max()
    adam(last.parameters()).step()
    assert numpy(states_of(model)[1])[2, 10] > 0


def test_an_optimizer_of_the_kernels_alone_enters_what_they_saw():
    model = network()
    optimizer = adam([layer.kernel.value for layer in model.layers])
    ((x, y),) = batches(1)
    plain(model, optimizer, None, x, y)
    assert numpy(states_of(model)[0])[0, 10] == np.abs(x).max()


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.extension("loops")
def test_fit_and_a_loop_take_turns(steps):
    model, other = network(), network()
    xs, ys = (np.concatenate(part) for part in zip(*batches(6), strict=True))
    for each in (model, other):
        each.compile(
            keras.optimizers.SGD(0.01, gradient_accumulation_steps=steps), "mse"
        )
        each.fit(xs, ys, batch_size=16, verbose=0, shuffle=False)
    trained(plain, adamw, 3, True, model)
    trained(plain, adamw, 3, False, other)
    for each in (model, other):
        each.fit(xs, ys, batch_size=16, verbose=0, shuffle=False)
    assert_same_bits(model, other)


def test_a_loop_in_the_manner_of_keras_reads_gradients_and_applies_them():
    import torch

    model, other = network(), network()
    optimizer = keras.optimizers.SGD(0.01)
    for x, y in batches(4):
        model.zero_grad()
        loss_of(model, x, y).backward()
        weights = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in weights], weights)
    other.compile(keras.optimizers.SGD(0.01), "mse")
    for x, y in batches(4):
        other.train_on_batch(x, y)
    assert_same_bits(model, other)


def test_micro_batches_of_a_keras_optimizer_are_observed_together():
    model = network()
    xs, ys = (np.concatenate(part) for part in zip(*batches(3), strict=True))
    xs[0] *= 100  # in the first micro-batch, whose gradients are cleared
    optimizer = keras.optimizers.SGD(1e-6, gradient_accumulation_steps=3)
    model.compile(optimizer, "mse")
    model.fit(xs, ys, batch_size=16, verbose=0, shuffle=False)
    history = numpy(states_of(model)[0])[0, 10:]
    np.testing.assert_array_equal(history[1:], 0.0)
    assert history[0] == np.abs(xs).max()


def closures(make):
    """A loop that takes the gradients inside of the step."""

    def loop(model, optimizer, parameters, x, y):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return trained(loop, make, 6, unmodified=True)


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_step_with_a_closure_has_the_bits_of_one_without(make):
    assert_same_bits(closures(make), trained(plain, make, 6, unmodified=True))


def test_lbfgs_leaves_settled_states():
    import torch

    model = closures(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
    for state in states_of(model):
        matrix = numpy(state)
        np.testing.assert_array_equal(
            matrix[:, :9], [[VALID_MARK] + [0.0] * 8] * 3
        )
        assert np.all(matrix[:, 9] > 0.0)
