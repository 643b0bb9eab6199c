"""The command line: what it prints, and how it refuses."""

import os
import runpy
import subprocess
import sys

import pytest

import keras_policy_ext_cli
from command_lines import error_of
from keras_policy_ext import __version__, recipes
from keras_policy_ext.ext.cli import commands as cli
from keras_policy_ext.ext.demo import runs as demo_runs

pytestmark = pytest.mark.usefixtures("environment_is_restored")

BACKEND = os.environ["KERAS_BACKEND"]


def in_a_process(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "keras_policy_ext_cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])

    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "demo" in printed
    assert "doctor" in printed


@pytest.mark.parametrize(
    "command",
    [
        "bench",
        "demo",
        "doctor",
        "export",
        "inspect",
        "memory",
        "migrate",
        "replay",
        "report",
        "shrink",
    ],
)
def test_every_command_has_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])

    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--backend {jax,tensorflow,torch}" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"keras-policy-ext {__version__}\n"


@pytest.mark.full
def test_doctor_tells_backend_and_a_reason_for_every_contraction(capsys):
    assert cli.main(["doctor"]) == 0

    printed = capsys.readouterr().out
    assert BACKEND in printed
    assert "matmul" in printed
    assert "native" in printed or "emulated" in printed
    assert 'gains from which size on: `filter="auto"`' in printed


