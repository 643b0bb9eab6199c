"""`record`, `FlightRecorder` and `replay`: the steps before a bad loss."""

import json
import math
import zipfile

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers

import keras_policy_ext as kpe
from command_lines import error_of
from keras_policy_ext.ext.cli import commands as cli
from keras_policy_ext.ext.replay import recording_files
from keras_policy_ext.ext.replay.flight_recorder import is_spike
from refusals import refused
from steps import normal, numpy


def mlp(recipe="delayed"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, activation="tanh", name="up"),
            layers.Dropout(0.25),
            layers.Dense(3, name="down"),
        ]
    )
    model.compile("adam", "mse")
    if recipe:
        kpe.convert(model, recipe)
    return model


def batches(number=6):
    return [
        (normal(8, 6, seed=2 * n), normal(8, 3, seed=2 * n + 1))
        for n in range(number)
    ]


def trained(model, data, recorder=None):
    """The losses of steps; a recorder is told of each."""
    losses = []
    for batch in data:
        losses.append(model.train_on_batch(*batch))
        if recorder is not None:
            recorder.step(batch, losses[-1])
    return losses


def test_a_step_does_not_look_at_the_steps_before(tmp_path, monkeypatch):
    model = mlp(None)
    (batch,) = batches(1)
    recorder = kpe.record(model, tmp_path / "crash.zip", every=1000)
    flattened, stock = [], keras.tree.flatten

    def counted(structure):
        flattened.append(structure)
        return stock(structure)

    monkeypatch.setattr(keras.tree, "flatten", counted)
    for _ in range(20):
        assert not recorder.step(batch, 1.0)
    assert len(flattened) == 20


@pytest.mark.full
@pytest.mark.slow_except()
def test_a_nan_is_replayed_bit_for_bit_and_its_origin_named(tmp_path):
    """A NaN in the fifth batch, and a model that was saved after step 2."""
    path, data = tmp_path / "crash.zip", batches()
    data[4][0][2, 3] = np.nan
    model = mlp()
    recorder = kpe.record(model, path, every=2)
    losses = trained(model, data, recorder)
    twin = mlp()
    without = trained(twin, data)

    assert losses[:4] == without[:4] and recorder.reason == "nonfinite"
    for a, b in zip(model.variables, twin.variables, strict=True):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    report = kpe.replay(path, recipes=["current"])
    # The step before the last save comes along: it may be the one at fault.
    assert [step.number for step in report.recording.steps] == [3, 4, 5]
    assert list(report.losses[:2]) == losses[2:4]
    assert math.isnan(report.losses[2])
    assert report.origin.layer.endswith("up")
    assert (report.origin.operand, report.origin.step) == ("inputs", 5)
    assert "The batch has such values" in report.origin.message
    assert report.survivors == ()
    json.loads(json.dumps(report.as_dict(), allow_nan=False))


def exact():
    """A model that computes its targets, but for rounding."""
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(3, use_bias=False, name="out")]
    )
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.layers[0].kernel.assign(normal(6, 3, seed=99))
    kpe.convert(model, kpe.recipes.DelayedScaling(amax_history_length=4))
    return model


@pytest.mark.full
def test_a_recipe_with_a_scale_of_the_step_survives_inputs_that_jump(tmp_path):
    """Inputs 64 times as large saturate under the scale of steps before."""
    path, model = tmp_path / "spike.zip", exact()
    kernel = numpy(model.layers[0].kernel)
    data = []
    for n in range(12):
        factor = np.float32(64 if n == 11 else 1)
        x = factor * normal(16, 6, seed=n)
        data.append((x, x @ kernel, np.full(16, factor**-2, "float32")))
    recorder = kpe.record(model, path, every=9, spike=5.0)
    losses = trained(model, data, recorder)

    assert recorder.reason == "spike" and recorder.steps == 12
    report = kpe.replay(path, steps=2, recipes=["current"])
    assert [step.number for step in report.recording.steps] == [10, 11, 12]
    assert list(report.losses) == losses[-3:]
    assert "bit for bit" in str(report)
    signs = [(x.step, x.operand, x.sign) for x in report.warnings]
    assert (12, "inputs", "saturated") in signs
    assert (report.origin.operand, report.origin.step) == ("inputs", 12)
    assert report.survivors == ("without float8", "current")
    assert [x.survived for x in report.trials] == [False, True, True]


@pytest.mark.full
def test_fit_gives_its_batches_and_losses(tmp_path):
    path, data = tmp_path / "fit.zip", batches(5)
    data[3][1][0, 0] = np.inf
    model = mlp("current")
    recorder = kpe.callbacks.FlightRecorder(path, every=3)
    model.fit(
        recorder.watching(data),
        steps_per_epoch=5,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[recorder],
    )
    found = recording_files.read(path, tmp_path)
    *_, step = found.steps
    assert [x.number for x in found.steps] == [1, 2, 3, 4]
    assert step.number == 4 and not math.isfinite(step.loss)
    np.testing.assert_array_equal(step.batch[0], data[3][0])
    np.testing.assert_array_equal(step.batch[1], data[3][1])
    assert recorder.recorder.steps == 10


