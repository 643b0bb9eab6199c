"""Files that do not fit: of float32, other lengths, other recipes; damaged.

Row A11 of the measured facts. What is wrong with a file changes nothing in the
state of the live model.
"""

import pathlib

import h5py
import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.layers.state_variable import never_observed
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import OPERANDS
from saving_models import (
    LENGTH,
    assert_equal,
    float8,
    fresh,
    matrices,
    observed,
    own_weights,
    predictions,
    randomized,
    twin_of,
)
from steps import normal, numpy, state_of, step

# Many of these models are never compiled alike, and Keras says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)


CONTAINERS = ["sequential", "functional", "convolutional", "subclassed"]


# Float32 files and float8 models


def datasets(path):
    """Paths of all arrays in a .weights.h5 file."""
    found = set()
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: (
                found.add(name) if isinstance(item, h5py.Dataset) else None
            )
        )
    return found


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
        anew = never_observed(tuple(matrix.shape))
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


def aged(ring):
    """A history from the newest to the oldest entry."""
    return np.concatenate([ring[:1], ring[:0:-1]])


def dense_with_state(length, scale=0.5, **kwargs):
    """A Dense whose newest amax is 1, the one before it 2, and so on."""
    policy = float8(length=length, **kwargs)
    model = keras.Sequential(
        [keras.Input((4,)), kpe.layers.Dense(4, dtype=policy)]
    )
    (matrix,) = matrices(model)
    newest_first = np.arange(1, length + 1, dtype="float32")
    rings = np.stack([aged(newest_first * factor) for factor in (1, 2, 3)])
    layout = source_of(matrix.recipe).layout
    scales = np.array([1, 2, 4], "float32") * scale
    state = numpy(matrix)
    layout.scale(state)[:], layout.history(state)[:] = scales, rings
    matrix.assign(state)
    return model


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


# Damaged files: an error that says what, and nothing is half-changed


def user_model(seed):
    """One layer with two kernels, and a state as if it had been trained."""
    model = fresh("user_layer", float8())
    return randomized(model, seed)


def replaced(key, value):
    def damage(group):
        del group[key]
        group[key] = value

    return damage


def removed(*keys):
    def damage(group):
        for key in keys:
            del group[key]

    return damage


SCALE, HISTORY = "1.kernel.scale", "1.kernel.amax_history"
AMAXES = np.ones(LENGTH, "float32")

DAMAGES = {
    "no version": removed("format_version"),
    "version of zero": replaced("format_version", np.int32(0)),
    "fractional version": replaced("format_version", np.float32(1.5)),
    "vector of versions": replaced("format_version", np.array([1, 1])),
    "no history": removed(HISTORY),
    "no scale": removed(SCALE),
    "no operand": removed(SCALE, HISTORY),
    "history of two axes": replaced(HISTORY, np.ones((2, 2), "float32")),
    "history without entries": replaced(HISTORY, np.ones(0, "float32")),
    "scalar history": replaced(HISTORY, np.float32(1)),
    "vector scale": replaced(SCALE, np.ones(3, "float32")),
    "text": replaced(SCALE, "one"),
    "integers": replaced(HISTORY, np.ones(LENGTH, "int32")),
    "NaN in history": replaced(HISTORY, AMAXES * np.nan),
    "inf in history": replaced(HISTORY, AMAXES * np.inf),
    "too large for float32": replaced(HISTORY, np.full(LENGTH, 1e300)),
    "negative history": replaced(HISTORY, -AMAXES),
    "NaN scale": replaced(SCALE, np.float32(np.nan)),
    "inf scale": replaced(SCALE, np.float32(np.inf)),
    "negative scale": replaced(SCALE, np.float32(-1)),
}


@pytest.fixture(scope="module")
def good_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.weights.h5"
    user_model(seed=1).save_weights(path)
    return path


def damaged_file(good_file, folder, damage):
    path = folder / "damaged.weights.h5"
    path.write_bytes(good_file.read_bytes())
    with h5py.File(path, "a") as file:
        found = [x for x in datasets(good_file) if x.endswith("format_version")]
        (version,) = found
        damage(file[str(pathlib.PurePosixPath(version).parent)])
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_as_a_whole(damage, good_file, tmp_path):
    path = damaged_file(good_file, tmp_path, DAMAGES[damage])
    model = user_model(seed=2)
    before = [numpy(v) for v in matrices(model)]
    with pytest.raises(ValueError, match=r"state of '.*gated.*is damaged"):
        model.load_weights(path)
    assert_equal(before, matrices(model))


