"""`register_follower`: who follows when a model changes, all or nothing."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from keras_policy_ext import seams


class Noting(seams.Follower):
    """Notes what it is asked, and raises if it is told to."""

    def __init__(self, raises=None):
        self.raises, self.changes = raises, []

    def before(self, change):
        if self.raises == "before":
            raise RuntimeError("cannot follow")
        self.changes.append(("before", change, kind(change.model)))
        return len(self.changes)

    def after(self, change, known):
        if self.raises == "after":
            raise RuntimeError("has failed")
        self.changes.append(("after", change, kind(change.model), known))


def kind(model):
    return type(model.layers[0])


def compiled_model():
    layer = keras.layers.Dense(64)
    model = keras.Sequential([keras.Input((64,)), layer])
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def memory_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [
        kind(model),
        type(model.optimizer),
        [id(v) for v in variables],
        [np.array(keras.ops.convert_to_numpy(v)).tobytes() for v in variables],
    ]


@pytest.fixture
def registered(monkeypatch):
    """Registers followers for one test, after those of the package."""
    own = list(seams.followers())
    monkeypatch.setattr(seams, "_followers", own)
    return seams.register_follower


def test_a_follower_sees_a_model_before_and_after_each_change(registered):
    follower = registered(Noting())
    model = compiled_model()
    kpe.convert(model, "delayed")
    kpe.revert(model)

    (before, change, old), (after, same, new, known) = follower.changes[:2]
    assert (before, after, known) == ("before", "after", 1)
    assert change == same
    assert change.model is model and change.to_float8
    assert change.find_optimizers() == [model.optimizer]
    assert change.optimizer_option is None
    assert (old, new) == (keras.layers.Dense, kpe.layers.Dense)
    back = follower.changes[3]
    assert not back[1].to_float8
    assert back[2:] == (keras.layers.Dense, 3)


@pytest.mark.parametrize("moments", [None, "float8"])
@pytest.mark.extension("moments")
def test_a_follower_that_fails_undoes_the_whole_change(registered, moments):
    registered(Noting("after"))
    model = compiled_model()
    before = memory_of(model)
    with pytest.raises(RuntimeError, match="has failed"):
        kpe.convert(model, "delayed", optimizer=moments)
    assert memory_of(model) == before


def test_a_follower_that_cannot_follow_is_asked_before_the_change(registered):
    first, model = registered(Noting()), compiled_model()
    registered(Noting("before"))
    before = memory_of(model)
    with pytest.raises(RuntimeError, match="cannot follow"):
        kpe.convert(model, "delayed")
    assert memory_of(model) == before
    assert [each[0] for each in first.changes] == ["before"]


@pytest.mark.extension("moments")
def test_revert_is_undone_too(registered):
    model = compiled_model()
    kpe.convert(model, "delayed", optimizer="float8")
    before = memory_of(model)
    registered(Noting("after"))
    with pytest.raises(RuntimeError, match="has failed"):
        kpe.revert(model)
    assert memory_of(model) == before


def test_what_is_missing_for_moments_is_named(monkeypatch):
    monkeypatch.setattr(seams, "_followers", [])
    model = compiled_model()
    before = memory_of(model)
    with pytest.raises(ImportError, match=r"keras_policy_ext\.optimizers"):
        kpe.convert(model, "delayed", optimizer="float8")
    assert memory_of(model) == before
    kpe.convert(model, "delayed")
    assert kind(model) is kpe.layers.Dense


@pytest.mark.extension("mixed")
def test_what_is_missing_for_a_loss_scale_is_named(monkeypatch):
    registry = keras.saving.get_custom_objects()
    monkeypatch.delitem(registry, "keras_policy_ext>LossScaleDTypePolicy")
    config = {"name": "mixed_float16", "loss_scale": "dynamic"}
    with pytest.raises(ValueError, match=r"keras_policy_ext\.mixed_precision"):
        kpe.deserialize({"class_name": "Policy", "config": config})
    plain = {"class_name": "Policy", "config": {"name": "mixed_float16"}}
    assert kpe.deserialize(plain).name == "mixed_float16"
