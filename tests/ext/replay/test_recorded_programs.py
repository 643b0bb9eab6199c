"""Recording, replaying and watching what `fit` takes."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_policy_ext as kpe
from steps import normal


@keras.saving.register_keras_serializable("recorded_programs")
class OfOneDict(keras.Model):
    """Takes inputs and targets from one dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(3, name="dense")

    def build(self, shape=None):
        self.dense.build((None, 6))
        self.built = True

    def call(self, data, training=False):
        return self.dense(data["x"])

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return ops.mean((x["target"] - y_pred) ** 2)


def dicts(broken=None):
    x = [normal(8, 6, seed=n) for n in range(3)]
    if broken is not None:
        x[broken][0, 0] = np.nan
    return [{"x": each, "target": np.ones((8, 3), "float32")} for each in x]


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return dicts()[index]


def model_of_one_dict():
    keras.utils.set_random_seed(0)
    model = OfOneDict(name="model")
    model.build()
    model.compile("sgd")
    kpe.convert(model, "delayed")
    return model


KINDS = {
    "PyDataset": Data,
    "list": dicts,
    "tuples": lambda: [(each,) for each in dicts()],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_dicts_are_watched(kind, tmp_path):
    model = model_of_one_dict()
    recorder = kpe.callbacks.FlightRecorder(tmp_path / "run.zip")
    batches = recorder.watching(KINDS[kind]())
    how = {"steps_per_epoch": 3, "shuffle": False, "verbose": 0}
    model.fit(batches, callbacks=[recorder], **how)
    assert recorder.recorder.steps == 3


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_reads_a_dict_is_replayed(tmp_path):
    """On PyTorch it computes with tensors, and not with arrays."""
    model, path = model_of_one_dict(), tmp_path / "run.zip"
    recorder = kpe.callbacks.FlightRecorder(path)
    how = {"steps_per_epoch": 3, "shuffle": False, "verbose": 0}
    batches = recorder.watching(dicts(broken=1))
    model.fit(batches, callbacks=[recorder], **how)
    report = kpe.replay(path, recipes=["current"])
    assert (report.origin.since, report.origin.operand) == (2, "inputs")
    recorded = [step.loss for step in report.recording.steps]
    np.testing.assert_allclose(report.losses, recorded, rtol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("left", ["", "head"])
def test_a_model_with_frozen_kernels_is_replayed(left, tmp_path):
    keras.utils.set_random_seed(0)
    base = layers.Dense(6, "tanh", name="base")
    model = keras.Sequential(
        [keras.Input((6,)), base, layers.Dense(3, name="head")], name="model"
    )
    kpe.freeze(model, exclude=left or None)
    if left:
        kpe.convert(model, "delayed", include="head")
    model.compile("adam", "mse")
    recorder = kpe.record(model, tmp_path / "run.zip")
    x, y = normal(8, 6), normal(8, 3, seed=1)
    recorder.step((x, y), model.train_on_batch(x, y))
    x = x.copy()
    x[0, 0] = np.nan
    recorder.step((x, y), model.train_on_batch(x, y))
    report = kpe.replay(tmp_path / "run.zip", recipes=["current"])
    assert report.losses[0] == pytest.approx(report.recording.steps[0].loss)
    recipes = [each.recipe for each in report.trials]
    if left:
        assert report.origin.layer.endswith("head")
        assert recipes == ["as recorded", "without float8", "current"]
    else:
        assert report.origin is None and recipes == ["as recorded"]
    assert "Frozen layers" in str(report) or left


@pytest.mark.parametrize("kind", ["Float8Monitor", "Float8Autopilot"])
@pytest.mark.parametrize("number", [0, 2])
def test_training_goes_on_when_an_iterator_ends(kind, number):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    kpe.convert(model)
    batch = normal(8, 6), normal(8, 3, seed=1)
    data = iter([batch] * number)
    callback = getattr(kpe.callbacks, kind)(data, every=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        history = model.fit(
            *batch, batch_size=2, epochs=2, verbose=0, callbacks=[callback]
        )
    said = [
        str(x.message) for x in found if "No more samples" in str(x.message)
    ]
    assert len(said) == 1 and "no batch left" in said[0]
    assert len(history.history["loss"]) == 2
    assert callback.watch.taken == number and callback.watch.steps == 8


def test_a_loop_of_ones_own_is_told_by_an_error():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    kpe.convert(model)
    with pytest.raises(ValueError, match="no batch left"):
        kpe.watch(model, every=1).step(iter([]))
