"""Training steps are timed in turn, on copies, and what is wrong is refused."""

from collections import Counter

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.ext.bench import bench as benching
from keras_policy_ext.ext.cli import commands as cli

SIZE = 16


def network(dtype=None, compiled=True):
    model = keras.Sequential(
        [
            keras.Input((SIZE,)),
            keras.layers.Dense(SIZE, "relu", dtype=dtype),
            keras.layers.Dropout(0.5, seed=1),
            keras.layers.Dense(SIZE, dtype=dtype, name="last"),
        ]
    )
    if compiled:
        model.compile("adam", "mse")
    return model


def numbers_of(model):
    variables = (*model.variables, *model.optimizer.variables)
    return [keras.ops.convert_to_numpy(v).copy() for v in variables]


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, SIZE)), rng.normal(size=(8, SIZE))


@pytest.fixture
def clock(monkeypatch):
    """Steps of the plain model take 2 seconds, others 1."""
    order = []

    def seconds(step, repeats):
        order.append("plain" if step.is_plain else "float8")
        return 2.0 if step.is_plain else 1.0

    def step_of(model, batch):
        def step():
            raise AssertionError("the clock is not real")

        step.is_plain = not any(
            layer.quantization_mode == "float8" for layer in model.layers
        )
        return step

    monkeypatch.setattr(benching, "_seconds", seconds)
    monkeypatch.setattr(benching, "_step_of", step_of)
    return order


def test_each_recipe_has_a_row(batch):
    model = network()

    report = kpe.bench(model, batch, ["delayed", "current"], rounds=2)

    assert [entry.recipe for entry in report] == ["delayed", "current"]
    for entry in report:
        assert entry.layers == 2
        assert entry.seconds > 0
        assert entry.plain_seconds > 0
        low, high = entry.quartiles
        assert low <= entry.speedup <= high
        assert entry.emulated  # Tests run on CPUs.
    assert report["current"] is report.recipes[1]
    text = str(report)
    assert "against float32" in text
    assert "Emulated under delayed, current: " in text


def test_a_step_in_half_the_time_has_twice_the_speed(batch, clock):
    report = kpe.bench(network(), batch, "current", rounds=3)

    assert report["current"].speedup == 2.0
    assert report["current"].seconds == 1.0
    assert report["current"].plain_seconds == 2.0


def test_the_order_turns_in_every_round(batch, clock):
    kpe.bench(network(), batch, "current", rounds=2)

    tried = ["plain", "float8"]
    assert clock == [*tried, "float8", "plain", "plain", "float8"]


def test_the_model_does_not_change(batch):
    model = network()
    model.train_on_batch(*batch)
    before = numbers_of(model)

    kpe.bench(model, batch, "delayed", rounds=1)

    for one, other in zip(before, numbers_of(model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not kpe.inspect(model).layers[0].in_float8


def test_a_float8_model_is_measured_against_its_plain_form(batch, clock):
    model = network("mixed_bfloat16")
    kpe.convert(model)

    report = kpe.bench(model, batch, "current", rounds=1)

    assert report.policies == ("mixed_bfloat16",)
    assert report["current"].speedup == 2.0
    assert kpe.inspect(model).layers[0].in_float8


def test_layers_are_chosen_as_by_convert(batch, clock):
    report = kpe.bench(network(), batch, "current", rounds=1, exclude="last")

    assert report["current"].layers == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model": "mlp"}, TypeError, "not a Keras model"),
        ({"data": np.ones((8, SIZE))}, ValueError, "`data` has no targets"),
        ({"data": 3}, TypeError, "`data` is not a batch"),
        ({"rounds": 0}, ValueError, "`rounds` is not a number of rounds"),
        ({"rounds": True}, ValueError, "`rounds` is not a number of rounds"),
        ({"recipes": []}, ValueError, "`recipes` are not recipes"),
        ({"exclude": "."}, ValueError, "No layer of .* can be in float8"),
    ],
)
def test_what_is_wrong_is_refused(change, error, words, batch):
    arguments = {"model": network(), "data": batch, "recipes": "current"}

    with pytest.raises(error, match=words):
        kpe.bench(**{**arguments, **change})


def test_a_model_without_optimizer_is_refused(batch):
    with pytest.raises(ValueError, match="is not compiled"):
        kpe.bench(network(compiled=False), batch)


def test_the_command_measures_each_size(capsys, monkeypatch):
    monkeypatch.setattr(benching.machine, "slowdown", lambda: 1.0)
    options = ["--recipe", "current", "--rounds", "1"]

    assert cli.main(["bench", "--size", "16", "--size", "32", *options]) == 0

    printed = capsys.readouterr().out
    assert "Dense 16 × 16, 16 rows" in printed
    assert "Dense 32 × 32, 32 rows" in printed
    assert "against mixed_bfloat16" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_without_bfloat16_units_the_command_measures_float32(monkeypatch):
    monkeypatch.setattr(benching.machine, "slowdown", lambda: 10.0)

    report = benching.bench_dense(16, 8, ["current"], rounds=1)

    assert report.policies == ("float32",)


ENDED = "Data-dependent branching\n  Explanation: of the compiler"


@pytest.mark.skipif(
    keras.backend.backend() != "torch",
    reason="only PyTorch has graphs that end before a step does",
)
def test_a_compiled_step_has_its_graphs_beside_those_of_the_plain_one(
    batch, clock, monkeypatch
):
    from keras_policy_ext.ext.bench import torch as graphs

    before, plain, low = Counter(old=1), Counter(old=2), Counter({ENDED: 3})
    seen = [(3, before), (4, plain), (4, plain), (9, plain + low)]
    monkeypatch.setattr(graphs, "graphs_so_far", lambda: seen.pop(0))
    stock = benching._step_of

    def step_of(model, batch):
        step = stock(model, batch)

        def quick():
            return None

        quick.is_plain = step.is_plain
        return quick

    monkeypatch.setattr(benching, "_step_of", step_of)
    model = network(compiled=False)
    model.compile("adam", "mse", jit_compile=True)

    report = kpe.bench(model, batch, "current", rounds=1)

    (entry,) = report
    assert (entry.graphs, entry.breaks) == ((5, 1), (3, 1))
    assert entry.broken == "Data-dependent branching"
    text = " ".join(str(report).split())
    assert (
        "Graphs of a compiled step, and breaks: 5 and 3 under current, 1 and 1 "
        "in the plain model. The first: Data-dependent branching." in text
    )


def test_an_eager_step_has_no_graphs(batch, clock):
    report = kpe.bench(network(), batch, "current", rounds=1)
    assert report["current"].graphs is None
    assert "Graphs" not in str(report)
