"""`watch` and `Float8Monitor`: figures of operands over steps."""

import json
import math
import sys

import keras
import numpy as np
import pytest
from keras import layers

import keras_policy_ext as kpe
from keras_policy_ext.ext.sampling import samples
from keras_policy_ext.ext.watch import monitor
from refusals import refused
from steps import normal, numpy
from unusual_layers import Experts, attention, bank

X, Y = normal(8, 6), normal(8, 3, seed=1)


def mlp(recipe="current"):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, activation="relu", name="up"),
            layers.Dense(3, name="down"),
        ]
    )
    model.compile("sgd", "mse")
    if recipe:
        kpe.convert(model, recipe)
    return model


def rows(watch, layer, operand):
    return [
        row
        for row in watch.history
        if row["layer"].endswith(layer) and row["operand"] == operand
    ]


@pytest.mark.full
@pytest.mark.slow_except()
def test_saturation_under_the_scale_of_earlier_steps_is_seen():
    """In the step in which the inputs grow, and not in the one after it."""
    model = mlp(kpe.recipes.DelayedScaling(amax_history_length=1))
    watch = kpe.watch(model, every=1)
    for factor in (1, 1, 64, 64):
        watch.step((factor * X, Y))
        model.train_on_batch(factor * X, Y)
    found = rows(watch, "up", "inputs")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    saturated = [row["saturated_fraction"] for row in found]
    assert saturated[:2] == [0.0, 0.0] and saturated[3] == 0.0
    amax = np.abs(X).max()
    expected = np.mean(np.abs(64 * X) / (amax / 448) > 464)
    np.testing.assert_allclose(saturated[2], expected, atol=0.02)
    np.testing.assert_allclose(
        [row["scale"] for row in found],
        [amax / 448, amax / 448, amax / 448, 64 * amax / 448],
        rtol=1e-5,
    )
    assert found[2]["sqnr_db"] < 5 < 20 < found[1]["sqnr_db"]
    grads = rows(watch, "down", "outputs_grad")
    assert all(row["amax"] > 0 and row["kurtosis"] > 1 for row in grads)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
@pytest.mark.slow_except("delayed")
def test_training_goes_on_as_without_it(recipe):
    twins = [mlp(recipe), mlp(recipe)]
    twins[1].set_weights(twins[0].get_weights())
    watch = kpe.watch(twins[0], every=1)
    for _ in range(3):
        for model in twins:
            model.train_on_batch(X, Y)
        watch.step((X, Y))
    first, second = ([numpy(v) for v in m.variables] for m in twins)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
def test_the_callback_logs_and_writes(tmp_path):
    model = mlp("delayed")
    before = [set(vars(layer)) for layer in model.layers]
    callback = kpe.callbacks.Float8Monitor(
        (X, Y),
        every=2,
        path=tmp_path / "run.jsonl",
        page=tmp_path / "run.html",
    )
    history = model.fit(
        X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[callback]
    )
    for name in ("sqnr_db", "saturated_fraction", "underflow_fraction"):
        assert len(history.history[f"float8_{name}"]) == 2
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert found == callback.watch.history
    assert sorted({row["step"] for row in found}) == [1, 3, 5, 7]
    page = (tmp_path / "run.html").read_text()
    assert page.count("<polyline") == 2 * 6
    assert "http" not in page and "<script" not in page
    kpe.revert(model)
    assert not any(value is callback.watch for value in vars(model).values())
    after = [set(vars(layer)) for layer in model.layers]
    assert all(a <= b for a, b in zip(after, before, strict=True))


def test_a_nan_is_counted_and_leaves_the_figures():
    watch = kpe.watch(mlp(), every=1)
    bad = X.copy()
    bad[0, 0] = np.nan
    watch.step((bad, Y))
    (inputs,) = rows(watch, "up", "inputs")
    assert inputs["nonfinite"] == 1
    np.testing.assert_allclose(inputs["amax"], np.abs(X).max(), atol=1)
    json.dumps(watch.history, allow_nan=False)
    assert watch.page().startswith("<!DOCTYPE html>")