def test_doctor_tells_of_a_device_that_is_elsewhere(capsys):
    assert cli.main(["doctor", "--device", "a100"]) == 0

    printed = capsys.readouterr().out
    assert "an NVIDIA A100" in printed
    assert "emulated" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a command is missing. `keras-policy-ext --help`"),
        (["train"], "invalid choice: 'train'"),
        (["bench", "--size", "0"], "an integer of 1 or more"),
        (["bench", "--recipe", "magic"], "'magic' is not a recipe. Allowed"),
        (["demo", "--backend", "numpy"], "invalid choice: 'numpy'"),
        (["doctor", "--device", "h300"], "Did you mean h800 or h200 or h100?"),
        (["demo", "--steps", "0"], "an integer of 1 or more"),
        (["demo", "--steps", "ten"], "an integer of 1 or more"),
        (["demo", "--seed", "-1"], "an integer of 0 or more"),
        (["demo", "--seed", ""], "an integer of 0 or more"),
        (["demo", "--recipe", "magic"], "'magic' is not a recipe. Allowed"),
        (["demo", "--recipe", "frozen"], "not a recipe to train with. Allowed"),
        (["demo", "--recipe", "nvfp4(size=1)"], "Unknown parameter of recipe"),
        (["demo", "--recipe", "block", "--compare"], "not allowed with"),
    ],
)
def test_wrong_arguments_get_one_line(arguments, words, capsys):
    assert words in error_of(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "seed", "specs"),
    [
        ([], 0, ("current",)),
        (["--seed", "3"], 3, ("current",)),
        (["--recipe", "16"], 0, ("16",)),
        (["--compare"], 0, None),
    ],
)
def test_demo_gets_a_seed_and_recipes(
    arguments, seed, specs, monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(
        cli.demo,
        "prepare",
        lambda settings: lambda: asked.append(settings),
    )

    cli.main(["demo", "--out", str(tmp_path), *arguments])

    (settings,) = asked
    assert settings.out == str(tmp_path)
    assert settings.seed == seed
    assert settings.recipes == (specs or recipes.names())


def test_missing_text_file_gets_one_line(capsys, tmp_path):
    line = error_of(capsys, "demo", "--text", str(tmp_path / "none.txt"))

    assert "none.txt" in line
    assert "No such file" in line


def test_binary_file_gets_one_line(capsys, tmp_path):
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00" * 1000)

    line = error_of(capsys, "demo", "--text", str(file))

    assert str(file) in line and "UTF-8" in line


def test_short_text_gets_one_line_and_leaves_no_folder(capsys, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("short")
    folder = tmp_path / "out"

    line = error_of(capsys, "demo", "--text", str(file), "--out", str(folder))

    assert "too short" in line and "5 characters" in line
    assert not folder.exists()


def test_folder_that_cannot_be_made_gets_one_line(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")

    line = error_of(capsys, "demo", "--out", str(file / "folder"))

    assert "Cannot make the folder" in line


def test_missing_matplotlib_is_told_before_training(capsys, monkeypatch):
    monkeypatch.setattr(
        demo_runs.importlib.util, "find_spec", lambda name: None
    )

    line = error_of(capsys, "demo")

    assert "pip install keras-policy-ext[demo]" in line


def refused(capsys, monkeypatch, installed, *arguments):
    """The line on stderr where only these frameworks are installed."""
    monkeypatch.setattr(
        keras_policy_ext_cli.importlib.util,
        "find_spec",
        lambda name: name if name in installed else None,
    )
    assert keras_policy_ext_cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_backend_that_is_not_installed_is_told(capsys, monkeypatch):
    line = refused(capsys, monkeypatch, [], "doctor", "--backend", "torch")

    assert "'torch' is not installed" in line
    assert "pip install 'keras-policy-ext[torch]'" in line


def test_unknown_backend_is_told(capsys, monkeypatch):
    line = refused(capsys, monkeypatch, ["jax"], "demo", "--backend=numpy")

    assert "unknown backend 'numpy' in --backend" in line


def test_no_framework_at_all_is_told(capsys, monkeypatch):
    del os.environ["KERAS_BACKEND"]
    line = refused(capsys, monkeypatch, [], "doctor")

    assert "no framework is installed" in line


def test_another_backend_in_one_process_is_refused(capsys):
    other = "torch" if BACKEND == "jax" else "jax"

    line = error_of(capsys, "doctor", "--backend", other)

    assert "start another one" in line


def test_first_installed_backend_is_taken_without_the_variable(monkeypatch):
    monkeypatch.setattr(
        keras_policy_ext_cli.importlib.util,
        "find_spec",
        lambda name: name == BACKEND or None,
    )
    del os.environ["KERAS_BACKEND"]

    assert keras_policy_ext_cli.choose_backend(None) == BACKEND


@pytest.mark.full
def test_the_command_needs_no_variable():
    """Keras alone would take TensorFlow, installed or not."""
    environment = dict(os.environ)
    del environment["KERAS_BACKEND"]
    process = subprocess.run(
        [sys.executable, "-m", "keras_policy_ext_cli", "--version"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert process.stdout == f"keras-policy-ext {__version__}\n"


@pytest.mark.full
def test_a_package_without_a_backend_says_what_to_set():
    process = subprocess.run(
        [sys.executable, "-c", "import keras_policy_ext"],
        capture_output=True,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "abacus"},
        timeout=300,
    )
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert "abacus" in last
    installed = ", ".join(keras_policy_ext_cli.installed_backends())
    assert f"Installed frameworks: {installed}. Set KERAS_BACKEND" in last


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (["jax"], "jax. Set KERAS_BACKEND to one of them"),
        (["jax", "torch"], "jax, torch. Set KERAS_BACKEND to one of them"),
        (["torch"], "`export KERAS_BACKEND=torch`"),
        ([], "none. Install one of them: pip install"),
    ],
)
@pytest.mark.any_backend
def test_where_keras_has_no_backend_it_is_told_what_is_installed(
    installed, words, monkeypatch
):
    monkeypatch.setattr(
        keras_policy_ext_cli.importlib.util,
        "find_spec",
        lambda name: name if name in installed else None,
    )
    cause = ModuleNotFoundError("No module named 'tensorflow'")
    told = keras_policy_ext_cli.without_backend(cause)
    assert told.startswith(f"Keras cannot be imported: {cause}.")
    assert f"Installed frameworks: {words}" in told or words in told


@pytest.mark.any_backend
@pytest.mark.parametrize("width", [40, 80, 133])
def test_in_a_terminal_long_errors_break_at_blanks(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    line = error_of(capsys, "doctor", "--device", "h300")
    assert len(line) > width
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--device", "h300"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= width
    assert " ".join(each.strip() for each in lines) == line


def test_unknown_backend_in_the_environment_is_told_without_traceback():
    process = in_a_process("doctor", KERAS_BACKEND="abacus")

    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.count("\n") == 1
    assert "unknown backend 'abacus' in KERAS_BACKEND" in process.stderr


@pytest.mark.full
def test_argument_wins_over_the_environment():
    process = in_a_process(
        "doctor", "--backend", BACKEND, KERAS_BACKEND="abacus"
    )

    assert process.returncode == 0, process.stderr
    assert BACKEND in process.stdout


@pytest.mark.full
def test_inspect_prints_one_screen_and_in_full_every_layer(
    tmp_path, capsys, monkeypatch
):
    import keras

    import keras_policy_ext as kpe

    layers = [keras.layers.Dense(4, name=f"dense_{n}") for n in range(30)]
    layers.append(keras.layers.LayerNormalization(name="norm"))
    model = keras.Sequential([keras.Input((4,)), *layers], name="model")
    kpe.convert(model, "delayed")
    model.save(tmp_path / "model.keras")
    monkeypatch.setenv("COLUMNS", "100")

    assert cli.main(["inspect", str(tmp_path / "model.keras")]) == 0
    short = capsys.readouterr().out
    assert cli.main(["inspect", "--full", str(tmp_path / "model.keras")]) == 0
    full = capsys.readouterr().out

    assert short.startswith("100 % of the multiplications and")
    assert len(short.splitlines()) <= 24
    assert short.endswith("Every layer: --full\n")
    assert "dense_29" not in short
    for name in (*(f"dense_{n}" for n in range(30)), "norm"):
        assert any(word.endswith(name) for word in full.split())
    assert "outputs_grad" in full


@pytest.fixture
def as_a_module(monkeypatch):
    """Run `python -m keras_policy_ext`, where Keras is imported already."""
    started = []

    def call(command):
        started.append(command)
        return 7

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["keras_policy_ext", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("keras_policy_ext", run_name="__main__")
        return ended.value.code, started

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(keras_policy_ext_cli.subprocess, "call", call)
    everything = keras_policy_ext_cli.BACKENDS
    monkeypatch.setattr(
        keras_policy_ext_cli, "installed_backends", lambda: everything
    )
    return run


def test_a_module_runs_in_the_process_that_has_imported_keras(
    as_a_module, capsys
):
    assert as_a_module("--version") == (0, [])
    assert __version__ in capsys.readouterr().out


def test_a_module_runs_another_backend_in_a_process_of_its_own(as_a_module):
    other = next(x for x in keras_policy_ext_cli.BACKENDS if x != BACKEND)
    arguments = "doctor", "--backend", other
    code, ((_, *command),) = as_a_module(*arguments)
    assert code == 7
    assert command == ["-m", "keras_policy_ext_cli", *arguments]
