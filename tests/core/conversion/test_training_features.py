"""A converted model under everything that Keras's training offers."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import mostly
from steps import normal, numpy, state_of

BACKEND = keras.backend.backend()
RECIPES = {
    "delayed": "float8/4_from_float32",
    "current": "float8/current_from_float32",
}
WITH_STATE = mostly(RECIPES, "delayed")
"""Without a state there is nothing that training could spoil."""


X, Y = normal(8, 6), normal(8, 2, seed=1)


class Shared(keras.layers.Layer):
    """One Dense used twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(6, name="dense")

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return ops.tanh(self.dense(self.dense(x)))


def model():
    """A stock model with a shared layer and two heads."""
    inputs = keras.Input((6,))
    x = Shared(name="shared")(inputs)
    heads = [keras.layers.Dense(2, name=name)(x) for name in ("one", "two")]
    return keras.Model(inputs, heads)


def converted(recipe):
    network = model()
    kpe.convert(network, RECIPES[recipe])
    return network


def fit(network, epochs=4, x=X, **options):
    # Every step sees the same batch, so that amaxes are known.
    history = network.fit(
        x, [Y, Y], epochs=epochs, batch_size=8, verbose=0, **options
    )
    return history.history["loss"]


def assert_state_is_sane(network, recipe):
    if recipe == "current":
        assert not any("amax" in v.path for v in network.variables)
        return
    shared = network.get_layer("shared").dense
    _, history = state_of(shared)["inputs"]
    # The larger of both uses, and not their sum.
    between = np.abs(numpy(shared(X, training=False))).max()
    assert np.abs(X).max() <= history[0] < np.abs(X).max() + between
    for layer in (shared, network.get_layer("one")):
        for scale, history in state_of(layer).values():
            assert 0 < scale < 1 and np.all(np.isfinite(history))


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


FEATURES = {
    "compiled": {"jit_compile": True},
    "uncompiled": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "several steps in one": {"steps_per_execution": 2},
    "accumulation": {"optimizer": {"gradient_accumulation_steps": 2}},
    "clipnorm": {"optimizer": {"clipnorm": 0.1}},
    "global_clipnorm": {"optimizer": {"global_clipnorm": 0.1}},
    "clipvalue": {"optimizer": {"clipvalue": 0.1}},
    "weight decay": {"optimizer": {"weight_decay": 0.1}},
    "averages": {"optimizer": {"use_ema": True}},
    "averages that overwrite": {
        "optimizer": {"use_ema": True, "ema_overwrite_frequency": 2}
    },
}
JIT = BACKEND == "jax"  # XLA takes longer than it saves.


_NOT_ON_TORCH = {
    "several steps in one": "Keras refuses steps_per_execution on PyTorch",
    "compiled": "layers/test_training.py compares torch.compile with eager",
}


@pytest.mark.full
@pytest.mark.parametrize("recipe", WITH_STATE)
@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                BACKEND == "torch" and name in _NOT_ON_TORCH,
                reason=_NOT_ON_TORCH.get(name, ""),
            ),
        )
        for name in FEATURES
    ],
)
@pytest.mark.slow_except(
    "eager-delayed",
    "several steps in one-delayed",
    "global_clipnorm-delayed",
    "clipnorm-delayed",
    "clipvalue-delayed",
)
def test_a_converted_model_learns_with(feature, recipe):
    options = dict(FEATURES[feature])
    optimizer = adam(**options.pop("optimizer", {}))
    if not options.get("run_eagerly"):
        options.setdefault("jit_compile", JIT)
    network = converted(recipe)
    network.compile(optimizer, ["mse", "mse"], **options)
    x, y = np.tile(X, (2, 1)), np.tile(Y, (2, 1))
    history = network.fit(
        x, [y, y], epochs=3, batch_size=8, shuffle=False, verbose=0
    )
    losses = history.history["loss"]
    assert losses[-1] < losses[0]
    assert_state_is_sane(network, recipe)


@pytest.mark.full
@pytest.mark.parametrize("recipe", WITH_STATE)
def test_layers_frozen_and_thawed_train_and_stay_sane(recipe):
    network = converted(recipe)
    first = network.get_layer("shared").dense
    first.trainable = False
    network.compile(adam(), "mse", jit_compile=JIT)
    kernel = numpy(first.kernel)
    fit(network)
    np.testing.assert_array_equal(numpy(first.kernel), kernel)
    first.trainable = True
    network.compile(adam(), "mse", jit_compile=JIT)
    losses = fit(network)
    assert losses[-1] < losses[0]
    assert not np.array_equal(numpy(first.kernel), kernel)
    assert_state_is_sane(network, recipe)


def two_layers():
    first = keras.layers.Dense(5, name="first")
    return keras.Sequential([keras.Input((6,)), first, keras.layers.Dense(2)])