class Clock:
    """Each pass takes a second."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.full
def test_samples_take_the_share_of_the_time_that_they_may(monkeypatch):
    clock, passes = Clock(), []
    monkeypatch.setattr(monitor, "time", clock)
    stock = monitor.captured

    def captured(*args):
        clock.now += 1.0
        passes.append(clock.now)
        return stock(*args)

    monkeypatch.setattr(monitor, "captured", captured)
    watch = kpe.watch(mlp(), share=0.1)
    taken = []
    for step in range(100):
        if watch.step((X, Y)):
            taken.append(step)
        clock.now += 0.5
    # The first sample runs twice, as it compiles. Then 10 seconds are 20 steps.
    assert taken == [0, 20, 40, 60, 80] and len(passes) == 6


@pytest.mark.full
def test_history_keeps_the_whole_run_within_bounds(monkeypatch):
    monkeypatch.setattr(samples, "MOST", 4)
    watch = kpe.watch(mlp(), every=1)
    for _ in range(12):
        watch.step((X, Y))
    steps = sorted({row["step"] for row in watch.history})
    assert steps == [1, 5, 9]


def test_a_page_without_samples():
    watch = kpe.watch(mlp(), every=1)
    assert watch.logs() == {} and "No sample" in watch.page()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, "not a number of steps"),
        ({"every": 2.5}, "not a number of steps"),
        ({"share": 0.0}, "not a share of the time"),
    ],
    ids=["every", "fraction", "share"],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        kpe.watch(mlp(), **arguments)


def test_a_model_without_float8_is_refused():
    with pytest.raises(ValueError, match="has nothing to watch"):
        kpe.watch(mlp(None))


def test_a_row_keeps_the_note_of_its_own_sample():
    watch = kpe.watch(mlp(), every=1)
    watch.step((0 * X, Y))
    watch.step((X, Y))
    assert [row["note"] for row in rows(watch, "up", "inputs")] == ["zeros", ""]


def test_a_callback_watches_the_model_that_is_fitted():
    callback = kpe.callbacks.Float8Monitor((X, Y), every=1)
    for _ in range(2):
        model = mlp()
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
        assert callback.watch.model is model and callback.watch.steps == 1
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert callback.watch.steps == 2


def test_an_iterator_that_ends_is_named():
    watch = kpe.watch(mlp(), every=1)
    batches = iter([(X, Y)])
    watch.step(batches)
    with refused(ValueError, "no batch left", "list_iterator", "each sample"):
        watch.step(batches)


@pytest.mark.full
def test_layers_are_shown_as_what_they_are():
    model = Experts()
    model(X)
    kpe.convert(model, "delayed")
    model.head.trainable = False
    watch = kpe.watch(model, every=1)
    watch.step(X)
    notes = {
        (row["layer"].rpartition("/")[2], row["operand"]): row["note"]
        for row in watch.history
    }
    assert {layer for layer, _ in notes} == {"empty", "zeros", "shared", "head"}
    assert notes["empty", "inputs"] == "no values"
    assert notes["zeros", "inputs"] == "zeros"
    assert notes["head", "kernel"] == "frozen"
    assert {row["uses"] for row in rows(watch, "shared", "inputs")} == {2}
    (unused,) = watch.unexamined.items()
    assert unused[0].endswith("unused") and "did not call" in unused[1]
    text, page = watch.report().table(full=True), watch.page()
    for word in ("no values", "frozen", "zeros", "2 uses", "did not call"):
        assert word in text and word in page


@pytest.mark.full
def test_experts_of_a_bank_without_tokens_are_counted():
    model = bank()
    kpe.convert(model, "current")
    x = normal(4, 3, 6)
    x[:, 1] = 0.0
    watch = kpe.watch(model, every=1)
    watch.step(x)
    (inputs,) = rows(watch, "experts", "inputs")
    assert inputs["note"] == "no values for 1 of 3 matrices"


@pytest.mark.slow
@pytest.mark.full
def test_products_of_two_activations_are_shown():
    model = attention()
    kpe.convert(model, "rowwise", attention="float8")
    watch = kpe.watch(model, every=1)
    watch.step(normal(2, 5, 8))
    found = [row for row in watch.history if row["layer"] == "mha"]
    kernels = [row["kernel"] for row in found]
    assert kernels == ["scores"] * 3 + ["weighted sum"] * 3
    assert all(row["sqnr_db"] > 25 and not row["note"] for row in found)


@pytest.mark.full
def test_the_amaxes_of_all_steps_are_known_without_a_sample():
    """The steps observe them: a peak between two samples is in the later."""
    model = mlp("delayed")
    watch = kpe.watch(model, every=4)
    factors = (1, 2, 32, 4, 1, 8)
    for factor in factors:
        model.train_on_batch(factor * X, Y)
        watch.step((X, Y))
    amax = np.abs(X).max()
    (found,) = (
        row
        for row in watch.amaxes()
        if row["layer"].endswith("up") and row["operand"] == "inputs"
    )
    np.testing.assert_allclose(
        found["amaxes"], amax * np.array(factors), rtol=1e-6
    )
    np.testing.assert_allclose(found["scale"], 32 * amax / 448, rtol=1e-6)
    first, second = rows(watch, "up", "inputs")
    np.testing.assert_allclose(first["peak_amax"], amax, rtol=1e-6)
    np.testing.assert_allclose(second["peak_amax"], 32 * amax, rtol=1e-6)
    np.testing.assert_allclose(second["amax"], amax, rtol=1e-6)


def test_a_recipe_without_history_remembers_no_amax():
    watch = kpe.watch(mlp("current"), every=1)
    watch.step((X, Y))
    assert watch.amaxes() == []
    assert {row["peak_amax"] for row in watch.history} == {None}


@pytest.mark.full
def test_tensorboard_reads_the_event_file(tmp_path):
    pytest.importorskip("tensorboard", reason="it writes the file")
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    model = mlp("delayed")
    callback = kpe.callbacks.Float8Monitor((X, Y), every=2, log_dir=tmp_path)
    model.fit(X, Y, batch_size=2, verbose=0, callbacks=[callback])
    reader = event_accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    read = {
        (event.step, tag): float(tensor_util.make_ndarray(event.tensor_proto))
        for tag in reader.Tags()["tensors"]
        for event in reader.Tensors(tag)
    }
    written = {
        (
            row["step"],
            f"float8_{name}/{row['layer']}/{row['kernel']}/{row['operand']}",
        ): row[name]
        for row in callback.watch.history
        for name in samples.FIGURES
        if row[name] is not None
    }
    assert read == written and len({step for step, _ in read}) == 2
    plugins = reader.SummaryMetadata(next(iter(written))[1]).plugin_data
    assert plugins.plugin_name == "scalars"


def test_tensorboard_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        kpe.watch(mlp(), log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_a_file_that_cannot_be_written_does_not_end_training(tmp_path):
    path = tmp_path / "runs" / "run.jsonl"
    path.parent.mkdir()
    watch = kpe.watch(mlp(), every=1, path=path)
    watch.step((X, Y))
    path.unlink()
    path.parent.rmdir()
    with pytest.warns(UserWarning, match="from step 2 on are in no file"):
        watch.step((X, Y))
    watch.step((X, Y))
    assert {row["step"] for row in watch.history} == {1, 2, 3}


@pytest.mark.full
@pytest.mark.skipif(
    keras.backend.backend() == "torch",
    reason="Keras refuses steps_per_execution on PyTorch",
)
def test_steps_of_executions_are_counted():
    """Of five batches, by two; a sample is before or after an execution."""
    model = mlp()
    model.compile("sgd", "mse", steps_per_execution=2)
    watching = kpe.callbacks.Float8Monitor((X, Y), every=1)
    steering = kpe.callbacks.Float8Autopilot((X, Y), every=3)
    callbacks = [watching, steering]
    for _ in range(2):
        model.fit(*(X[:5], Y[:5]), batch_size=1, verbose=0, callbacks=callbacks)
    assert watching.watch.steps == steering.watch.steps == 10
    taken = [row["step"] for row in rows(watching.watch, "up", "kernel")]
    assert taken == [2, 4, 5, 7, 9, 10]
    # Steps 1, 4, 7 and 10 are due; executions begin at 1, 3, 5, 6, 8 and 10.
    taken = [row["step"] for row in rows(steering.watch, "up", "kernel")]
    assert taken == [1, 5, 8, 10]


def test_steps_between_two_calls_are_counted():
    watch = kpe.watch(mlp(), every=3)
    taken = [watch.step((X, Y), steps=2) for _ in range(5)]
    assert taken == [True, True, False, True, True] and watch.steps == 10
    with refused(ValueError, "`steps` is not a number of steps", "0", ">= 1"):
        watch.step((X, Y), steps=0)


class Two(keras.layers.Layer):
    """Two layers of one name, and so of one path."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(6, name="same") for _ in "ab"]

    def call(self, x):
        first, second = self.parts
        return second(100.0 * first(x))


