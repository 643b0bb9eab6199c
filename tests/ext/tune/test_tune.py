"""`tune`: scores of layers, and a policy for a budget."""

import functools
import itertools
import json

import keras
import numpy as np
import pytest
from keras import layers

import keras_policy_ext as kpe
from keras_policy_ext._keras import calls
from keras_policy_ext.conversion.in_place import converted
from keras_policy_ext.ext.sampling import captured
from keras_policy_ext.ext.tune.tune import choose
from steps import normal, numpy

X = normal(64, 16)
Y = np.argmax(X, axis=-1)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


CALLS = []


class Counting(layers.Layer):
    """Counts the calls of a model on numbers."""

    def call(self, x):
        # Not in the layer, which is restored.
        if not calls.are_shapes_alone_wanted():
            CALLS.append(self.path)
        return x


def one(*before):
    """A model of one layer, after others without weights."""
    model = keras.Sequential(
        [keras.Input((16,)), *before, layers.Dense(16, name="one")]
    )
    model.compile("sgd", LOSS)
    return model


def mlp():
    """All matmuls have one shape, for which JAX compiles once.

    `outliers` has a channel of inputs that is far larger than others.
    """
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(16, name="first"),
            layers.Dense(16, activation="relu", name="outliers"),
            layers.Dropout(0.1),
            layers.Dense(16, name="last"),
        ],
        name="mlp",
    )
    scale = np.where(np.arange(16) == 3, 1000.0, 1.0).astype("float32")
    first, outliers = (model.get_layer(n) for n in ("first", "outliers"))
    first.kernel.assign(numpy(first.kernel) * scale)
    outliers.kernel.assign(numpy(outliers.kernel) / scale[:, None])
    model.compile("sgd", LOSS)
    return model


RECIPES = ("nvfp4", "mxfp8")
BUDGET = {"bytes": 0.2}


@functools.cache
def tuned_mlp():
    """A model, and what it was tuned to."""
    model = mlp()
    return model, kpe.tune(model, (X, Y), BUDGET, RECIPES)


# Scores


@pytest.mark.full
def test_scores_are_of_the_squared_first_order_changes_of_samples():
    model = one()
    tuned = kpe.tune(model, (X, Y), 1.0, "mxfp8")
    kernel = numpy(model.layers[0].kernel)
    with converted(model, "mxfp8"):
        error = numpy(model(X)) - X @ kernel
    logits = X @ kernel
    likely = np.exp(logits - logits.max(-1, keepdims=True))
    likely /= likely.sum(-1, keepdims=True)
    change = np.sum((likely - np.eye(16)[Y]) / len(X) * error, axis=-1)
    (score,) = tuned.scores
    np.testing.assert_allclose(
        tuned.noise, np.sqrt(np.sum(change**2)), rtol=1e-3
    )
    share = np.sum(error**2) / np.sum(logits**2)
    np.testing.assert_allclose(score.forward_error, share, rtol=1e-3)
    # Calibrated: what the loss rose by, but for the first order.
    rise = tuned.measured_increase - np.sum(change)
    np.testing.assert_allclose(score.loss_increase, rise, rtol=1e-2, atol=1e-6)


@pytest.mark.any_backend
def test_a_layer_that_loses_more_has_a_higher_score():
    _, tuned = tuned_mlp()
    found = {
        (score.layer.rsplit("/")[-1], score.recipe): score
        for score in tuned.scores
    }
    assert len(found) == 6
    outliers, last = (found[n, "nvfp4"] for n in ("outliers", "last"))
    assert outliers.loss_increase > 10 * last.loss_increase
    finer = found["outliers", "mxfp8"]
    assert outliers.loss_increase > 10 * finer.loss_increase
    assert outliers.forward_error > 4 * finer.forward_error
    assert outliers.kernel_grad_error > 4 * finer.kernel_grad_error


@pytest.mark.full
@pytest.mark.slow_except()
def test_the_loss_is_measured_with_the_same_dropout():
    model = one(layers.Dropout(0.5))
    tuned = kpe.tune(model, (X, Y), {"loss": 0.0}, "mxfp8")
    assert tuned.measured_increase == 0.0
    assert not any(score.chosen for score in tuned.scores)