def test_fit_without_its_batches_is_refused(tmp_path):
    recorder = kpe.callbacks.FlightRecorder(tmp_path / "fit.zip")
    with refused(ValueError, "batches", "other data", "watching"):
        mlp(None).fit(*batches(1)[0], verbose=0, callbacks=[recorder])


def test_a_model_without_float8_is_recorded_in_a_file_of_bounded_size(
    tmp_path,
):
    path, data = tmp_path / "small.zip", batches(8)
    data[-1][0][0, 0] = np.nan
    model = mlp(None)
    most = 100_000
    recorder = kpe.record(model, path, every=1000, max_bytes=most)
    trained(model, data, recorder)

    assert path.stat().st_size <= most
    found = recording_files.read(path, tmp_path)
    assert found.steps[-1].number == 8
    assert [path.name, recording_files.MODEL] == sorted(
        x.name for x in tmp_path.iterdir() if x.is_file()
    )[::-1]


def test_what_is_too_large_is_refused_with_the_sizes(tmp_path):
    with refused(ValueError, "too large", "max_bytes=1,000", "at least"):
        kpe.record(mlp(None), tmp_path / "a.zip", max_bytes=1000)


@keras.saving.register_keras_serializable("test_recorder")
class WithoutConfig(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def call(self, x):
        return x


def test_a_model_that_cannot_be_saved_is_refused_when_recording_starts(
    tmp_path,
):
    model = keras.Sequential([keras.Input((6,)), WithoutConfig(object())])
    model.compile("sgd", "mse")
    with refused(ValueError, "cannot be saved", "get_config", "model.save"):
        kpe.record(model, tmp_path / "a.zip")
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_compiled_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    with refused(ValueError, "cannot be recorded", "not compiled", "optimizer"):
        kpe.record(model, tmp_path / "a.zip")


@pytest.mark.parametrize(
    ("name", "options", "about"),
    [
        ("a.npz", {}, "path"),
        ("no/folder/a.zip", {}, "path"),
        ("known.zip", {}, "path"),
        ("a.zip", {"every": 0}, "every"),
        ("a.zip", {"share": 1.0}, "share"),
        ("a.zip", {"spike": 1.0}, "spike"),
    ],
)
def test_what_is_out_of_range_is_refused(name, options, about, tmp_path):
    (tmp_path / "known.zip").touch()
    value = name if about == "path" else str(options[about])
    with refused(ValueError, f"`{about}`", value, ""):
        kpe.record(mlp(None), tmp_path / name, **options)


@pytest.mark.any_backend
def test_a_spike_is_a_multiple_of_the_median_of_enough_losses():
    known = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 0.8, 1.0]
    assert is_spike(3.1, known, 3.0) and not is_spike(2.9, known, 3.0)
    assert not is_spike(3.1, known[1:], 3.0) and not is_spike(9, known, None)
    below = [-x for x in known]
    assert is_spike(1.1, below, 3.0) and not is_spike(0.9, below, 3.0)


@pytest.mark.any_backend
def test_a_batch_of_text_is_refused():
    with refused(TypeError, "batch", "<U1", "numbers"):
        recording_files.copied((np.array(["a"]),))


def written(folder, batch):
    """A recording of one step, with a few bytes in the place of the model."""
    model = folder / "some"
    model.write_bytes(b"model")
    found = recording_files.Recording(
        "nonfinite",
        None,
        (0.5, float("inf")),
        (recording_files.Step(7, float("nan"), batch),),
        recording_files.RandomState((np.arange(2),), ()),
        {"backend": "none"},
    )
    recording_files.write(folder / "a.zip", model, found)
    return found