@pytest.mark.full
def test_layers_with_one_path_are_told_apart():
    model = keras.Sequential([keras.Input((6,)), Two()])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    kpe.convert(model, "delayed")
    limits = {"gradient_growth": math.inf, "sqnr_db": 1e-9}
    thresholds = kpe.callbacks.Thresholds(
        **limits, saturated=math.inf, underflow=math.inf, scale=math.inf
    )
    autopilot = kpe.autopilot(model, every=1, thresholds=thresholds)
    autopilot.step((X, X))
    found = {r["layer"]: r["amax"] for r in rows(autopilot.watch, "", "inputs")}
    (first, low), (second, high) = found.items()
    assert second == f"{first} (2)" and high > 10 * low
    model.train_on_batch(X, X)
    amaxes = autopilot.watch.amaxes()
    assert [r["layer"] for r in amaxes] == [first] * 3 + [second] * 3
    bias = model.layers[0].parts[0].bias
    bias.assign(bias + 100.0)  # It makes the inputs of the second one grow.
    with pytest.warns(UserWarning, match=r"\(2\)', inputs: the largest grew"):
        autopilot.step((X, X))
    assert list(autopilot.out) == [second]


@pytest.mark.full
def test_gradients_of_an_unknown_loss_are_told():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    kpe.convert(model, "current")
    with pytest.warns(UserWarning, match="is not known"):
        kpe.watch(model, every=1).step(X)


def test_thresholds_and_losses_of_another_type_are_refused():
    with refused(TypeError, "thresholds", "noise", "Thresholds"):
        kpe.watch(mlp(), thresholds={"noise": 3})
    with refused(TypeError, "`loss`", "mse", "outputs"):
        kpe.watch(mlp(), loss="mse")
    with refused(TypeError, "thresholds", "3", "Thresholds"):
        kpe.callbacks.Float8Autopilot(X, thresholds=3)
    with refused(TypeError, "`loss`", "mse", "outputs"):
        kpe.callbacks.Float8Monitor(X, loss="mse")


@pytest.mark.parametrize(
    ("name", "value"),
    [("every", 0), ("share", 2.0), ("path", "figures.txt")],
)
def test_the_callback_refuses_what_is_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        kpe.callbacks.Float8Monitor(X, **{name: value})
