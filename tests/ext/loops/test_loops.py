"""Loops with a foreign optimizer: the state is left out, and observed."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from foreign_loops import (
    BACKEND,
    RATE,
    assert_same_bits,
    batches,
    gradients_of,
    network,
    states_of,
    states_variable,
    trained_by_keras,
    update_weights,
    values_of,
)
from keras_policy_ext.ext.delayed.observations import UNIT, UNSEEN
from steps import gradients, mean_square, no_grad, numpy, state_of

torch_only = pytest.mark.skipif(
    BACKEND != "torch", reason="torch.optim is PyTorch's"
)


# On every backend


def test_parameters_are_the_trainable_weights_of_the_float_model():
    model = network()
    stock = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16),
            keras.layers.Dense(4),
        ]
    )
    shapes = [tuple(v.shape) for v in stock.trainable_variables]
    assert [tuple(p.shape) for p in kpe.loops.parameters(model)] == shapes
    model.layers[0].trainable = False
    kept = kpe.loops.parameters(model)
    assert [tuple(p.shape) for p in kept] == shapes[2:]
    if BACKEND != "jax":  # arrays are not updated in place
        assert kept[0] is model.layers[1].kernel.value


@pytest.mark.full
def test_a_foreign_optimizer_sees_what_that_of_keras_sees():
    model = network()
    for x in batches():
        grads = gradients_of(model, x)
        kpe.loops.settle(model, grads)
        update_weights(model, grads)
    assert_same_bits(values_of(model), values_of(trained_by_keras(batches())))
    assert np.all(state_of(model.layers[0])["outputs_grad"][1] > 0)


def test_a_step_that_keeps_values_apart_settles_to_the_same_bits():
    model, apart = network(), network()
    values = [v.value for v in apart.trainable_variables]

    def settled(grads, values):
        return kpe.loops.settled(apart, grads, values)

    if BACKEND == "jax":
        import jax

        settled = jax.jit(settled)
    for x in batches(2):
        grads = gradients_of(model, x)
        kpe.loops.settle(model, grads)
        values = settled(grads, values)
    for variable, value in zip(model.trainable_variables, values, strict=True):
        np.testing.assert_array_equal(numpy(variable), numpy(value))


def test_settling_without_an_observation_changes_no_bit():
    model = trained_by_keras(batches(2))
    before = values_of(model)
    nothing = [None] * len(model.trainable_variables)
    zeros = [ops.zeros(v.shape) for v in model.trainable_variables]
    kpe.loops.settle(model, nothing)
    kpe.loops.settle(model, zeros)
    assert_same_bits(values_of(model), before)


def test_a_step_that_is_not_finite_does_not_poison_the_state():
    model = trained_by_keras(batches(2))
    first, last = model.layers
    before = state_of(first), state_of(last)
    spoiled = batches(1)[0]
    spoiled[3, 3] = np.nan
    kpe.loops.settle(model, gradients_of(model, spoiled))
    after = state_of(first), state_of(last)
    for i, operand in ((0, "inputs"), (1, "inputs"), (1, "outputs_grad")):
        kept, found = before[i][operand][1], after[i][operand][1]
        np.testing.assert_array_equal(found, kept)
    seen = np.abs(numpy(first.kernel)).max()
    assert after[0]["kernel"][1][0] == seen
    kpe.loops.settle(model, gradients_of(model, batches(1)[0]))
    newest = state_of(first)["inputs"][1][0]
    assert newest == np.abs(batches(1)[0]).max()


def test_a_recipe_without_state_needs_no_settling():
    model = network("current")
    before = values_of(model)
    kpe.loops.settle(model)
    assert_same_bits(values_of(model), before)
    assert len(kpe.loops.parameters(model)) == len(model.trainable_variables)


def test_gradients_that_do_not_fit_are_refused_and_change_nothing():
    model = network()
    before = values_of(model)
    grads = gradients_of(model, batches(1)[0])
    with pytest.raises(ValueError, match=r"Received: 5\. Allowed: 6"):
        kpe.loops.settle(model, grads[:-1])
    with pytest.raises(ValueError, match=r"for 'seq.*kernel_amax'"):
        kpe.loops.settle(model, grads[::-1])
    values = [v.value for v in model.trainable_variables]
    with pytest.raises(ValueError, match="The values do not fit"):
        kpe.loops.settled(model, grads, values[1:])
    with pytest.raises(ValueError, match="Pass the model itself"):
        kpe.loops.settle(model.get_config())
    assert_same_bits(values_of(model), before)


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch keeps gradients")
def test_gradients_must_be_given_where_none_are_kept():
    with pytest.raises(ValueError, match="Pass them as the second"):
        kpe.loops.settle(network())


# torch.optim


def squared(model, x):
    import torch

    return mean_square(model(torch.tensor(x), training=True))


@torch_only
@pytest.mark.parametrize("to_none", [True, False])
def test_a_native_loop_ends_with_the_bits_of_a_keras_one(to_none):
    import torch

    model = network()
    optimizer = torch.optim.SGD(kpe.loops.parameters(model), lr=RATE)
    for x in batches():
        model.zero_grad(set_to_none=to_none)
        squared(model, x).backward()
        optimizer.step()
        kpe.loops.settle(model)
    assert_same_bits(values_of(model), values_of(trained_by_keras(batches())))


@torch_only
@pytest.mark.parametrize("parameters", ["all", "weights"])
def test_no_native_step_trains_the_state(parameters):
    import torch

    model, settled = (trained_by_keras(batches(2)) for _ in range(2))
    chosen = kpe.loops.parameters(model)
    if parameters == "all":
        chosen = model.parameters()
    optimizer = torch.optim.AdamW(chosen, lr=0.1, weight_decay=0.5)
    weights = values_of(model)
    for each in (model, settled):
        squared(each, batches(1)[0]).backward()
    optimizer.step()
    kpe.loops.settle(settled)
    assert_same_bits(states_of(model), states_of(settled))
    assert not np.array_equal(values_of(model)[0], weights[0])
    kpe.loops.settle(model)  # nothing is left to take
    assert_same_bits(states_of(model), states_of(settled))


@torch_only
def test_backward_passes_before_one_settling_are_one_step():
    model = network()
    first, second = batches(2)
    squared(model, second).backward()
    squared(model, first).backward()
    kpe.loops.settle(model)
    kpe.loops.settle(model)  # nothing is left to take
    history = state_of(model.layers[0])["inputs"][1]
    np.testing.assert_array_equal(history, [np.abs(second).max(), 0, 0, 0])


@torch_only
def test_a_frozen_layer_keeps_its_state_until_it_is_trained_again():
    model = trained_by_keras(batches(1))
    layer = model.layers[1]
    before = states_of(layer)
    layer.trainable = False
    squared(model, batches(2)[1]).backward()
    kpe.loops.settle(model)
    assert_same_bits(states_of(layer), before)
    layer.trainable = True
    squared(model, batches(2)[1]).backward()
    kpe.loops.settle(model)
    assert not np.array_equal(states_of(layer), before)


@torch_only
def test_a_gradient_scaler_leaves_the_state_as_a_scaling_optimizer_does():
    import torch

    model = network()
    optimizer = torch.optim.SGD(kpe.loops.parameters(model), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for x, factor in zip(batches(3), (1.0, 1.0, np.inf), strict=True):
        optimizer.zero_grad()
        scaler.scale(squared(model, x) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        kpe.loops.settle(model)
    assert scaler.get_scale() == 8.0
    scaling = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(RATE), initial_scale=16.0
    )
    other = network()
    for x in batches(2):
        scaled = gradients(other, x, lambda y: mean_square(y) * 16.0)[2]
        with no_grad():
            scaling.apply(scaled, other.trainable_variables)
    for a, b in zip(model.layers, other.layers, strict=True):
        assert_same_bits([numpy(a.kernel)], [numpy(b.kernel)])
    last, expected = state_of(model.layers[1]), state_of(other.layers[1])
    assert_same_bits(last["outputs_grad"], expected["outputs_grad"])


@torch_only
def test_keras_layers_inside_a_torch_module_are_found():
    import torch

    first, last = network().layers
    model = torch.nn.Sequential(first, torch.nn.Linear(16, 16), last)
    found = kpe.loops.parameters(model)
    assert sorted(tuple(p.shape) for p in found) == sorted(
        [(8, 16), (16,), (16, 16), (16,), (16, 4), (4,)]
    )
    x = batches(1)[0]
    mean_square(model(torch.tensor(x))).backward()
    kpe.loops.settle(model)
    assert state_of(first)["inputs"][1][0] == np.abs(x).max()
    assert state_of(last)["outputs_grad"][1][0] > 0


def assert_never_observed(states):
    for state in states:
        expected = np.zeros(state.shape, "float32")
        expected[:, 0] = UNSEEN
        np.testing.assert_array_equal(state, expected)


@pytest.mark.full_except("0.5")
@pytest.mark.parametrize("factor", [0.5, 0.125, 1.5])
def test_observations_that_were_scaled_are_not_entered(factor):
    """A loop that clips all gradients by their norm scales these too."""
    model = trained_by_keras(batches(2))
    grads = gradients_of(model, batches(1)[0])
    kpe.loops.settle(model, [factor * g for g in grads])
    assert_never_observed(states_of(model))
    kpe.loops.settle(model, grads)
    assert state_of(model.layers[0])["inputs"][1][0] > 0


def test_a_norm_of_all_gradients_is_that_of_the_weights():
    model = trained_by_keras(batches(2))
    grads = [numpy(g) for g in gradients_of(model, batches(1)[0])]
    pairs = zip(model.trainable_variables, grads, strict=True)
    of_weights = [g for v, g in pairs if not kpe.loops.is_state(v)]
    assert len(of_weights) < len(grads)
    expected = np.linalg.norm(np.concatenate([g.ravel() for g in of_weights]))
    found = np.linalg.norm(np.concatenate([g.ravel() for g in grads]))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_clipping_the_values_of_all_gradients_leaves_observations_alone():
    model, other = [trained_by_keras(batches(2)) for _ in range(2)]
    grads = gradients_of(model, batches(1)[0])
    kpe.loops.settle(model, [ops.clip(g, -1e-3, 1e-3) for g in grads])
    kpe.loops.settle(other, gradients_of(other, batches(1)[0]))
    assert_same_bits(states_of(model), states_of(other))


def test_the_average_of_observations_in_two_slots_is_not_entered():
    state = states_variable(network())
    two = np.zeros(state.shape, "float32")
    two[:, :3] = 2.0 * UNIT, 6.0 * UNIT, 8.0 * UNIT
    state.assign(ops.convert_to_tensor(two / 2))
    assert_never_observed([numpy(state)])
    state.assign(ops.convert_to_tensor(two))
    assert numpy(state)[0, 10] == 8.0


@pytest.mark.full
def test_kernels_may_grow_where_a_loop_clips_all_gradients():
    """No history that stands still cuts them."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    kpe.convert(model, "delayed")
    kernel = model.layers[0].kernel
    kernel.assign(16 * numpy(kernel))
    grads = gradients_of(model, batches(1)[0])
    kpe.loops.settle(model, [g / 16 for g in grads])
    x = batches(1)[0]
    exact = x @ numpy(kernel)
    found = numpy(model(x, training=False))
    assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


@pytest.mark.full
def test_a_step_counts_though_its_observation_was_scaled():
    model = network("nvfp4")
    before = states_of(model)
    grads = gradients_of(model, batches(1)[0])
    kpe.loops.settle(model, [g / 16 for g in grads])
    for one, other in zip(before, states_of(model), strict=True):
        assert not np.array_equal(one, other)


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch has fully_shard")
def test_kernels_are_gathered_as_float8_only_on_pytorch():
    with pytest.raises(ValueError, match="only on PyTorch"):
        kpe.loops.gather_float8(network())


@torch_only
def test_a_second_call_finds_the_same_kernels_to_gather():
    model = network()
    first = kpe.loops.gather_float8(model)
    held = [kernel.value for kernel in first]
    again = kpe.loops.gather_float8(model)
    assert first and [id(k) for k in again] == [id(k) for k in first]
    assert all(
        kernel.value is value for kernel, value in zip(again, held, strict=True)
    )
