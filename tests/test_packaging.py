"""What an installed distribution promises before any arithmetic."""

import ast
import importlib.metadata
import importlib.resources
import importlib.util
import inspect
import json
import os
import subprocess
import sys

import pytest

DISTRIBUTION = "keras-policy-ext"
FRAMEWORKS = ("jax", "tensorflow", "torch")

LOADED = f"""
import json, sys
print(json.dumps([m for m in ("keras", *{FRAMEWORKS!r}) if m in sys.modules]))
"""


def modules_loaded_by(code):
    """Names among keras and the frameworks that `code` has imported."""
    process = subprocess.run(
        [sys.executable, "-c", code + LOADED],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=300,
    )
    if process.returncode:
        pytest.fail(f"this failed:\n{code}\n{process.stderr}")
    return set(json.loads(process.stdout.splitlines()[-1]))


def test_py_typed_is_shipped():
    marker = importlib.resources.files("keras_policy_ext") / "py.typed"

    assert marker.is_file()


def test_version_equals_metadata():
    import keras_policy_ext

    version = importlib.metadata.version(DISTRIBUTION)

    assert keras_policy_ext.__version__ == version


def test_console_script_points_at_a_callable():
    scripts = importlib.metadata.distribution(DISTRIBUTION).entry_points
    (script,) = scripts.select(group="console_scripts", name=DISTRIBUTION)

    assert script.value == "keras_policy_ext_cli:main"
    assert callable(script.load())


@pytest.mark.any_backend
@pytest.mark.full
def test_module_can_be_run():
    process = subprocess.run(
        [sys.executable, "-m", "keras_policy_ext", "doctor", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("usage: keras-policy-ext doctor")


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_each_framework_is_an_extra(extra):
    metadata = importlib.metadata.metadata(DISTRIBUTION)

    assert extra in metadata.get_all("Provides-Extra")


def test_every_public_name_exists():
    import keras_policy_ext

    missing = [
        name
        for name in keras_policy_ext.__all__
        if not hasattr(keras_policy_ext, name)
    ]

    assert missing == []


@pytest.mark.full
def test_package_imports_no_framework_but_the_backend():
    """Keras itself imports jax where it is installed: that is not ours."""
    backend = os.environ["KERAS_BACKEND"]
    stock = modules_loaded_by("import keras")
    ours = modules_loaded_by(
        "import keras_policy_ext as kpe\n"
        "import keras\n"
        "for name in kpe.__all__:\n"
        "    getattr(kpe, name)"
    )

    assert backend in ours
    assert ours == stock


def test_python_311_is_supported():
    """When it is not: `user_code.stacklevel` is `skip_file_prefixes`."""
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    assert metadata["Requires-Python"] == ">=3.11"


def test_type_checkers_see_every_lazy_name():
    """Those that `__getattr__` hides are imported for type checkers."""
    import keras_policy_ext

    source = inspect.getsource(keras_policy_ext)
    seen = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert set(keras_policy_ext.__all__) <= seen