@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "after", "when made"])
def test_a_frozen_layer_has_a_frozen_state(when):
    network = two_layers()
    first = network.layers[0]
    if when == "when made":
        first = kpe.layers.Dense(5, trainable=False)
        network = keras.Sequential([keras.Input((6,)), first])
        network.add(keras.layers.Dense(2))
    if when == "before":
        first.trainable = False
    kpe.convert(network, "float8/4_from_float32")
    if when == "after":
        first.trainable = False
    (state,) = first.float8_state.matrices
    assert all(v is not state for v in network.trainable_variables)
    assert any(v is state for v in network.non_trainable_variables)
    before = numpy(state)
    network.compile("sgd", "mse", jit_compile=JIT)
    x, y = normal(8, 6), normal(8, 2)
    network.fit(x, y, verbose=0)
    np.testing.assert_array_equal(numpy(state), before)
    first.trainable = True
    network.compile("sgd", "mse", jit_compile=JIT)
    network.fit(x, y, verbose=0)
    assert not np.array_equal(numpy(state), before)


@pytest.mark.full
@pytest.mark.parametrize("recipe", WITH_STATE)
def test_adapters_train_beside_a_converted_kernel(recipe):
    network = converted(recipe)
    first = network.get_layer("one")
    kernel = numpy(first._kernel)
    first.enable_lora(2)
    network.compile(adam(), "mse", jit_compile=JIT)
    losses = fit(network)
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(numpy(first._kernel), kernel)
    assert np.any(numpy(first.lora_kernel_b))


@pytest.mark.full
def test_a_recurrent_model_learns():
    network = keras.Sequential(
        [keras.Input((3, 6)), keras.layers.GRU(5), keras.layers.Dense(2)]
    )
    assert len(kpe.convert(network, RECIPES["delayed"]).converted) == 2
    network.compile(adam(), "mse", jit_compile=JIT)
    x = normal(8, 3, 6)
    losses = network.fit(x, Y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    cell = network.layers[0].cell
    for variable in cell.float8_state.matrices:
        for scale, amaxes in variable.rows().values():
            assert 0 < scale < 1 and np.all(np.isfinite(amaxes))


# A thousand steps


@pytest.mark.full
def test_a_thousand_steps_in_float16_stay_finite():
    """Of shared layers, whose losses have weights of 1, 1e-3 and 1e-6."""
    with kpe.policy_scope("mixed_float16"):
        inputs = keras.Input((6,))
        branches = [Shared() for _ in range(3)]
        outputs = [branch(inputs) for branch in branches]
        network = keras.Model(inputs, outputs)
    kpe.convert(network, "float8/16_from_mixed_float16")
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    network.compile(
        scaler,
        ["mse"] * 3,
        loss_weights=[1.0, 1e-3, 1e-6],
        jit_compile=JIT,
        steps_per_execution=1 if BACKEND == "torch" else 50,
    )
    x, y = np.tile(X, (250, 1)), np.tile(0.5 * X, (250, 1))
    losses = []
    for _ in range(4):
        history = network.fit(
            x, [y] * 3, batch_size=8, shuffle=False, verbose=0
        )
        losses += history.history["loss"]
    assert int(numpy(scaler.inner_optimizer.iterations)) > 900
    assert np.all(np.isfinite(losses)) and losses[-1] <= losses[0]
    assert all(np.all(np.isfinite(numpy(w))) for w in network.weights)
    for branch in branches:
        assert branch.dense.compute_dtype == "float16"
        for scale, history in state_of(branch.dense).values():
            assert 0 < scale < 1e3 and np.all(np.isfinite(history))


# Batches that are no numbers


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("poison", mostly([np.nan, np.inf], np.inf))
def test_a_poisoned_batch_is_skipped_and_forgotten(recipe, poison):
    network = converted(recipe)
    scaler = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**4)
    network.compile(scaler, "mse", jit_compile=JIT)
    losses = fit(network)
    before = [numpy(w) for w in network.weights]
    fit(network, epochs=1, x=np.full_like(X, poison))
    for a, b in zip(before, network.weights, strict=True):
        np.testing.assert_array_equal(a, numpy(b))
    losses += fit(network)
    assert losses[-1] < losses[0]
    assert_state_is_sane(network, recipe)


@pytest.mark.full
@pytest.mark.parametrize("recipe", WITH_STATE)
def test_without_a_scaler_a_nan_is_seen_in_the_loss(recipe):
    network = converted(recipe)
    network.compile(adam(), "mse", jit_compile=JIT)
    fit(network, epochs=1)
    (loss,) = fit(network, epochs=1, x=np.full_like(X, np.nan))
    assert np.isnan(loss)
    for variable in network.variables:
        if "amax" in variable.path:
            assert np.all(np.isfinite(numpy(variable)))


@pytest.mark.full
@pytest.mark.parametrize("recipe", mostly(["delayed", "nvfp4"], "delayed"))
def test_averages_leave_accumulated_observations_for_the_step(recipe):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    kpe.convert(model, recipe)
    averages = {"use_ema": True, "ema_overwrite_frequency": 2}
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3, **averages)
    model.compile(sgd, "mse")
    state = model.layers[0].float8_state.matrices[0]
    changed = []
    for number in range(6):
        before = ops.convert_to_numpy(state.value).copy()
        model.train_on_batch(np.full((1, 5), 1.0 + number), np.ones((1, 3)))
        after = ops.convert_to_numpy(state.value)
        changed.append(bool((before != after).any()))
    assert changed == [False, False, True, False, False, True]
