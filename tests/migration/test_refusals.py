"""Files that are not loaded: what is wrong is said, and nothing is run."""

import json
import pickle
import re
import shutil
import zipfile

import h5py
import keras
import numpy as np
import pytest

from keras_policy_ext import migration
from legacy_files import (
    FILES,
    expected,
    load,
    predictions,
    python_that_wrote_the_bytecode,
)


def refused(path, words, **kwargs):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        migration.load_legacy_model(path, **kwargs)
    return str(error.value)


def copied(tmp_path, name):
    return shutil.copy(FILES / name, tmp_path / name)


def with_config(path, change):
    """Change the config of an HDF5 file."""
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        change(config["config"]["layers"])
        file.attrs["model_config"] = json.dumps(config)
    return path


@pytest.mark.parametrize("ending", ["h5", "keras"])
def test_bytecode_is_refused_by_name(ending, monkeypatch):
    import marshal

    monkeypatch.setattr(marshal, "loads", None)  # not even read

    message = refused(FILES / f"bytecode.{ending}", "Python bytecode")

    assert "Lambda 'double'" in message
    assert "safe_mode=False" in message


@pytest.mark.skipif(
    not python_that_wrote_the_bytecode(),
    reason="bytecode of Python 3.11 runs on Python 3.11 only",
)
@pytest.mark.parametrize("ending", ["h5", "keras"])
def test_bytecode_runs_when_the_file_is_trusted(ending):
    name = f"bytecode.{ending}"

    model = load(name, safe_mode=False)

    np.testing.assert_array_equal(
        predictions(model, name)[""], expected(name)["predictions"][""]
    )


class Dangerous:
    ran = False

    def __reduce__(self):
        return setattr, (Dangerous, "ran", True)


@pytest.mark.parametrize("safe_mode", [True, False])
def test_pickle_is_never_loaded(tmp_path, safe_mode):
    path = tmp_path / "model.h5"
    path.write_bytes(pickle.dumps(Dangerous()))

    refused(path, "is a pickle", safe_mode=safe_mode)

    assert not Dangerous.ran


def test_module_that_a_file_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "payload.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = copied(tmp_path, "nested.h5")

    def change(layers):
        layers[0].update(module="payload", registered_name="payload>Layer")
        layers[0]["class_name"] = "Layer_"

    refused(with_config(path, change), "Unknown: Layer_")


def test_unknown_classes_are_named_all_at_once(tmp_path):
    path = copied(tmp_path, "tensorflow_2_3.h5")

    def change(layers):
        layers[1]["class_name"] = "First"
        layers[2]["class_name"] = "Custom>Second"

    message = refused(with_config(path, change), "Unknown")

    assert "First 'dense'" in message
    assert "Custom>Second 'dense_1'" in message


class Doubled(keras.layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


def test_custom_layer_gets_the_weights_of_its_file(tmp_path):
    name = "tensorflow_2_3.h5"
    path = copied(tmp_path, name)

    def change(layers):
        layers[-1]["class_name"] = "Custom>Doubled"

    model = migration.load_legacy_model(
        with_config(path, change),
        custom_objects={"Doubled": Doubled},
        compile=False,
        on_loss_scale="keep",
    )

    # Twice a prediction, both rounded from the same float32 sums.
    np.testing.assert_allclose(
        predictions(model, name)[""],
        2 * expected(name)["predictions"][""],
        atol=3 * 2**-11,
    )


@pytest.mark.parametrize("name", ["nested.h5", "nested.keras"])
@pytest.mark.parametrize("part", [0.2, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path, name, part):
    path = copied(tmp_path, name)
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])

    refused(path, "damaged")


@pytest.mark.parametrize(
    "data, words",
    [(b"", "is empty"), (b"Keras model", "neither HDF5 nor an archive")],
)
def test_other_files_are_refused(tmp_path, data, words):
    path = tmp_path / "model.h5"
    path.write_bytes(data)

    refused(path, words)


def test_missing_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.h5"):
        migration.load_legacy_model(tmp_path / "none.h5")


def test_folders_are_refused(tmp_path):
    refused(tmp_path, "is a folder")

    (tmp_path / "saved_model.pb").write_bytes(b"")

    refused(tmp_path, "is a TensorFlow SavedModel")


@pytest.mark.parametrize("ending", ["h5", "keras"])
def test_file_of_keras_3_is_refused(tmp_path, ending):
    path = tmp_path / f"model.{ending}"
    model = keras.Sequential([keras.Input((2,)), keras.layers.Flatten()])
    model.save(path)

    refused(path, "keras.saving.load_model")


def test_archive_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")

    refused(path, "is no model")


def test_weights_alone_are_refused(tmp_path):
    legacy, newer = tmp_path / "weights.h5", tmp_path / "new.weights.h5"
    with h5py.File(FILES / "nested.h5") as file, h5py.File(legacy, "w") as new:
        for key, value in file["model_weights"].attrs.items():
            new.attrs[key] = value
    with zipfile.ZipFile(FILES / "nested.keras") as archive:
        newer.write_bytes(archive.read("model.weights.h5"))

    refused(legacy, "has weights only")
    refused(newer, "has weights only")


KERNEL = "model_weights/dense_1/dense_1/kernel:0"


def replaced_kernel(tmp_path, make):
    """A file whose last kernel is something else."""
    path = copied(tmp_path, "tensorflow_2_3.h5")
    with h5py.File(path, "r+") as file:
        shape = file[KERNEL].shape
        del file[KERNEL]
        make(file, shape)
    return path


def missing(file, shape):
    """Nothing takes the place of the kernel."""


def transposed(file, shape):
    file[KERNEL] = np.zeros(shape[::-1])


def objects(file, shape):
    text = np.full(shape, "x", dtype=object)
    file.create_dataset(KERNEL, data=text, dtype=h5py.string_dtype())


def linked(file, shape):
    file[KERNEL] = h5py.ExternalLink("/etc/passwd", "/kernel")


def external(file, shape):
    file.create_dataset(
        KERNEL, shape, "float32", external=[("/etc/passwd", 0, 24)]
    )


@pytest.mark.parametrize(
    "make, words",
    [
        (missing, "is missing"),
        (transposed, "has the wrong shape. Received: (2, 3)"),
        (objects, "holds no numbers"),
        (linked, "is missing"),
        (external, "lies outside of the file"),
    ],
)
def test_array_that_is_not_the_weight_is_refused(tmp_path, make, words):
    message = refused(
        replaced_kernel(tmp_path, make), words, on_loss_scale="keep"
    )

    assert "dense_1/kernel:0" in message


def test_archive_without_the_weights_of_a_layer_is_refused(tmp_path):
    path, inner = tmp_path / "model.keras", tmp_path / "weights.h5"
    with zipfile.ZipFile(FILES / "nested.keras") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    inner.write_bytes(parts["model.weights.h5"])
    with h5py.File(inner, "r+") as file:
        del file["layers/sequential"]
    parts["model.weights.h5"] = inner.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)

    refused(path, "one array for each weight. Received: 6 arrays")


def test_weights_that_have_no_place_are_refused(tmp_path):
    path = copied(tmp_path, "tensorflow_2_3.h5")

    def change(layers):
        layers[-1]["config"]["use_bias"] = False

    message = refused(
        with_config(path, change), "another number", on_loss_scale="keep"
    )

    assert "'dense_1'" in message
