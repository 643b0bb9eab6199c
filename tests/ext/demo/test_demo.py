"""The demo in small: what it promises of its table, plot and numbers."""

import keras
import numpy as np
import pytest

from keras_policy_ext.ext import demo
from keras_policy_ext.ext.demo import runs as demo_runs
from keras_policy_ext.ext.demo import text, train

STEPS = 4
PRECISIONS = ["float32", "mixed_bfloat16", "float8"]
RECIPES = ("delayed", "mxfp8", "nvfp4(hadamard=False)")
SMALL = demo.Settings(
    steps=STEPS,
    context=16,
    width=16,
    heads=2,
    hidden=32,
    blocks=1,
    windows=4,
    validations=2,
    held_out=8,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The runs of a small demo by precision."""
    folder = tmp_path_factory.mktemp("demo")
    return demo.prepare(SMALL._replace(out=str(folder)))()


@pytest.mark.full
@pytest.mark.slow_except()
def test_float8_runs_in_every_matmul_but_the_logits(small):
    runs = small
    assert list(runs) == PRECISIONS
    assert runs["float32"].kernels == runs["mixed_bfloat16"].kernels == ""
    counts = runs["float8"].kernels.split(", ")
    assert sum(int(count.split()[0]) for count in counts) == 6
    assert {count.split()[1] for count in counts} <= {"native", "emulated"}


@pytest.mark.full
def test_precisions_start_from_the_same_weights(small):
    start = {name: run.validation[0] for name, run in small.items()}

    # bfloat16 has 8 bits: half an ulp of it bounds one rounding, 2**-9.
    assert start["mixed_bfloat16"] == pytest.approx(start["float32"], rel=2**-8)
    # e4m3 has 4 bits; roundings of many products average out.
    assert start["float8"] == pytest.approx(start["float32"], rel=2**-5)


@pytest.mark.full
def test_one_seed_gives_the_same_numbers_twice(small):
    before = small["float8"]
    corpus = text.load(None, SMALL.context)
    policy = train.policies_compared(*SMALL.recipes)["float8"]

    again = train.train(policy, corpus, SMALL, train.draw(corpus, SMALL))

    assert again.losses == before.losses
    assert again.validation == before.validation


@pytest.mark.full
def test_another_seed_gives_other_weights_and_batches():
    corpus = text.encode("the quick brown fox " * 100)

    starts = [train.draw(corpus, SMALL._replace(seed=n)) for n in (0, 1)]
    batches = [corpus.batch(0, seed, 4, 16) for seed in (0, 1)]

    name = "logits/kernel"
    assert np.any(starts[0][name] != starts[1][name])
    assert np.any(batches[0][0] != batches[1][0])


@pytest.mark.full
@pytest.mark.any_backend
def test_each_recipe_has_its_lines_and_a_row_and_there_is_a_plot(
    tmp_path, capfd
):
    settings = SMALL._replace(steps=2, recipes=RECIPES, out=str(tmp_path))
    runs = demo.prepare(settings)()
    printed = capfd.readouterr().out
    names = [*PRECISIONS[:2], *RECIPES]

    lines = printed.splitlines()
    for name in names:
        told = [x for x in lines if x.startswith(f"{name}: step ")]
        assert [x.split(", ")[0] for x in told] == [
            f"{name}: step {step} of 2" for step in (1, 2)
        ]
        (row,) = (x for x in lines if x.startswith(f"{name} "))
        loss = runs[name].validation_loss
        gap = 100 * (loss / runs["mixed_bfloat16"].validation_loss - 1)
        assert f"{loss:.4f}" in row and f"{gap:+.2f} %" in row
    assert len({run.losses for run in runs.values()}) == len(names)
    (plot,) = tmp_path.iterdir()
    assert lines[-1] == f"Plot: {plot}"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.any_backend
def test_long_runs_have_ten_lines_each(monkeypatch, capfd):
    class Model:
        weights = ()
        compile = reset_metrics = evaluate = lambda *_, **__: 1.0
        train_on_batch = evaluate

    monkeypatch.setattr(train, "decoder", lambda *_: Model())
    corpus = text.encode("the quick brown fox " * 100)
    train.train(None, corpus, SMALL._replace(steps=300), {}, "float8")
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("float8: step 300 of 300, loss 1.000, ")


@pytest.mark.any_backend
def test_the_plot_leaves_no_point_out(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: drawn.append(self)
    )
    curves = {
        "mixed_bfloat16": {0: 5.0, 10: 3.0, 20: 2.0, 30: 1.9},
        "float8": {0: 5.5, 10: 2.5, 20: 2.01, 30: 1.91},
    }
    runs = {
        name: train.Run((), curve, (), None) for name, curve in curves.items()
    }
    demo_runs.draw(runs, "title", tmp_path / "x.png")
    (figure,) = drawn
    for axes in figure.axes:
        low, high = axes.get_ylim()
        for line in axes.get_lines():
            assert (
                low <= min(line.get_ydata()) and max(line.get_ydata()) <= high
            )
    legend = [x.get_text() for x in figure.axes[0].get_legend().get_texts()]
    assert legend == ["mixed_bfloat16", "float8: +0.53 %"]


def test_recipe_is_that_of_the_float8_policy():
    compared = train.policies_compared("current")

    assert list(compared) == PRECISIONS
    assert compared["float8"].recipe.name == "current"


def test_steps_per_second_leaves_compilation_out():
    run = train.Run((1.0,) * 5, {}, (9.0, 9.0, 0.5, 0.5, 9.0), None)
    short = train.Run((1.0,), {}, (9.0,), None)

    assert run.steps_per_second == 2.0
    assert short.steps_per_second is None


@pytest.mark.any_backend
@pytest.mark.parametrize("times", [1.0, 11.0])
def test_where_bfloat16_is_slow_the_demo_says_so(times, monkeypatch, capfd):
    monkeypatch.setattr(demo_runs.machine, "slowdown", lambda: times)
    monkeypatch.setattr(demo_runs.train, "draw", lambda *_: {})
    monkeypatch.setattr(
        demo_runs.train,
        "train",
        lambda *_: train.Run((1.0,), {1: 1.0}, (1.0,), keras.Model()),
    )
    monkeypatch.setattr(demo_runs, "draw", lambda *_: None)
    demo_runs.run(SMALL, None, "x.png")
    assert ("slow" in capfd.readouterr().out) == (times > 4)


@pytest.mark.any_backend
def test_default_text_is_english_and_long_enough():
    corpus = text.load(None, context=64)

    assert len(corpus.train) > 100_000
    assert "e" in corpus.vocabulary


@pytest.mark.any_backend
def test_targets_are_the_next_characters():
    corpus = text.encode("abcdefghij" * 100)

    inputs, targets = corpus.batch(step=3, seed=1, windows=2, context=16)

    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.any_backend
def test_validation_text_is_not_trained_on():
    corpus = text.encode("a" * 900 + "b" * 100)

    assert set(corpus.train) == {corpus.vocabulary.index("a") + 1}
    assert set(corpus.validation) == {corpus.vocabulary.index("b") + 1}


@pytest.mark.any_backend
def test_rare_characters_share_a_token():
    alphabet = "".join(chr(0x4E00 + i) for i in range(1000))

    corpus = text.encode(alphabet + "common" * 100)

    assert corpus.tokens == text.VOCABULARY_LIMIT
    assert corpus.train.min() == 0
    assert corpus.train.max() < corpus.tokens