@pytest.mark.any_backend
def test_a_file_has_nested_batches_and_losses_that_are_not_finite(tmp_path):
    bfloat16 = np.asarray(1.5, ml_dtypes.bfloat16)
    batch = {"a": [normal(2, 3), None], "b": (bfloat16,)}, np.zeros((0, 2), int)
    found = written(tmp_path, batch)
    read = recording_files.read(tmp_path / "a.zip", tmp_path)
    (step,) = read.steps
    assert str(step.loss) == "nan" and read.earlier == found.earlier
    assert (tmp_path / recording_files.MODEL).read_bytes() == b"model"
    keras.tree.assert_same_structure(step.batch, batch)
    for a, b in zip(
        keras.tree.flatten(step.batch), keras.tree.flatten(batch), strict=True
    ):
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def changed(path, change):
    """Change the record of a file."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    record = json.loads(members["record.json"])
    change(record)
    members["record.json"] = json.dumps(record)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.update(version=2), "version 2"),
        (lambda x: x.update(steps=[]), "no steps"),
        (lambda x: x.pop("seeds"), "seeds"),
        (lambda x: x["seeds"]["tuple"][0].update(shape=[10**12]), "reshape"),
        (lambda x: x["seeds"]["tuple"][0].update(dtype="object"), "object"),
        (lambda x: x["seeds"]["tuple"][0].update(array=9), "arrays/9"),
    ],
)
def test_a_damaged_file_is_refused(change, words, tmp_path):
    written(tmp_path, (np.ones(3),))
    changed(tmp_path / "a.zip", change)
    with refused(ValueError, "damaged", words, "as it was written"):
        recording_files.read(tmp_path / "a.zip", tmp_path)


@pytest.mark.usefixtures("environment_is_restored")
def test_the_command_says_what_is_no_recording(tmp_path, capsys):
    path = tmp_path / "a.zip"
    assert "cannot replay" in error_of(capsys, "replay", str(path))
    path.write_text("text")
    assert "file is no recording" in error_of(capsys, "replay", str(path))


@pytest.mark.parametrize("kind", ["text", "archive"])
def test_a_file_of_another_kind_is_no_recording(kind, tmp_path):
    path = tmp_path / "a.zip"
    path.write_text("text")
    if kind == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", "{}")
    with refused(ValueError, "no recording", "a.zip", "FlightRecorder"):
        kpe.replay(path)


@pytest.mark.parametrize(
    ("name", "options", "about"),
    [
        ("a.txt", {}, "`path`"),
        ("a.zip", {"every": 0}, "`every`"),
        ("a.zip", {"share": 2.0}, "`share`"),
        ("a.zip", {"spike": 1.0}, "`spike`"),
    ],
    ids=["path", "every", "share", "spike"],
)
def test_the_callback_refuses_what_is_out_of_range(
    name, options, about, tmp_path
):
    with pytest.raises(ValueError, match=about):
        kpe.callbacks.FlightRecorder(tmp_path / name, **options)
    with pytest.raises(TypeError, match="unknown"):
        kpe.callbacks.FlightRecorder(tmp_path / "a.zip", unknown=1)


@pytest.mark.full
@pytest.mark.usefixtures("environment_is_restored")
def test_the_command_prints_where_it_began(tmp_path, capsys):
    path, ((x, y),) = tmp_path / "a.zip", batches(1)
    x[0, 0] = np.nan
    model = mlp("current")
    trained(model, [(x, y)], kpe.record(model, path))
    assert cli.main(["replay", str(path), "--recipe", "current"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "It began at step 1, layer 'sequential" in printed
    assert "Would have survived: none of them." in printed


@pytest.mark.full
def test_batches_that_are_lists_are_replayed(tmp_path):
    """As a data loader of PyTorch returns them."""
    data = [list(batch) for batch in batches(3)]
    data[2][0][0, 0] = np.nan
    recorder = kpe.callbacks.FlightRecorder(tmp_path / "crash.zip")
    mlp().fit(
        recorder.watching(data),
        steps_per_epoch=3,
        shuffle=False,
        verbose=0,
        callbacks=[recorder],
    )
    report = kpe.replay(tmp_path / "crash.zip", recipes=[])
    assert report.origin.operand == "inputs"
    model = mlp()
    recorder = kpe.record(model, tmp_path / "own.zip")
    assert recorder.step(data[2], math.nan)
    kpe.replay(tmp_path / "own.zip", recipes=[])


class NoLoss(keras.Sequential):
    def train_step(self, *args):
        found = super().train_step(*args)
        if isinstance(found, tuple):
            return {"other": found[0]["loss"]}, found[1]
        return {"other": found["loss"]}


@pytest.mark.full
def test_a_step_without_a_loss_and_no_batches_are_refused(tmp_path):
    path = tmp_path / "crash.zip"
    recorder = kpe.callbacks.FlightRecorder(path)
    with refused(ValueError, "no batch", "[]", "as tuples"):
        next(recorder.watching([]))
    model = NoLoss([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    data = recorder.watching(batches(1))
    how = {"steps_per_epoch": 2, "shuffle": False, "verbose": 0}
    with refused(ValueError, "loss of each step", "other", "'loss'"):
        model.fit(data, callbacks=[recorder], **how)
    assert not path.exists()


class OwnCompile(keras.Sequential):
    """A model with a `compile` of its own, as tasks of KerasHub have one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compile()

    def compile(self, optimizer="sgd", loss="mae", **kwargs):
        super().compile(optimizer=optimizer, loss=loss, **kwargs)


@pytest.mark.full
def test_the_optimizer_of_a_model_with_its_own_compile_is_replayed(tmp_path):
    model = OwnCompile([keras.Input((6,)), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.train_on_batch(*batches(1)[0])
    recorder, data = kpe.record(model, tmp_path / "crash.zip"), batches(3)
    data[2][0][0, 0] = np.nan
    losses = trained(model, data, recorder)
    report = kpe.replay(
        tmp_path / "crash.zip",
        recipes=[],
        custom_objects={"OwnCompile": OwnCompile},
    )
    np.testing.assert_array_equal(report.losses, losses)
