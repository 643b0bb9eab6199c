"""Facts about the machine: what is installed, and how fast bfloat16 is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import time
from typing import Any

import keras
from keras import ops

import keras_policy_ext
from keras_policy_ext import backends


def backend() -> str:
    """The backend of Keras."""
    return str(keras.backend.backend())


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(package: str) -> str:
    """What is installed of a package, by whatever distribution.

    TensorFlow comes as `tensorflow`, `tensorflow-cpu`, `tf-nightly` and
    others. Nothing is imported for that.

    Args:
        package: The name that is imported.

    Returns:
        The version, with the name of the distribution where that is another.
    """
    if importlib.util.find_spec(package) is None:
        return "not installed"
    name = _distribution_of(package)
    if name is None:
        return "installed, of unknown version"
    version = str(version_of(name))
    return version if _same_name(name, package) else f"{version} ({name})"


def _distribution_of(package: str) -> str | None:
    """The distribution that has a package, None if none says so."""
    names = importlib.metadata.packages_distributions().get(package, [])
    # Others may put something beside or into it.
    for name in names:
        if _same_name(name, package):
            return name
    for name in names:
        files = importlib.metadata.files(name) or ()
        if any(file.as_posix() == f"{package}/__init__.py" for file in files):
            return name
    return None


def _same_name(distribution: str, package: str) -> bool:
    """Return True if an index takes the two names for one."""
    first, second = (
        re.sub("[-_.]+", "-", name).lower() for name in (distribution, package)
    )
    return first == second


def device() -> str:
    """Where the backend puts a tensor, in its own words."""
    return str(keras.ops.zeros(()).device)


def facts() -> dict[str, str]:
    """Versions, backend and device, by name."""
    frameworks = {
        name: installed(name) for name in ("tensorflow", "jax", "torch")
    }
    return {
        "keras-policy-ext": keras_policy_ext.__version__,
        "backend": backend(),
        "device": device(),
        "keras": keras.__version__,
        **frameworks,
        "ml_dtypes": installed("ml_dtypes"),
        "numpy": installed("numpy"),
        "python": f"{platform.python_version()} on {platform.platform()}",
    }


SLOW = 4.0
"""A matmul that takes so many times as long as in float32 is called slow."""

SIZE = 256
ROUNDS = 3


def slowdown() -> float:
    """How many times as long as in float32 a matmul takes in bfloat16.

    CPUs without instructions for bfloat16 take up to 50 times as long on
    PyTorch. On other devices nothing is measured, and it is 1.
    """
    if backends.engine().device().maker != "cpu":
        return 1.0
    return _seconds("bfloat16") / _seconds("float32")


def _seconds(dtype: str) -> float:
    """The time of the fastest of some matmuls, after one to warm up."""
    matrix = ops.ones((SIZE, SIZE), dtype)
    return min([timed(matrix) for _ in range(ROUNDS + 1)][1:])


def timed(matrix: Any) -> float:
    """Return the seconds that the product of a matrix with itself takes."""
    began = time.perf_counter()
    product = ops.matmul(matrix, matrix)
    # When one number of it is on the host, the product was computed.
    ops.convert_to_numpy(ops.cast(product[0, 0], "float32"))
    return time.perf_counter() - began
