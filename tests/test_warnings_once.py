"""A warning comes once in a call, for however many layers."""

import collections
import warnings

import keras
import pytest
from keras import layers

import keras_policy_ext as kpe
from keras_policy_ext import user_code
from keras_policy_ext.backends import devices
from keras_policy_ext.mixed_precision import Policy

pytestmark = pytest.mark.any_backend


def model(**kwargs):
    four = [layers.Dense(8, **kwargs) for _ in range(4)]
    return keras.Sequential([keras.Input((8,)), *four])


@pytest.fixture
def said():
    """The warnings of this package in a test, and how often each came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = collections.Counter()
        yield (
            lambda: (
                found
                + collections.Counter(
                    str(each.message)
                    for each in caught
                    if "__array__" not in str(each.message)
                )
            )
        )


def test_a_pattern_that_matches_nothing_is_told_once(said):
    kpe.memory(model(), 8, ["delayed", "current"], exclude=["none", "none"])
    ((text, times),) = said().items()
    assert "`exclude`" in text and times == 1


def test_a_policy_of_all_layers_is_warned_of_once_when_a_file_loads(
    said, tmp_path
):
    policy = kpe.LossScaleDTypePolicy("mixed_bfloat16", "dynamic")
    model(dtype=policy).save(tmp_path / "model.keras")
    ((_, before),) = said().items()
    for load in (kpe.load_model, keras.saving.load_model):
        load(tmp_path / "model.keras")
    ((text, times),) = said().items()
    assert "loss scale" in text and times == before + 2


@pytest.mark.parametrize("load", [kpe.load_model, keras.saving.load_model])
def test_formats_that_a_device_lacks_are_told_once(said, load, tmp_path):
    converted = model()
    kpe.convert(converted, "current")
    converted.save(tmp_path / "model.keras")
    with devices.pretend("mi300"):
        load(tmp_path / "model.keras")
    ((text, times),) = said().items()
    assert "was trained in" in text and times == 1


def test_each_call_warns_anew_at_the_line_of_the_user(recwarn):
    warnings.simplefilter("always")
    for _ in range(2):
        Policy.from_config({"name": "float32", "loss_scale": "dynamic"})
    assert [each.filename for each in recwarn] == [__file__] * 2


def test_other_texts_are_not_lost(recwarn):
    @user_code.once
    def warn_of_each(*texts):
        for text in texts:
            warn(text)

    @user_code.once
    def warn(text):
        user_code.warn(text)

    warn_of_each("one", "two", "one")
    user_code.warn("one")
    assert [str(w.message) for w in recwarn] == ["one", "two", "one"]
