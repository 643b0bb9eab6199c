"""The demo in small: what it promises of its tables, files and numbers."""

import csv
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from keras_policy_ext.ext import demo
from keras_policy_ext.ext.demo import plots, report, session, text, train

STEPS = 4
SMALL = demo.Size(context=16, width=16, heads=2, hidden=32, blocks=1)
PRECISIONS = ["float32", "mixed_bfloat16", "float8"]
RECIPES = ("delayed", "mxfp8", "nvfp4(hadamard=False)")


def small_settings(folder, **kwargs):
    return demo.Settings(
        **{"steps": STEPS, **kwargs},
        size=SMALL,
        windows=4,
        validations=2,
        validation_windows=8,
        out=str(folder),
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What a run leaves behind, and what it prints."""
    settings = small_settings(tmp_path_factory.mktemp("demo"))
    console = Console(file=io.StringIO(), width=100)
    outcome = demo.run(demo.prepare(settings), console)
    return outcome, console.file.getvalue()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What a run of several recipes leaves: outcome, text and numbers."""
    folder = tmp_path_factory.mktemp("compared")
    file = folder / "made" / "numbers.json"
    settings = small_settings(
        folder,
        steps=2,
        seeds=(0, 1),
        recipes=RECIPES,
        json=str(file),
    )
    console = Console(file=io.StringIO(), width=200)
    outcome = demo.run(demo.prepare(settings), console)
    return outcome, console.file.getvalue(), json.loads(file.read_text())


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.full
@pytest.mark.slow_except()
def test_table_has_a_row_for_each_precision(small):
    outcome, printed = small

    rows = report.result_rows(outcome.runs)

    assert [row[0] for row in rows] == PRECISIONS
    assert all(name in printed for name in PRECISIONS)


@pytest.mark.full
def test_gap_to_bfloat16_is_finite(small):
    runs = {run.precision: run for run in small[0].runs}

    gap = runs["float8"].gap_percent(runs["mixed_bfloat16"])

    assert math.isfinite(gap)


@pytest.mark.full
def test_float8_runs_in_every_matmul_but_the_logits_and_says_why(small):
    runs = {run.precision: run for run in small[0].runs}

    matmuls = runs["float8"].matmuls

    assert len(matmuls) == 6
    assert {m.kind for m in matmuls} <= {"native", "emulated"}
    assert all(m.reason for m in matmuls)
    assert runs["float32"].matmuls == runs["mixed_bfloat16"].matmuls == ()


@pytest.mark.full
def test_precisions_start_from_the_same_weights(small):
    start = {run.precision: run.validation[0] for run in small[0].runs}

    # bfloat16 has 8 bits: half an ulp of it bounds one rounding, 2**-9.
    assert start["mixed_bfloat16"] == pytest.approx(start["float32"], rel=2**-8)
    # e4m3 has 4 bits; roundings of many products average out.
    assert start["float8"] == pytest.approx(start["float32"], rel=2**-5)


@pytest.mark.full
def test_without_a_terminal_progress_is_lines(small):
    lines = small[1].splitlines()
    for name in PRECISIONS:
        told = [x for x in lines if x.startswith(f"{name}: step ")]
        assert [x.split(", ")[0] for x in told] == [
            f"{name}: step {step} of {STEPS}" for step in range(1, STEPS + 1)
        ]


@pytest.mark.any_backend
def test_long_runs_have_ten_lines_each():
    console = Console(file=io.StringIO(), width=80)
    with session.show_progress(console, ["float8"], 300) as advance:
        for _ in range(300):
            advance("float8", 1.0)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("float8: step 300 of 300, loss 1.000, ")


@pytest.mark.full
def test_the_last_sentence_says_what_was_seen(small):
    outcome, printed = small
    runs = {run.precision: run for run in outcome.runs}
    gap = runs["float8"].gap_percent(runs["mixed_bfloat16"])
    ((kind, _),) = {(m.kind, "") for m in runs["float8"].matmuls}
    said = report.conclusion(outcome.runs)
    assert f"After {STEPS} steps" in said and f"{abs(gap):.2f} %" in said
    assert ("above" in said) == (gap >= 0)
    assert ("emulated" in said) == (kind == "emulated")
    assert " ".join(printed.split()).endswith(said)


@pytest.mark.full
@pytest.mark.any_backend
def test_of_several_recipes_the_best_and_the_worst_are_named(compared):
    outcome, printed, _ = compared
    said = report.conclusion(outcome.runs)
    assert sum(name in said for name in RECIPES) == 2
    assert " ".join(printed.split()).endswith(said)


def forecast_of(monkeypatch, slowdown, seconds):
    monkeypatch.setattr(train.machine, "slowdown", lambda: slowdown)
    monkeypatch.setattr(
        train,
        "seconds_per_step",
        lambda policy, *_: seconds[policy],
    )
    compared = {name: name for name in seconds}
    return train.forecast(compared, None, demo.Settings(), None)


# Steps a second that were seen on a CPU without instructions for bfloat16.
SLOW = {"float32": 1 / 7.9, "mixed_bfloat16": 1 / 0.7, "float8": 1 / 3.1}


@pytest.mark.any_backend
def test_where_bfloat16_is_slow_there_are_fewer_steps(monkeypatch):
    found = forecast_of(monkeypatch, 11.0, SLOW)
    settings = demo.Settings()
    steps = found.steps(settings)
    assert train.FEWEST < steps < settings.steps
    assert steps * sum(SLOW.values()) <= train.PATIENCE
    told = train.told(found, settings, steps)
    assert "mixed_bfloat16 takes 11 times as long as in float32" in told
    assert "about 9 minutes" in told
    assert f"Taking {steps} steps" in told and "--steps 300" in told
    assert "Taking" not in train.told(found, settings, settings.steps)


@pytest.mark.any_backend
def test_where_nothing_is_slow_no_step_is_timed(monkeypatch):
    assert forecast_of(monkeypatch, 1.2, dict.fromkeys(SLOW)) is None
    assert forecast_of(monkeypatch, 9.0, dict.fromkeys(SLOW, 0.1)) is None


@pytest.mark.any_backend
@pytest.mark.parametrize("asked", [None, STEPS])
def test_steps_that_are_asked_for_are_taken(asked, monkeypatch, tmp_path):
    settings = small_settings(tmp_path, steps=300, may_shorten=asked is None)
    monkeypatch.setattr(
        train,
        "forecast",
        lambda *_: train.Forecast({"float32": 0.1, "float8": 9.0}),
    )
    console = Console(file=io.StringIO(), width=80)
    corpus = demo.prepare(settings).corpus
    shown = session.in_time(settings, corpus, console)
    assert (shown.steps < 300) == (asked is None)
    assert "takes 90 times as long" in console.file.getvalue()


@pytest.mark.any_backend
def test_the_plot_leaves_no_point_out(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: drawn.append(self)
    )
    curves = {
        "mixed_bfloat16": [{0: 5.0, 10: 3.0, 20: 2.0, 30: 1.9}],
        "float8": [{0: 5.5, 10: 2.5, 20: 2.01, 30: 1.91}],
    }
    plots.loss_curves(curves, "mixed_bfloat16", "title", tmp_path / "x.png")
    (figure,) = drawn
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for line in axes.get_lines():
            assert (
                low <= min(line.get_ydata()) and max(line.get_ydata()) <= high
            )


@pytest.mark.full
def test_csv_has_every_step_of_every_precision(small):
    lines = read_csv(small[0].csv)

    assert list(lines[0]) == list(report.CSV_COLUMNS)
    for run in small[0].runs:
        own = [line for line in lines if line["precision"] == run.precision]
        assert [int(line["step"]) for line in own] == list(range(STEPS + 1))
        assert {line["seed"] for line in own} == {"0"}
        losses = [float(line["training_loss"]) for line in own[1:]]
        assert losses == list(run.losses)
        assert float(own[-1]["validation_loss"]) == run.validation_loss


@pytest.mark.full
def test_plot_is_a_png(small):
    assert small[0].plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_one_seed_gives_the_same_numbers_twice(small):
    before = small[0].runs[-1]
    prepared = demo.prepare(small_settings(small[0].csv.parent))
    settings, corpus = prepared.settings, prepared.corpus

    again = train.train(
        before.precision,
        train.policies_compared(*settings.recipes)[before.precision],
        corpus,
        settings,
        train.draw(corpus, settings, 0),
        on_step=lambda loss: None,
    )

    assert again.losses == before.losses
    assert again.validation == before.validation


@pytest.mark.full
def test_another_seed_gives_other_weights_and_batches():
    corpus = text.encode("test", "the quick brown fox " * 100)
    settings = demo.Settings(size=SMALL)

    starts = [train.draw(corpus, settings, seed) for seed in (0, 1)]
    batches = [corpus.batch(0, start.seed, 4, 16) for start in starts]

    name = "logits/kernel"
    assert np.any(starts[0].weights[name] != starts[1].weights[name])
    assert np.any(batches[0].inputs != batches[1].inputs)


def test_recipe_is_that_of_the_float8_policy():
    compared = train.policies_compared("current")

    assert list(compared) == PRECISIONS
    assert compared["float8"].recipe.name == "current"


@pytest.mark.full
@pytest.mark.any_backend
def test_several_recipes_train_on_every_seed_and_have_a_row_each(compared):
    outcome, printed, _ = compared
    names = [*PRECISIONS[:2], *RECIPES]

    rows = report.result_rows(outcome.runs)

    assert [row[0] for row in rows] == names
    assert all(name in printed for name in names)
    found = [(run.precision, run.seed) for run in outcome.runs]
    assert found == [(name, seed) for name in names for seed in (0, 1)]
    assert len({run.losses for run in outcome.runs}) == len(found)
    assert len({run.policy for run in outcome.runs}) == len(names)
    assert outcome.plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.any_backend
def test_gaps_are_those_between_runs_of_one_seed(compared):
    outcome, _, numbers = compared
    losses = {(r.precision, r.seed): r.validation_loss for r in outcome.runs}

    assert len(numbers["runs"]) == len(outcome.runs)
    for run in numbers["runs"]:
        loss = losses[run["precision"], run["seed"]]
        baseline = losses["mixed_bfloat16", run["seed"]]
        assert run["validation_loss"] == loss
        gap = 100 * (loss / baseline - 1)
        assert run["gap_to_bfloat16_percent"] == pytest.approx(gap, abs=1e-9)


@pytest.mark.any_backend
def test_the_table_has_mean_and_spread_of_the_seeds():
    def run(precision, seed, loss):
        return train.Run(precision, "", (0.0,), {1: loss}, (9.0,), (), seed)

    runs = [
        run("mixed_bfloat16", 0, 1.0),
        run("mixed_bfloat16", 1, 2.0),
        run("float8", 0, 1.01),
        run("float8", 1, 2.06),
    ]
    baseline, float8 = report.result_rows(runs)

    assert baseline[1:3] == ("1.5000", "–")
    assert float8[1:3] == ("1.5350", "+2.00 % (+1.00 … +3.00)")


@pytest.mark.full
@pytest.mark.any_backend
def test_the_size_of_the_state_is_that_of_the_recipe(compared):
    sizes = {run.precision: run.state_bytes for run in compared[0].runs}
    # For each of 6 kernels and 3 operands: scale, uses, 8 slots, 1024 amaxes.
    assert sizes["delayed"] == 6 * 3 * (1 + 1 + 8 + 1024) * 4
    assert sizes["nvfp4(hadamard=False)"] == 6 * 1 * (1 + 1 + 8 + 1) * 4
    assert sizes["mxfp8"] == sizes["mixed_bfloat16"] == 0


def test_steps_per_second_leaves_compilation_out():
    run = train.Run("float8", "", (1.0,) * 5, {}, (9.0, 9.0, 0.5, 0.5, 9.0), ())
    short = train.Run("float8", "", (1.0,), {}, (9.0,), ())

    assert run.steps_per_second == 2.0
    assert short.steps_per_second is None


@pytest.mark.any_backend
def test_default_text_is_english_and_long_enough():
    corpus = text.load(None, context=64)

    assert len(corpus.train) > 100_000
    assert "e" in corpus.vocabulary


@pytest.mark.any_backend
def test_targets_are_the_next_characters():
    corpus = text.encode("test", "abcdefghij" * 100)

    batch = corpus.batch(step=3, seed=1, windows=2, context=16)

    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])


@pytest.mark.any_backend
def test_validation_text_is_not_trained_on():
    corpus = text.encode("test", "a" * 900 + "b" * 100)

    assert set(corpus.train) == {corpus.vocabulary.index("a") + 1}
    assert set(corpus.validation) == {corpus.vocabulary.index("b") + 1}


@pytest.mark.any_backend
def test_rare_characters_share_a_token():
    alphabet = "".join(chr(0x4E00 + i) for i in range(1000))

    corpus = text.encode("test", alphabet + "common" * 100)

    assert corpus.tokens == text.VOCABULARY_LIMIT
    assert corpus.train.min() == 0
    assert corpus.train.max() < corpus.tokens


@pytest.mark.any_backend
def test_blocks_that_are_alike_share_a_row():
    matmuls = tuple(
        train.Matmul(f"block_{i}_{name}", "ab,bc->ac", "native", "why")
        for i in range(2)
        for name in ("query", "key")
    )

    assert report.matmul_rows({"delayed": matmuls, "block": matmuls}) == [
        ("delayed, block", "query, key", "ab,bc->ac", "4 native", "why")
    ]
