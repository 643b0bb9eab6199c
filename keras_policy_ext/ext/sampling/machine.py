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

from keras_policy_ext import backends
from keras_policy_ext._version import __version__


def backend() -> str:
    """Return the name of the backend that Keras uses, such as `"jax"`."""
    return str(keras.backend.backend())


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed(package: str) -> str:
    """Return the version of an importable package, or "not installed".

    TensorFlow, for example, is in `tensorflow`, `tensorflow-cpu`, `tf-nightly`
    and others. The package is not imported.

    Args:
        package: The name that is imported.

    Returns:
        The version, with the name of the distribution if that differs.
    """
    if importlib.util.find_spec(package) is None:
        return "not installed"
    name = _distribution_of(package)
    if name is None:
        return "installed, of unknown version"
    version = str(version_of(name))
    return version if _same_name(name, package) else f"{version} ({name})"


def _distribution_of(package: str) -> str | None:
    """Return the distribution that contains a package, or None if unknown."""
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
    """Return True if two package names differ in case and separators only."""
    first, second = (
        re.sub("[-_.]+", "-", name).lower() for name in (distribution, package)
    )
    return first == second


def device() -> str:
    """Return the name of the device on which the backend puts tensors."""
    return str(keras.ops.zeros(()).device)


def facts() -> dict[str, str]:
    """Return a dict of installed versions, the backend and the device."""
    frameworks = {
        name: installed(name) for name in ("tensorflow", "jax", "torch")
    }
    return {
        "keras-policy-ext": __version__,
        "backend": backend(),
        "device": device(),
        "keras": keras.__version__,
        **frameworks,
        "ml_dtypes": installed("ml_dtypes"),
        "numpy": installed("numpy"),
        "python": f"{platform.python_version()} on {platform.platform()}",
    }


SLOW = 4.0
"""A matmul is slow if it takes this many times as long as in float32."""

SIZE = 256
ROUNDS = 3


def slowdown() -> float:
    """Return the time of a bfloat16 matmul divided by that of a float32 one.

    It is 1 on all devices but CPUs, where nothing is measured.
    """
    # CPUs without bfloat16 instructions take up to 50 times as long on PyTorch.
    if backends.engine.device().maker != "cpu":
        return 1.0
    return _seconds("bfloat16") / _seconds("float32")


def _seconds(dtype: str) -> float:
    """Return the seconds of the fastest of `ROUNDS` matmuls in this dtype."""
    matrix = ops.ones((SIZE, SIZE), dtype)
    return min([timed(matrix) for _ in range(ROUNDS + 1)][1:])


def timed(matrix: Any) -> float:
    """Return the seconds that `matmul(matrix, matrix)` takes."""
    began = time.perf_counter()
    product = ops.matmul(matrix, matrix)
    # When one number of it is on the host, the product was computed.
    ops.convert_to_numpy(ops.cast(product[0, 0], "float32"))
    return time.perf_counter() - began
