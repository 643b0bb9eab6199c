"""Damaged files of a float8 state: what errors say, and what is unchanged.

The table of damages is in `core/saving/test_damaged_layers.py`.
"""

import pathlib

import h5py
import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from damages import removed, replaced
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


def test_the_message_about_damage_says_what_and_what_next(good_file, tmp_path):
    path = damaged_file(
        good_file, tmp_path, replaced("1.kernel.scale", np.float32(-1))
    )
    with pytest.raises(ValueError) as caught:
        user_model(seed=2).load_weights(path)
    message = str(caught.value)
    for part in ("'1.kernel.scale' is -1", "Received", "Allowed", "Save the"):
        assert part in message


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
