"""`keras-policy-ext migrate`."""

import json
import os

import h5py
import keras
import numpy as np
import pytest

from keras_policy_ext.ext.cli import commands as cli
from legacy_files import FILES, is_loss_scaler, loaded, predictions


@pytest.fixture(autouse=True)
def environment_is_restored(monkeypatch):
    """The command writes into the environment; the next test must not see."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


def error_of(capsys, *arguments):
    """The one line on stderr of a command that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["migrate", *map(str, arguments)])
    output = capsys.readouterr()
    (line,) = output.err.splitlines()

    assert ended.value.code == 2
    assert output.out == ""
    return line


@pytest.mark.full
def test_writes_a_file_that_keras_reads(capsys, tmp_path):
    name = "functional_float16.h5"
    out = tmp_path / "new.keras"

    assert cli.main(["migrate", str(FILES / name), str(out)]) == 0

    printed = capsys.readouterr().out
    assert "new.keras" in printed
    assert "compiled with Adam, 3 iterations" in printed
    assert "note: A loss scale was dropped" in printed
    assert os.listdir(tmp_path) == ["new.keras"]
    model = keras.saving.load_model(out)
    assert type(model.optimizer).__mro__[-1] is object
    assert int(model.optimizer.iterations) == 3
    for key, value in predictions(loaded(name), name).items():
        np.testing.assert_array_equal(predictions(model, name)[key], value)


def test_file_of_any_backend_names_a_public_optimizer(capsys, tmp_path):
    import zipfile

    out = tmp_path / "new.keras"
    cli.main(["migrate", str(FILES / "sequential_bfloat16.keras"), str(out)])

    with zipfile.ZipFile(out) as archive:
        config = json.loads(archive.read("config.json"))
    optimizer = config["compile_config"]["optimizer"]
    assert optimizer["module"] == "keras.optimizers"
    assert optimizer["class_name"] == "RMSprop"


def test_loss_scale_is_kept_on_request(capsys, tmp_path):
    out = tmp_path / "new.keras"
    path = str(FILES / "tensorflow_2_3.h5")

    cli.main(["migrate", path, str(out), "--on-loss-scale", "keep"])

    assert "LossScaleOptimizer of SGD" in capsys.readouterr().out
    optimizer = keras.saving.load_model(out).optimizer
    assert is_loss_scaler(optimizer)
    assert optimizer.initial_scale == 64


def test_existing_file_is_overwritten_with_force_only(capsys, tmp_path):
    path, out = FILES / "nested.keras", tmp_path / "new.keras"
    out.write_text("precious")

    assert "exists" in error_of(capsys, path, out)
    assert out.read_text() == "precious"

    assert cli.main(["migrate", str(path), str(out), "--force"]) == 0
    assert keras.saving.load_model(out).name == loaded("nested.keras").name


def test_input_is_never_the_output(capsys, tmp_path):
    path = tmp_path / "old.keras"
    path.write_bytes((FILES / "nested.keras").read_bytes())

    assert "is the input" in error_of(capsys, path, path, "--force")


def test_damaged_file_gets_one_line(capsys, tmp_path):
    path, out = tmp_path / "old.h5", tmp_path / "new.keras"
    path.write_bytes((FILES / "nested.h5").read_bytes())
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        config["config"]["layers"][-1]["config"] = None
        file.attrs["model_config"] = json.dumps(config)

    assert "old.h5" in error_of(capsys, path, out)
    assert not out.exists()


def test_refusals_get_one_line_and_leave_no_file(capsys, tmp_path):
    out = tmp_path / "new.keras"

    for arguments, words in [
        ((FILES / "bytecode.h5", out), "Lambda 'double'"),
        ((tmp_path / "none.h5", out), "No such file"),
        ((FILES / "nested.h5", tmp_path / "new.h5"), "must be a .keras file"),
        ((FILES / "nested.h5", tmp_path / "no" / "x.keras"), "no folder"),
        (
            (FILES / "tensorflow_2_3.h5", out, "--on-loss-scale", "error"),
            "This model has a loss scale",
        ),
    ]:
        assert words in error_of(capsys, *arguments)
    assert os.listdir(tmp_path) == []


def test_help_tells_the_options(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["migrate", "--help"])

    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for words in ("IN", "OUT", "--force", "{drop,keep,error}"):
        assert words in printed