@pytest.mark.any_backend
def test_scores_do_not_depend_on_the_scale_of_the_loss():
    model = mlp()
    model.compile(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), LOSS
    )
    found = kpe.tune(model, (X, Y), BUDGET, RECIPES)
    _, plain = tuned_mlp()
    np.testing.assert_allclose(plain.loss, found.loss, rtol=1e-5)
    np.testing.assert_allclose(plain.noise, found.noise, rtol=1e-3)


# What is chosen


@pytest.mark.any_backend
def test_the_budget_is_met_with_almost_the_least_expected_rise():
    _, tuned = tuned_mlp()
    rows = [
        list(row)
        for _, row in itertools.groupby(tuned.scores, lambda s: s.layer)
    ]
    total = sum(row[0].plain_bytes for row in rows)
    rises = []
    for picked in itertools.product(*[(None, *row) for row in rows]):
        read = sum(
            row[0].plain_bytes if score is None else score.bytes
            for row, score in zip(rows, picked, strict=True)
        )
        if read <= BUDGET["bytes"] * total:
            rises.append(sum(s.loss_increase for s in picked if s))
    assert min(rises) <= tuned.expected_increase < 1.1 * min(rises)
    assert tuned.bytes <= BUDGET["bytes"]
    assert tuned.multiplications == 1.0


@pytest.mark.any_backend
def test_convert_follows_the_policy():
    model, tuned = tuned_mlp()
    expected = {s.layer: s.recipe for s in tuned.scores if s.chosen}
    with converted(model, tuned) as report:
        found = {e.path: e.policy for e in report.converted}
    assert set(expected.values()) == set(RECIPES)
    assert found == {
        path: f"float8/{recipe}_from_float32"
        for path, recipe in expected.items()
    }


@pytest.mark.full
def test_the_search_costs_one_backward_and_three_forward_passes(monkeypatch):
    backward = []
    stock = captured.marked_gradients

    def counted(*args):
        backward.append(1)
        return stock(*args)

    monkeypatch.setattr(captured, "marked_gradients", counted)
    model = one(Counting())
    CALLS.clear()
    kpe.tune(model, (X, Y), {"bytes": 0.9}, "mxfp8")
    assert backward == [1]
    # JAX takes the gradients of a second pass.
    assert len(CALLS) == (4 if keras.backend.backend() == "jax" else 3)


@pytest.mark.any_backend
def test_the_model_does_not_change():
    model, _ = tuned_mlp()
    fresh = mlp()
    assert [type(x) for x in model.layers] == [type(x) for x in fresh.layers]
    for a, b in zip(model.weights, fresh.weights, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b))


# Gain and loss of each option of each layer.
LAYERS = [[(10, 1.0), (20, 1.5)], [(10, 0.1), (20, 8.0)], [(0, 0.0)]]


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("goal", "bound", "expected"),
    [
        (5, None, [None, 0, None]),
        (10, None, [None, 0, None]),
        (11, None, [1, 0, None]),  # (10, 1.0) is worse for what it gains.
        (31, None, [1, 1, None]),
        (41, None, None),
        (None, 0.0, [None, None, None]),
        (None, 1.0, [None, 0, None]),
        (None, 1.7, [1, 0, None]),
        (None, 99.0, [1, 1, None]),
    ],
)
def test_options_are_taken_by_what_they_lose_for_what_they_gain(
    goal, bound, expected
):
    assert choose(LAYERS, goal, bound) == expected


@pytest.mark.any_backend
def test_an_option_that_breaks_the_outputs_is_never_taken():
    assert choose([[(10, float("nan")), (5, 1.0)]], 5, None) == [1]


# Files


