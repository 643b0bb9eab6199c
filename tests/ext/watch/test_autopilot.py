"""`autopilot`: layers leave float8 while their figures are bad."""

import dataclasses
import logging
import math
import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_policy_ext as kpe
from cases import SLOW
from keras_policy_ext import backends
from steps import normal, numpy

X, Y = normal(16, 6), normal(16, 3, seed=1)
CALM = kpe.callbacks.Thresholds(
    **{
        field.name: math.inf
        for field in dataclasses.fields(kpe.callbacks.Thresholds)
        if field.name not in ("sqnr_db", "patience")
    },
    sqnr_db=1e-9,
)


class Traced(layers.Layer):
    """Counts how often a step is traced through it."""

    count = 0

    def call(self, x):
        self.count += backends.current.is_traced(x)
        return x


def mlp(recipe="delayed"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            Traced(),
            layers.Dense(5, activation="relu", name="up"),
            layers.Dense(3, name="down"),
        ],
        name="mlp",
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    kpe.convert(model, recipe)
    return model


class Batches:
    """The batch that a callback looks at; large from some samples on."""

    def __init__(self, *large):
        self.large, self.count = large, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        return X * (100.0 if self.count in self.large else 1.0), Y


def fitted(model, *large, **options):
    """Fit for seven steps, with samples that are large at some of them."""
    options = {"every": 1, "calm": 3, **options}
    callback = kpe.callbacks.Float8Autopilot(Batches(*large), **options)
    history = model.fit(
        np.tile(X, (7, 1)),
        np.tile(Y, (7, 1)),
        batch_size=16,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
    )
    return callback.autopilot, history.history


def test_the_callback_has_a_short_name():
    assert kpe.callbacks.Autopilot is kpe.callbacks.Float8Autopilot


@pytest.mark.full
def test_a_layer_leaves_and_comes_back_in_a_running_fit(caplog):
    """In place: the same variables, and slots and histories that go on."""
    model = mlp()
    model.train_on_batch(X, Y)
    variables = [*model.variables, *model.optimizer.variables]
    traced = model.layers[0].count
    caplog.set_level(logging.INFO, "keras_policy_ext")
    with pytest.warns(UserWarning, match="'mlp/up', inputs"):
        pilot, history = fitted(model, 3, thresholds=_of_inputs())
    went, came = pilot.decisions
    assert went.layer.endswith("up") and went.step == 3
    assert went.out == ("forward", "kernel_grad")
    assert "saturate" in went.reason and "inputs" in went.reason
    assert (came.step, came.out) == (6, ())
    assert came.what == "its own recipe again"
    assert [str(went), str(came)] == [r.getMessage() for r in caplog.records]
    assert history["float8_layers_out"] == [0.0]
    present = [*model.variables, *model.optimizer.variables]
    assert [id(v) for v in present] == [id(v) for v in variables]
    assert int(model.optimizer.iterations) == 8
    (state,) = model.get_layer("up").float8_state.matrices
    assert np.count_nonzero(state.rows()["inputs"][1]) == 8
    assert model.get_layer("up").float8_policy.recipe.spec == ""
    # A trace for each decision, and one for the new `fit`.
    if keras.backend.backend() != "torch":
        assert 2 <= model.layers[0].count - traced <= 3
    found = pilot.as_dict()
    assert found["out"] == {} and len(found["decisions"]) == 2
    assert "2 decisions in 7 steps." in str(pilot)


def _of_inputs():
    """Thresholds that one large sample passes, and nothing else."""
    return dataclasses.replace(CALM, saturated=0.5)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [pytest.param("delayed", marks=SLOW)])
def test_the_same_seed_brings_the_same_decisions(recipe):
    first, second = (
        fitted(mlp(recipe), 3, 4, 6)[0].decisions for _ in range(2)
    )
    assert first == second and len(first) > 2


@pytest.mark.full
@pytest.mark.slow_except()
def test_a_finer_recipe_comes_first_and_states_begin_anew_after_it():
    model = mlp()
    pilot = kpe.autopilot(
        model, every=1, finer="rowwise", calm=2, thresholds=_of_inputs()
    )
    for factor in (1, 100, 1, 1, 1):
        pilot.step((factor * X, Y))
        model.train_on_batch(X, Y)
    went, came = pilot.decisions
    assert went.recipe.startswith("rowwise") and not went.out
    assert came.recipe == ""
    (state,) = model.get_layer("up").float8_state.matrices
    assert np.count_nonzero(state.rows()["inputs"][1]) == 2


@pytest.mark.full
def test_the_wait_doubles_each_time():
    model = mlp()
    pilot = kpe.autopilot(model, every=1, calm=2, thresholds=_of_inputs())
    model.train_on_batch(X, Y)
    for factor in (100, 1, 1, 100, 1, 1, 1, 1, 1):
        pilot.step((factor * X, Y))
    assert [d.step for d in pilot.decisions] == [1, 3, 4, 8]
    assert pilot.decisions[-1].reason == "No warning in 4 samples."


