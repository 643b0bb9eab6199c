"""Which versions of Keras were tested, and what is said of any other."""

from __future__ import annotations

import re
import warnings

import keras

OLDEST, NEWEST = (3, 12), (3, 16)
"""The first and the last minor version of Keras that the tests run on."""

HUB = "0.32 or 0.33"
"""The minor versions of KerasHub that the tests run on."""

WARNED_OF: set[str] = set()
"""Warnings that were given, each of which comes once in a process."""


def tested() -> str:
    """The versions that were tested, as users write them."""
    return f"Keras {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def pin() -> str:
    """Name what pip has to install to get one of them."""
    (major, minor), (last_major, last) = OLDEST, NEWEST
    return f"keras>={major}.{minor},<{last_major}.{last + 1}"


def to_install(error: ImportError) -> str:
    """Name the package to install where KerasHub is not imported.

    Args:
        error: Why it cannot.

    Returns:
        The package that is missing: KerasHub, or one that it needs.
    """
    missing = isinstance(error, ModuleNotFoundError) and error.name
    package = (missing or "keras_hub").partition(".")[0]
    return f"keras-hub {HUB}" if package == "keras_hub" else package


def warn_of_a_newer_keras() -> None:
    """Warn where the Keras in use is of a later minor version."""
    found = re.match(r"(\d+)\.(\d+)", keras.__version__)
    if found is None or (int(found[1]), int(found[2])) <= NEWEST:
        return
    _warn_once(
        f"Keras {keras.__version__} is newer than what this version of "
        f"keras_policy_ext was tested with: {tested()}. A feature for which "
        "it lacks something says so; others may work otherwise than here. "
        f"Run `pip install '{pin()}'`, or install a newer keras_policy_ext.",
        stacklevel=4,  # what imports the package
    )


def missing(what: str, feature: str, instead: str = "") -> ImportError:
    """The error of a feature for which this Keras lacks something private.

    Args:
        what: What is not there, as it is written in the source of Keras.
        feature: What needs it, a noun.
        instead: A sentence that says how to do without, if there is a way.
    """
    text = f"{_lacks(what)}, which {feature} needs. {_way_out()} {instead}"
    return ImportError(text.rstrip())


def warn_of_missing(what: str, consequence: str) -> None:
    """Warn once that this Keras lacks something, and of what follows.

    Args:
        what: As for `missing`.
        consequence: A sentence.
    """
    _warn_once(f"{_lacks(what)}. {consequence} {_way_out()}")


def _lacks(what: str) -> str:
    return f"Keras {keras.__version__} has no `{what}`"


def _way_out() -> str:
    return (
        f"Tested: {tested()}. Run `pip install '{pin()}'`, or install a newer "
        "keras_policy_ext."
    )


def _warn_once(text: str, stacklevel: int = 3) -> None:
    if text not in WARNED_OF:
        WARNED_OF.add(text)
        warnings.warn(text, stacklevel=stacklevel)