@pytest.mark.any_backend
def test_a_file_has_a_line_for_each_score_and_is_read_back(tmp_path):
    _, tuned = tuned_mlp()
    path = tmp_path / "tuned.json"
    tuned.save(path)
    loaded = kpe.Tuned.load(path)
    assert loaded == tuned and loaded.policy == tuned.policy
    fresh = mlp()
    kpe.convert(fresh, loaded)
    chosen = [score.recipe for score in tuned.scores if score.chosen]
    layers_of_it = [fresh.get_layer(n) for n in ("first", "outliers", "last")]
    policies = [layer.dtype_policy.recipe.spec for layer in layers_of_it]
    assert policies == chosen
    with pytest.raises(ValueError, match=r"another model.*mlp/outliers"):
        kpe.convert(one(), loaded)
    lines = path.read_text().splitlines()
    assert sum('"loss_increase"' in line for line in lines) == 6


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "changed",
    [{"loss": "x"}, {"unexamined": [1]}, {"recipes": "a"}, {"recipes": [5]}],
)
def test_a_file_with_values_of_other_types_is_refused(tmp_path, changed):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({**tuned_mlp()[1].as_dict(), **changed}))
    with pytest.raises(ValueError, match="is no file of `tune`"):
        kpe.Tuned.load(path)


@pytest.mark.any_backend
def test_paths_in_a_file_are_no_patterns(tmp_path):
    path = tmp_path / "tuned.json"
    rules = [["a+", None]]
    fields = {**tuned_mlp()[1].as_dict(), "rules": rules}
    path.write_text(json.dumps(fields))
    policy = kpe.Tuned.load(path).policy
    found = [policy.for_path(each) for each in ("a+", "aa")]
    is_float8 = [isinstance(each, kpe.Float8DTypePolicy) for each in found]
    assert is_float8 == [False, True]
    named = kpe.Float8DTypePolicy("float32", rules=[("a+", None)]).full_name
    path.write_text(json.dumps({**fields, "policy_name": named}))
    with pytest.raises(ValueError, match="no file of `tune`"):
        kpe.Tuned.load(path)


@pytest.mark.any_backend
@pytest.mark.parametrize("text", ["[]", "{}", '{"scores": 3}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no file of `tune`"):
        kpe.Tuned.load(path)


@pytest.mark.any_backend
def test_layers_of_one_path_count_together():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.other = (layers.Dense(16, name="d") for _ in "ab")

        def call(self, x):
            return self.other(self.one(x))

    model = Two()
    model(X)
    tuned = kpe.tune(model, X, 0.9, "current")
    assert (len(tuned.scores), tuned.multiplications) == (1, 1.0)


@pytest.mark.any_backend
def test_attention_in_float8_is_reverted_first():
    x = keras.Input((4, 16))
    model = keras.Model(x, layers.MultiHeadAttention(2, 8)(x, x))
    kpe.convert(model, "current", attention="float8")
    with pytest.raises(ValueError, match="products of attention"):
        kpe.tune(model, normal(2, 4, 16), 1.0, "current")
    kpe.revert(model)
    tuned = kpe.tune(model, normal(2, 4, 16), 1.0, "current")
    assert len(tuned.scores) == 4 and all(s.chosen for s in tuned.scores)


# Mistakes


@pytest.mark.any_backend
def test_an_empty_batch():
    with pytest.raises(ValueError, match=r"empty batch.*\(0, 16\).*Allowed"):
        kpe.tune(mlp(), (X[:0], Y[:0]), 1.0, "current")


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("budget", "error"),
    [
        (0.0, ValueError),
        (1.1, ValueError),
        (float("nan"), ValueError),
        ("0.9", TypeError),
        (True, TypeError),
        ({"loss": -0.1}, ValueError),
        ({"seconds": 1.0}, ValueError),
        ({"bytes": 0.5, "loss": 0.1}, ValueError),
    ],
)
def test_no_budget(budget, error):
    with pytest.raises(error, match="is not a budget"):
        kpe.tune(mlp(), (X, Y), budget)


@pytest.mark.any_backend
@pytest.mark.parametrize("budget", [{"loss": 0.1}, {"bytes": 0.5}])
def test_a_loss_that_is_not_finite(budget):
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16)])
    with pytest.raises(ValueError, match=r"infinite or NaN.* loss of nan"):
        kpe.tune(model, np.full_like(X, np.nan), budget, "current")


@pytest.mark.any_backend
def test_a_budget_that_cannot_be_met():
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16)])
    with pytest.raises(ValueError, match=r"met.* at least 0\.25\."):
        kpe.tune(model, X, {"bytes": 0.1}, "current")
    model = keras.Sequential([keras.Input((16,)), layers.LayerNormalization()])
    with pytest.raises(ValueError, match="has no layer to tune"):
        kpe.tune(model, X, 0.5)