def test_a_history_of_other_values_begins_anew():
    model = mlp()
    model.train_on_batch(X, Y)
    (state,) = model.get_layer("up").float8_state.matrices
    state.observe("inputs", np.abs(X).max() * 1e6)
    pilot = kpe.autopilot(model, every=1)
    with pytest.warns(UserWarning, match="another file"):
        assert pilot.step((X, Y)) is False
    decision = pilot.decisions[0]
    assert decision.layer.endswith("up") and "inputs" in decision.reason
    assert "begins anew" in decision.what and pilot.out == {}
    assert state.is_unseen("inputs") and not state.is_unseen("kernel")
    model.train_on_batch(X, Y)
    np.testing.assert_allclose(state.newest("inputs"), np.abs(X).max())


def test_a_layer_out_of_float8_computes_as_in_16_bits():
    model = mlp("current")
    stock = keras.models.clone_model(model)
    pilot = kpe.autopilot(
        model, every=1, thresholds=dataclasses.replace(CALM, sqnr_db=200.0)
    )
    for _ in range(3):
        pilot.step((X, Y))
    assert set(pilot.out.values()) == {
        "current(forward='high_precision',inputs_grad='high_precision',"
        "kernel_grad='high_precision')"
    }
    kpe.revert(stock)
    stock.set_weights(model.get_weights())
    np.testing.assert_array_equal(numpy(model(X)), numpy(stock(X)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"finer": "delayed"}, "`finer` is not a recipe"),
        ({"calm": 0}, "`calm` is not a number of samples"),
        ({"calm": "5"}, "`calm` is not a number of samples"),
        ({"every": 0}, "`every` is not a number of steps"),
        ({"every": None}, "`every` is not a number of steps"),
        ({"finer": "nope"}, "'nope' is not a recipe"),
        ({"path": "figures.txt"}, "figures.txt"),
    ],
    ids=["finer", "calm", "text", "every", "time", "name", "path"],
)
def test_bad_arguments(options, words):
    with pytest.raises(TypeError, match="no argument `share`"):
        kpe.callbacks.Float8Autopilot(X, share=0.1)
    with pytest.raises(ValueError, match=words):
        kpe.autopilot(mlp("current"), **options)
    with pytest.raises(ValueError, match=words):
        kpe.callbacks.Float8Autopilot(X, **options)


@pytest.mark.any_backend
def test_a_change_that_fails_is_no_decision(monkeypatch):
    def fails(*_):
        raise RuntimeError("no memory")

    pilot = kpe.autopilot(mlp("current"), every=1)
    monkeypatch.setattr("keras_policy_ext.ext.watch.autopilot._follow", fails)
    tiny = np.full_like(X, 1e-9)
    tiny[0, 0] = 100.0  # the others underflow
    with (
        pytest.warns(UserWarning, match="become 0"),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        pilot.step((tiny, Y))
    assert pilot.decisions == [] and pilot.out == {}


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 16, 48])
def test_a_batch_of_another_size_is_no_reason(size):
    """The gradients of a mean over fewer examples are larger."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 6)).astype("float32")
    y = np.tanh(x[:, :3])
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, name="up"), layers.Dense(3)]
    )
    model.compile("sgd", "mse")
    kpe.convert(model, "delayed")
    options = {"batch_size": 48, "verbose": 0, "shuffle": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):  # A second one finds histories from the start.
            pilot = kpe.callbacks.Float8Autopilot((x[:size], y[:size]), every=1)
            model.fit(x, y, epochs=3, callbacks=[pilot], **options)
            assert not pilot.autopilot.decisions
    history = [
        each
        for each in pilot.watch.history
        if each["operand"] == "outputs_grad" and each["step"] > 1
    ]
    assert len(history) == 10
    (last, *_) = pilot.watch.amaxes()[2::3]
    assert history[-2]["amax"] == pytest.approx(last["amaxes"][-2], rel=1e-5)


def test_gradients_that_saturate_in_training_are_still_seen():
    model = mlp()
    model.fit(X, Y, epochs=3, verbose=0)
    callback = kpe.callbacks.Float8Monitor((X[:2], Y[:2]), every=1)
    # The second step has gradients of a hundred times the size.
    weights = np.repeat([1.0, 100.0], 16).astype("float32")
    with pytest.warns(UserWarning, match="gradient.*saturate"):
        model.fit(
            np.tile(X, (2, 1)),
            np.tile(Y, (2, 1)),
            sample_weight=weights,
            batch_size=16,
            shuffle=False,
            verbose=0,
            callbacks=[callback],
        )


def test_layers_that_stay_out_are_named_when_training_ends():
    model = mlp()
    model.train_on_batch(X, Y)
    thresholds = _of_inputs()
    with pytest.warns(UserWarning, match="ends with 1 layer, such as 'mlp/up'"):
        fitted(model, 6, thresholds=thresholds)
    with pytest.warns(UserWarning, match="earlier autopilot of 'mlp' took 1"):
        kpe.autopilot(model)
    with warnings.catch_warnings():  # Said once, and its own from now on.
        warnings.simplefilter("error", UserWarning)
        kpe.autopilot(model)
