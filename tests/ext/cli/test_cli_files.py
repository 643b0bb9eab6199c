"""The commands that read and write files of models."""

import os
import pathlib

import keras
import pytest

from command_lines import error_of
from keras_policy_ext.ext.cli import commands as cli
from keras_policy_ext.ext.export import plain
from keras_policy_ext.stored_kernels import StoredKernel

pytestmark = pytest.mark.usefixtures("environment_is_restored")


@pytest.mark.full
def test_memory_compares_a_saved_model_with_policies(tmp_path, capsys):
    projection = keras.layers.Dense(4, name="projection")
    model = keras.Sequential([keras.Input((None, 8)), projection])
    path = str(tmp_path / "model.keras")
    model.save(path)
    asked = ["--policy", "current", "--policy", "mixed_bfloat16"]

    assert cli.main(["memory", path, "--batch", "2,3,8", *asked]) == 0
    short = capsys.readouterr().out
    assert cli.main(["memory", path, "--batch", "2,3,8", "--full"]) == 0
    full = capsys.readouterr().out

    assert all(word in short for word in ("current", "mixed_bfloat16"))
    assert short.endswith("Every layer: --full\n")
    assert "converted" in full and "projection  Dense" in full


@pytest.mark.parametrize(
    "options, said",
    [
        (["--batch", "2"], "size"),
        (["--batch", "two"], "'two'"),
        (["--batch", "2,3,8", "--policy", "float99"], "float99"),
    ],
)
def test_memory_says_in_one_line_what_is_wrong(tmp_path, capsys, options, said):
    projection = keras.layers.Dense(4, name="projection")
    model = keras.Sequential([keras.Input((None, 8)), projection])
    path = str(tmp_path / "model.keras")
    model.save(path)

    assert said in error_of(capsys, "memory", path, *options)


def test_export_writes_what_the_options_say(tmp_path, capsys):
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(4)],
        name="m",
    )
    file, out = str(tmp_path / "model.keras"), str(tmp_path / "out")
    model.save(file)
    options = ["--format", "safetensors", "--granularity", "tensor"]
    assert cli.main(["export", file, out, *options, "--exclude", "_1"]) == 0
    assert "per tensor" in capsys.readouterr().out
    (name,) = (
        name
        for name, weight in plain.read(out).items()
        if isinstance(weight, StoredKernel)
    )
    assert plain.read(out)[name].codes.shape == (8, 4)

    assert "overwrite" in error_of(capsys, "export", file, out, *options)
    assert cli.main(["export", file, out, *options, "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "KerasHub"),
        (["--format", "gguf"], "gguf"),
        (["--format", "safetensors", "--activations", "static"], "freeze"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    arguments, words, tmp_path, capsys
):
    file = tmp_path / "model.keras"
    keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]).save(file)
    out = str(tmp_path / "out")
    assert words in error_of(capsys, "export", str(file), out, *arguments)
    assert not (tmp_path / "out").exists()


def test_a_file_to_export_that_is_missing(tmp_path, capsys):
    arguments = ["export", str(tmp_path / "model.keras"), str(tmp_path / "out")]
    assert "There is no such file" in error_of(capsys, *arguments)


def file_to_shrink(folder, policy=None):
    import keras
    import numpy as np

    import keras_policy_ext as kpe

    layers = [keras.layers.Dense(300, name="wide"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((300,)), *layers])
    model.compile("adam", "mse")
    if policy:
        kpe.convert(model, policy)
        kpe.calibrate(model, np.ones((2, 300), "float32"))
    model.save(folder / "in.keras")
    return str(folder / "in.keras"), str(folder / "out.keras")


def test_shrink_loads_freezes_and_saves(tmp_path, capsys):
    import keras_policy_ext as kpe

    source, output = file_to_shrink(tmp_path)
    options = "--granularity=tensor", "--activations=dynamic"

    assert cli.main(["shrink", source, output, *options]) == 0
    said = capsys.readouterr().out
    assert cli.main(["inspect", "--full", output]) == 0
    inspected = capsys.readouterr().out

    assert "Kernels: 365 kB before, 91.2 kB now" in said
    assert f"-> {output}" in said
    assert said.startswith("2 kernels of 2 layers stored in one byte")
    # Nothing that only a program can use, and nothing of a training step.
    for word in ("report.", "kpe", "keras_policy_ext", "multiplications"):
        assert word not in said
    for word in ("2 layers are frozen", "90 kB, tensor", "inputs, dynamic"):
        assert word in inspected
    model = kpe.load_model(output)
    assert [x.is_frozen for x in model.layers] == [True, True]
    assert not model.compiled
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"in.keras", "out.keras"}
    sizes = [os.path.getsize(path) for path in (source, output)]
    assert sizes[1] < 0.4 * sizes[0]


@pytest.mark.full
def test_shrink_takes_static_scales_from_the_file(tmp_path, capsys):
    import keras_policy_ext as kpe

    arguments = file_to_shrink(tmp_path, "float8/4_from_float32")
    options = "--activations=static", "--weights=float8_e5m2"

    assert cli.main(["shrink", *arguments, *options]) == 0

    recipe = kpe.load_model(arguments[1]).layers[0].float8_policy.recipe
    assert (recipe.activations, recipe.weights) == ("static", "float8_e5m2")


def test_shrink_says_what_it_cannot_do_and_writes_nothing(tmp_path, capsys):
    source, output = file_to_shrink(tmp_path)
    held = pathlib.Path(output)

    static = error_of(capsys, "shrink", source, output, "--activations=static")
    assert "seen no amax" in static and not held.exists()
    assert "`--activations dynamic`" in static and "kpe" not in static
    assert "keras_policy_ext" not in static
    line = error_of(capsys, "shrink", str(tmp_path / "no.keras"), output)
    assert "no.keras" in line
    line = error_of(capsys, "shrink", source, str(tmp_path / "out.h5"))
    assert "must be a .keras file" in line
    line = error_of(capsys, "shrink", source, str(tmp_path / "x/out.keras"))
    assert "no folder" in line
    assert "never overwritten" in error_of(capsys, "shrink", source, source)
    held.write_text("kept")
    assert "--force" in error_of(capsys, "shrink", source, output)
    assert held.read_text() == "kept"
    assert cli.main(["shrink", source, output, "--overwrite"]) == 0
    capsys.readouterr()
    again = str(tmp_path / "again.keras")
    assert "is already frozen" in error_of(capsys, "shrink", output, again)


def test_shrink_that_fails_leaves_the_earlier_file(
    tmp_path, capsys, monkeypatch
):
    import keras

    source, output = file_to_shrink(tmp_path)
    pathlib.Path(output).write_text("kept")

    def full(self, path, *args, **kwargs):
        pathlib.Path(path).write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(keras.Model, "save", full)
    with pytest.raises(OSError, match="No space"):
        cli.main(["shrink", source, output, "--force"])

    assert pathlib.Path(output).read_text() == "kept"
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"in.keras", "out.keras"}
