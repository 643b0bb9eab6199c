"""The tested versions of Keras, and messages about other versions."""

from __future__ import annotations

import re
import warnings

import keras

OLDEST, NEWEST = (3, 12), (3, 16)
"""The first and the last minor version of Keras that the tests run on."""

HUB = "0.32 or 0.33"
"""The minor versions of KerasHub that the tests run on."""

WARNED_OF: set[str] = set()
"""The warnings given so far; each is given once per process."""


def tested() -> str:
    """Return the tested Keras versions as text: "Keras 3.x to 3.y"."""
    return f"Keras {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def pin() -> str:
    """Return a pip requirement for the tested versions of Keras."""
    (major, minor), (last_major, last) = OLDEST, NEWEST
    return f"keras>={major}.{minor},<{last_major}.{last + 1}"


def to_install(error: ImportError) -> str:
    """Return the package to install after a failed import of KerasHub."""
    missing = isinstance(error, ModuleNotFoundError) and error.name
    package = (missing or "keras_hub").partition(".")[0]
    return f"keras-hub {HUB}" if package == "keras_hub" else package


def number() -> tuple[int, int] | None:
    """Return (major, minor) of the Keras in use, or None if unknown."""
    match = re.match(r"(\d+)\.(\d+)", keras.__version__)
    return None if match is None else (int(match[1]), int(match[2]))


def warn_of_a_newer_keras() -> None:
    """Warn if the Keras in use is newer than the tested versions."""
    version = number()
    if version is None or version <= NEWEST:
        return
    _warn_once(
        f"Keras {keras.__version__} is newer than what this version of "
        f"keras_policy_ext was tested with: {tested()}. A feature for which "
        "it lacks something says so; others may work otherwise than here. "
        f"Run `pip install '{pin()}'`, or install a newer keras_policy_ext.",
        stacklevel=4,  # what imports the package
    )


def missing(what: str, feature: str, instead: str = "") -> ImportError:
    """Return an ImportError: this Keras lacks a name that a feature needs.

    `what` is the name in the source of Keras, `feature` a noun, and `instead`
    a sentence on an alternative, if there is one.
    """
    text = f"{_lacks(what)}, which {feature} needs. {_way_out()} {instead}"
    return ImportError(text.rstrip())


def warn_of_missing(what: str, consequence: str) -> None:
    """Warn once that a private name is missing, with the consequence."""
    _warn_once(f"{_lacks(what)}. {consequence} {_way_out()}")


def _lacks(what: str) -> str:
    """Return the sentence that this Keras lacks a private name."""
    return f"Keras {keras.__version__} has no `{what}`"


def _way_out() -> str:
    """Return the sentences on which versions of Keras to install."""
    return (
        f"Tested: {tested()}. Run `pip install '{pin()}'`, or install a newer "
        "keras_policy_ext."
    )


def _warn_once(text: str, stacklevel: int = 3) -> None:
    """Warn with a text, but not a second time in this process."""
    if text not in WARNED_OF:
        WARNED_OF.add(text)
        warnings.warn(text, stacklevel=stacklevel)
