"""Files that do not fit: of float32, of other lengths, of other recipes.

Row A11 of the measured facts.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.recipes import OPERANDS
from refusals import refused
from saving_models import (
    LENGTH,
    aged,
    assert_equal,
    datasets,
    dense_with_state,
    float8,
    fresh,
    matrices,
    observed,
    own_weights,
    predictions,
    randomized,
    twin_of,
    user_model,
)
from steps import normal, numpy, state_of, step

# Many of these models are never compiled alike, and Keras says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)


CONTAINERS = ["sequential", "functional", "convolutional", "subclassed"]


# Float32 files and float8 models


@pytest.mark.full_except("subclassed")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_paths_in_a_file_are_those_of_the_stock_model(kind, tmp_path):
    found = []
    for layers in (keras.layers, kpe.layers):
        model = randomized(fresh(kind, layers=layers))
        path = tmp_path / f"{layers.__name__}.weights.h5"
        model.save_weights(path)
        found.append(datasets(path))
    stock, ours = found
    assert len(stock) > 6
    assert stock == {name for name in ours if "/float8_state/" not in name}
    assert stock != ours


@pytest.mark.full_except("functional-keras", "sequential-weights.h5")
@pytest.mark.parametrize("suffix", ["weights.h5", "keras"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_float32_file_loads_into_a_float8_model(kind, suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    stock = randomized(fresh(kind, "float32", keras.layers), seed=1)
    save(stock, path)
    model = randomized(fresh(kind))
    model.load_weights(path)
    assert_equal(own_weights(model), stock.weights)
    assert_equal(stock.optimizer.variables, model.optimizer.variables)
    for matrix in matrices(model):
        anew = matrix.rows_layout.never_observed()
        assert_equal([matrix], [anew])
    anew = twin_of(model)
    anew.set_weights(model.get_weights())
    np.testing.assert_array_equal(predictions(model), predictions(anew))


@pytest.mark.parametrize("suffix", ["weights.h5", "keras"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_float8_file_loads_into_a_float32_model(kind, suffix, tmp_path):
    path = tmp_path / f"model.{suffix}"
    model = observed(kind)
    save(model, path)
    stock = fresh(kind, "float32", keras.layers)
    stock.optimizer.build(stock.trainable_variables)
    stock.load_weights(path)
    assert_equal(own_weights(model), stock.weights)
    assert_equal(stock.optimizer.variables, model.optimizer.variables)
    ours = fresh(kind, "float32")
    ours.load_weights(path)
    np.testing.assert_array_equal(predictions(stock), predictions(ours))


def save(model, path):
    model.save(path) if path.suffix == ".keras" else model.save_weights(path)


def test_a_user_layer_reads_a_file_of_its_float32_form(tmp_path):
    plain = fresh("user_layer", "float32")
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = randomized(fresh("user_layer"), seed=1)
    model.load_weights(tmp_path / "plain.weights.h5")
    assert_equal(own_weights(model), plain.weights)
    assert np.all(numpy(matrices(model)[0])[:, 1:] == 0)


# Histories of other lengths


@pytest.mark.parametrize("length", [1, 3, 4, 16])
@pytest.mark.parametrize("saved", [1, 4, 16])
def test_another_history_length_keeps_the_newest(saved, length, tmp_path):
    path = tmp_path / "model.weights.h5"
    dense_with_state(saved).save_weights(path)
    model = dense_with_state(length, scale=99.0)
    model.load_weights(path)
    kept = min(saved, length)
    expected = np.zeros(length)
    expected[:kept] = np.arange(1, kept + 1)
    for factor, operand in enumerate(OPERANDS, start=1):
        scale, history = state_of(model.layers[0])[operand]
        assert scale == 0.5 * 2 ** (factor - 1)
        np.testing.assert_array_equal(aged(history), factor * expected)


@pytest.mark.full_except("1-4", "16-4")
@pytest.mark.parametrize("saved, length", [(4, 16), (16, 4), (4, 1), (1, 4)])
def test_training_goes_on_with_another_history_length(saved, length, tmp_path):
    model = dense_with_state(saved)
    model.save_weights(tmp_path / "model.weights.h5")
    other = dense_with_state(length)
    other.load_weights(tmp_path / "model.weights.h5")
    x = normal(8, 4)
    step(other, keras.optimizers.SGD(0.0), x, lambda y: ops.mean(ops.square(y)))
    _, history = state_of(other.layers[0])["inputs"]
    kept = min(saved, length - 1)
    expected = np.zeros(length)
    expected[0] = np.abs(x).max()
    expected[1 : kept + 1] = np.arange(1, kept + 1)
    np.testing.assert_array_equal(aged(history), expected.astype("float32"))


def test_a_scale_that_was_never_used_is_saved_as_none(tmp_path):
    model, other = fresh("sequential"), randomized(fresh("sequential"))
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(model.weights, other.weights)
    assert np.all(numpy(matrices(other)[0])[:, 9] == 0)


# What was observed, where amaxes do not tell


def with_first_columns(model, *columns):
    """The model, and what its states are that have these first columns."""
    for matrix, column in zip(matrices(model), columns, strict=True):
        state = numpy(matrix)
        state[:, 0] = column
        matrix.assign(state)
    return model


@pytest.mark.parametrize("suffix", ["weights.h5", "keras"])
def test_averages_with_what_was_never_observed_are_saved(suffix, tmp_path):
    """And operands that were all zeros, which were observed."""
    path = tmp_path / f"model.{suffix}"
    model = randomized(fresh("sequential"))
    parts = np.float32([-1.995, -1.7, np.nextafter(np.float32(-2), -3)])
    with_first_columns(model, *[parts] * len(matrices(model)))
    state = numpy(matrices(model)[0])
    state[0], state[1:, 1:] = np.eye(state.shape[1])[0] * VALID_MARK, 0
    matrices(model)[0].assign(state)
    save(model, path)
    other = fresh("sequential")
    other.load_weights(path)
    assert_equal(matrices(model), matrices(other))
    first = numpy(matrices(other)[0])[:, 0]
    np.testing.assert_array_equal(first, [VALID_MARK, *parts[1:]])


def test_a_state_as_it_looks_needs_no_entry_for_that(tmp_path):
    observed("sequential").save_weights(tmp_path / "seen.weights.h5")
    fresh("sequential").save_weights(tmp_path / "anew.weights.h5")
    for path in tmp_path.iterdir():
        assert len(datasets(path)) > 6
        assert not [name for name in datasets(path) if ".observed" in name]


# Other recipes


def test_a_file_of_delayed_scaling_loads_under_current_scaling(tmp_path):
    path = tmp_path / "model.weights.h5"
    delayed = observed("sequential")
    delayed.save_weights(path)
    current = fresh("sequential", float8(recipe="current"))
    current.load_weights(path)
    assert_equal(own_weights(delayed), current.weights)
    current.save_weights(path)
    back = randomized(fresh("sequential"), seed=1)
    back.load_weights(path)
    assert_equal(own_weights(delayed), own_weights(back))
    for matrix in matrices(back):
        assert np.all(numpy(matrix)[:, 1:] == 0), "the state starts anew"


def test_histories_survive_a_change_of_margin_and_first_scale(tmp_path):
    path = tmp_path / "model.weights.h5"
    observed("sequential").save_weights(path)
    recipe = kpe.recipes.DelayedScaling(
        amax_history_length=LENGTH, margin=2, initial_scale=1.0
    )
    other = fresh("sequential", float8(recipe=recipe))
    other.load_weights(path)
    assert_equal(matrices(observed("sequential")), matrices(other))
    assert np.all(np.isfinite(predictions(other)))


# Bad arrays for set_weights


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_set_weights_refuses_an_array_that_is_no_state(wrong):
    model = user_model(seed=2)
    before = model.get_weights()
    weights = [w.copy() for w in before]
    weights[-1][1, -1] = wrong
    with pytest.raises(ValueError, match=r"is not a float8 state of '.*gated"):
        model.set_weights(weights)
    assert_equal(before, model.weights)


def test_set_weights_refuses_the_weights_of_a_layer_without_a_state():
    layer = dense_with_state(4).layers[-1]
    before = layer.get_weights()
    with pytest.raises(ValueError, match=r"none was set.*loops\.weights"):
        layer.set_weights([2 * before[0], before[1]])
    for now, then in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_set_weights_refuses_another_history_length():
    model = dense_with_state(4)
    before = model.get_weights()
    other = dense_with_state(16).get_weights()
    with refused(ValueError, "'sequential", "(3, 26)", "(3, 14)"):
        model.set_weights(other)
    assert_equal(before[-1:], matrices(model))