def test_the_message_about_damage_says_what_and_what_next(good_file, tmp_path):
    path = damaged_file(good_file, tmp_path, DAMAGES["negative scale"])
    with pytest.raises(ValueError) as caught:
        user_model(seed=2).load_weights(path)
    message = str(caught.value)
    for part in ("'1.kernel.scale' is -1", "Received", "Allowed", "Save the"):
        assert part in message


def test_a_file_of_a_newer_version_is_refused(good_file, tmp_path):
    newer = replaced("format_version", np.int32(2))
    path = damaged_file(good_file, tmp_path, newer)
    model = user_model(seed=2)
    before = [numpy(v) for v in matrices(model)]
    with pytest.raises(ValueError, match=r"newer version.*Update"):
        model.load_weights(path)
    assert_equal(before, matrices(model))


def test_the_format_version_is_in_every_group_with_state(tmp_path):
    path = tmp_path / "model.weights.h5"
    observed("convolutional").save_weights(path)
    versions = [x for x in datasets(path) if x.endswith("/format_version")]
    assert len(versions) == 3
    with h5py.File(path, "r") as file:
        assert {int(file[x][()]) for x in versions} == {1}


def test_a_state_without_entries_for_a_kernel_starts_anew(good_file, tmp_path):
    gone = [f"1.{o}.{k}" for o in OPERANDS for k in ("scale", "amax_history")]
    path = damaged_file(good_file, tmp_path, removed(*gone))
    model = user_model(seed=2)
    model.load_weights(path)
    first, second = matrices(model)
    assert_equal([first], [matrices(user_model(seed=1))[0]])
    assert np.all(numpy(second)[:, 1:] == 0)


def test_a_damaged_state_is_not_overlooked_in_a_layer_with_two_names(tmp_path):
    # Keras looks for what failed under the layer's second name, `first`,
    # where the file has nothing: not a float32 file, then, but the same one.
    path = tmp_path / "model.weights.h5"
    observed("subclassed").save_weights(path)
    with h5py.File(path, "a") as file:
        group = file["blocks/dense/float8_state/vars"]
        replaced("0.inputs.scale", np.float32(np.nan))(group)
    model = randomized(fresh("subclassed"), seed=1)
    before = numpy(matrices(model)[0])
    with pytest.raises(ValueError, match="is damaged"):
        model.load_weights(path)
    assert_equal([before], matrices(model)[:1])
    observed("subclassed").save_weights(path)
    model.load_weights(path)
    assert_equal(matrices(observed("subclassed")), matrices(model))


def test_a_truncated_file_changes_nothing(good_file, tmp_path):
    path = tmp_path / "truncated.weights.h5"
    content = good_file.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    model = user_model(seed=2)
    before = model.get_weights()
    with pytest.raises(OSError, match="truncated file"):
        model.load_weights(path)
    assert_equal(before, model.weights)


@pytest.mark.parametrize("units", [2, 3])
def test_a_file_of_another_architecture_leaves_the_state(units, tmp_path):
    other = keras.Sequential(
        [keras.Input((6,)), kpe.layers.Dense(units, dtype=float8())]
    )
    path = tmp_path / "other.weights.h5"
    other.save_weights(path)
    model = user_model(seed=2)
    before = model.get_weights()
    with pytest.raises(ValueError, match="could not be loaded"):
        model.load_weights(path)
    assert_equal(before, model.weights)
    with pytest.warns(UserWarning, match="could not be loaded"):
        model.load_weights(path, skip_mismatch=True)
    assert_equal(before, model.weights)


def test_a_state_is_not_loaded_without_its_kernel(tmp_path):
    path = tmp_path / "model.weights.h5"
    wide = keras.Sequential(
        [keras.Input((4,)), kpe.layers.Dense(5, dtype=float8())]
    )
    wide.save_weights(path)
    model = dense_with_state(LENGTH)
    before = model.get_weights()
    with pytest.warns(UserWarning, match="could not be loaded"):
        model.load_weights(path, skip_mismatch=True)
    assert_equal(before, model.weights)


# Bad arrays for set_weights


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_set_weights_refuses_an_array_that_is_no_state(wrong):
    model = user_model(seed=2)
    before = model.get_weights()
    weights = [w.copy() for w in before]
    weights[-1][1, -1] = wrong
    with pytest.raises(ValueError, match=r"is no float8 state of '.*gated"):
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
    with pytest.raises(ValueError, match="not compatible"):
        model.set_weights(dense_with_state(16).get_weights())
    assert_equal(before[-1:], matrices(model))
