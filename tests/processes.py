"""Python processes, one for each backend that is installed."""

import importlib.util
import os
import subprocess
import sys

BACKENDS = ("jax", "torch", "tensorflow")


def is_installed(backend):
    """Whether the framework of a backend can be imported here."""
    return importlib.util.find_spec(backend) is not None


def run(backend, code, *arguments):
    """Run Python code under a backend; what it printed.

    Raises:
        RuntimeError: If it ended with an error; the message is its output.
    """
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    if process.returncode:
        raise RuntimeError(f"{backend}: {process.stderr}")
    return process.stdout
