"""Files that are not loaded: what is wrong is said, and nothing is run."""

import contextlib
import json
import pickle
import re
import shutil
import zipfile

import h5py
import keras
import ml_dtypes
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

    path = FILES / f"bytecode.{ending}"
    refused(path, "Python bytecode")  # imports what is imported late
    monkeypatch.setattr(marshal, "loads", None)  # not even read

    message = refused(path, "Python bytecode")

    assert "Lambda 'double'" in message
    assert "safe_mode=False" in message


def test_bytecode_as_an_activation_is_refused_by_name(tmp_path):
    path = copied(tmp_path, "tensorflow_2_3.h5")

    def change(layers):
        layers[-1]["config"]["activation"] = {"value": ["4wE=", None, None]}

    message = refused(
        with_config(path, change), "Python bytecode", on_loss_scale="keep"
    )

    assert "Dense 'dense_1'" in message


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


def endless(layers):
    layers[1]["config"]["units"] = nested = []
    for _ in range(500):
        nested.append([])
        nested = nested[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers[1].update(config=None),
        lambda layers: layers[1]["config"].update(units={"q": 1}),
        lambda layers: layers[1]["config"].update(use_bias=[]),
        lambda layers: layers[1]["config"].update(units=2**70),
        lambda layers: layers[1].update(config=[]),
        lambda layers: layers.insert(0, 7),
        endless,
    ],
)
def test_config_of_nonsense_is_refused(tmp_path, change):
    path = with_config(copied(tmp_path, "tensorflow_2_3.h5"), change)

    with pytest.raises(ValueError) as error:
        migration.load_legacy_model(path, "keep")

    assert type(error.value) is ValueError


def test_error_of_a_custom_class_is_the_cause(tmp_path):
    class Picky(keras.layers.Dense):
        def build(self, input_shape):
            raise KeyError("what it lacks")

    path = copied(tmp_path, "tensorflow_2_3.h5")

    def change(layers):
        layers[-1]["class_name"] = "Picky"

    with_config(path, change)

    with pytest.raises(ValueError, match="what it lacks") as error:
        migration.load_legacy_model(
            path, "keep", custom_objects={"Picky": Picky}
        )
    assert isinstance(error.value.__cause__, KeyError)
    assert "custom_objects" in str(error.value)


def test_errors_of_the_caller_are_not_of_the_file(tmp_path):
    with pytest.raises(TypeError):
        migration.load_legacy_model(7)
    with pytest.raises(TypeError):
        migration.load_legacy_model(FILES / "nested.h5", custom_objects=7)


@pytest.mark.parametrize("name", ["nested.h5", "nested.keras"])
def test_flipped_bytes_are_loaded_or_refused(tmp_path, name):
    data = (FILES / name).read_bytes()
    generator = np.random.default_rng(1)
    path = tmp_path / name
    for _ in range(20):
        damaged = np.frombuffer(data, np.uint8).copy()
        damaged[generator.integers(len(data), size=30)] = 255
        path.write_bytes(damaged.tobytes())

        with contextlib.suppress(ValueError):
            load(path)


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
        (objects, "does not hold numbers"),
        (linked, "is missing"),
        (external, "lies outside of the file"),
    ],
)
def test_array_that_is_not_the_weight_is_refused(tmp_path, make, words):
    message = refused(
        replaced_kernel(tmp_path, make), words, on_loss_scale="keep"
    )

    assert "dense_1/kernel:0" in message


def with_weights(tmp_path, change):
    """An archive with other weights."""
    path, inner = tmp_path / "model.keras", tmp_path / "weights.h5"
    with zipfile.ZipFile(FILES / "nested.keras") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    inner.write_bytes(parts["model.weights.h5"])
    with h5py.File(inner, "r+") as file:
        change(file)
    parts["model.weights.h5"] = inner.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return path


def test_archive_without_the_weights_of_a_layer_is_refused(tmp_path):
    def change(file):
        del file["layers/sequential"]

    path = with_weights(tmp_path, change)

    refused(path, "one array for each weight. Received: 6 arrays")


def test_array_that_was_never_written_is_not_read(tmp_path):
    def change(file):
        (name, *_) = [name for name in arrays_in(file) if "/vars/0" in name]
        del file[name]
        file.create_dataset(name, (2**20, 2**20), "float32")  # 4 TiB

    refused(with_weights(tmp_path, change), "was never written")


def arrays_in(file):
    names = []
    file.visit(names.append)
    return [name for name in names if isinstance(file[name], h5py.Dataset)]


def test_bfloat16_weights_are_read(tmp_path):
    path = copied(tmp_path, "tensorflow_2_3.h5")
    with h5py.File(path, "r+") as file:
        shape = file[KERNEL].shape
        values = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
        bits = values.astype(ml_dtypes.bfloat16).view("V2")
        del file[KERNEL]
        file[KERNEL] = bits

    model = load(path)

    np.testing.assert_array_equal(model.layers[-1].get_weights()[0], values)


def test_weights_that_have_no_place_are_refused(tmp_path):
    path = copied(tmp_path, "tensorflow_2_3.h5")

    def change(layers):
        layers[-1]["config"]["use_bias"] = False

    message = refused(
        with_config(path, change), "another number", on_loss_scale="keep"
    )

    assert "'dense_1'" in message
