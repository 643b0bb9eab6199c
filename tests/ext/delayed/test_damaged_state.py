"""Damaged files of a float8 state: errors say what, and nothing is changed.

Row A11 of the measured facts.
"""

import pathlib

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext.recipes import OPERANDS
from saving_models import (
    LENGTH,
    assert_equal,
    datasets,
    dense_with_state,
    float8,
    fresh,
    matrices,
    observed,
    randomized,
    user_model,
)
from steps import numpy

# Many of these models are never compiled alike, and Keras says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)


def replaced(key, value):
    def damage(group):
        del group[key]
        group[key] = value

    return damage


def added(key, value):
    def damage(group):
        group[key] = value

    return damage


def removed(*keys):
    def damage(group):
        for key in keys:
            del group[key]

    return damage


SCALE, HISTORY = "1.kernel.scale", "1.kernel.amax_history"
PART = "1.kernel.observed"
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
    "more than all observed": added(PART, np.float32(1.5)),
    "less than nothing observed": added(PART, np.float32(-0.5)),
    "NaN of it observed": added(PART, np.float32(np.nan)),
    "a count of what was observed": added(PART, np.int32(1)),
    "vector of parts observed": added(PART, np.ones(3, "float32")),
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


@pytest.mark.any_backend_except("NaN scale")
@pytest.mark.full_except(
    "NaN scale", "more than all observed", "vector of versions"
)
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
