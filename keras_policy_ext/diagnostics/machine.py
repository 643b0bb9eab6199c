"""Facts about the machine and what is installed on it."""

from __future__ import annotations

import importlib.metadata
import platform

import keras

import keras_policy_ext


def backend() -> str:
    """The backend of Keras."""
    return str(keras.backend.backend())


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def device() -> str:
    """Where the backend puts a tensor, in its own words."""
    return str(keras.ops.zeros(()).device)


def facts() -> dict[str, str]:
    """Versions, backend and device, by name."""
    frameworks = {
        name: version_of(name) or "not installed"
        for name in ("tensorflow", "jax", "torch")
    }
    return {
        "keras-policy-ext": keras_policy_ext.__version__,
        "backend": backend(),
        "device": device(),
        "keras": keras.__version__,
        **frameworks,
        "ml_dtypes": version_of("ml_dtypes") or "not installed",
        "numpy": version_of("numpy") or "not installed",
        "python": f"{platform.python_version()} on {platform.platform()}",
    }
