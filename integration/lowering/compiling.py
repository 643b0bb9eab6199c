"""Runs the scripts of this folder, each in a process of its own."""

import importlib.util
import pathlib

import pytest

from processes import run

FOLDER = pathlib.Path(__file__).parent
NEEDED = ("jax", "tensorflow", "jax_plugins.xla_cuda12")
START = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
sys.argv = sys.argv[1:]
runpy.run_path({str(FOLDER)!r} + "/" + sys.argv[0], run_name="__main__")
"""


def skip_without_compiler():
    """Skip a test module where XLA for CUDA is not installed."""
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed: run `tox run -e lowering`",
            allow_module_level=True,
        )


def printed_by(backend, script, *arguments):
    """What a script of this folder prints under a backend of Keras."""
    return run(backend, START, script, *arguments)
