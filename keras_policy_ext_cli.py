"""The command `keras-policy-ext`: it chooses the backend, then loads Keras.

Keras takes its backend from the environment when it is first imported, and to
import anything of `keras_policy_ext` imports Keras. So this module stands
beside the package. The environment is read and written here and nowhere else.
By `python -m keras_policy_ext` Keras is imported before: a command for another
backend then runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence

BACKENDS = ("jax", "torch", "tensorflow")
"""In the order in which an installed one is taken."""


def main(argv: Sequence[str] | None = None) -> int:
    """Choose the backend and run the command line.

    Args:
        argv: The arguments; None for those of the process.

    Returns:
        The exit status: 2, with one line on stderr, if there is no such
        backend; else that of `keras_policy_ext.ext.cli.commands.main`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        backend = choose_backend(_asked(argv))
    except ValueError as error:
        print(wrapped(f"keras-policy-ext: error: {error}"), file=sys.stderr)
        return 2
    imported = sys.modules.get("keras")
    if imported is not None and imported.backend.backend() != backend:
        try:
            command = [sys.executable, "-m", "keras_policy_ext_cli", *argv]
            return subprocess.call(command)
        except KeyboardInterrupt:  # The other process says so.
            return 130
    os.environ["KERAS_BACKEND"] = backend
    # TensorFlow, which Keras imports wherever it is installed, logs what is
    # no concern of the user, from C++; its errors are Python exceptions.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if backend == "torch" and "OMP_NUM_THREADS" not in os.environ:
        # OpenMP's threads wait by spinning: where they outnumber the free
        # cores, a step of a model this small takes ten times as long.
        os.environ["OMP_NUM_THREADS"] = "1"
        if "torch" in sys.modules:  # It has read the environment.
            sys.modules["torch"].set_num_threads(1)
    try:
        import keras_policy_ext.ext.cli.commands as cli
    except ModuleNotFoundError as error:
        # Folders without files may have been left there.
        if error.name not in (
            "keras_policy_ext.ext",
            "keras_policy_ext.ext.cli",
            "keras_policy_ext.ext.cli.commands",
        ):
            raise
        text = (
            "keras-policy-ext: error: the command is an extension. Received: "
            "an installation of the core alone. Allowed: the whole package. "
            "Install it."
        )
        print(wrapped(text), file=sys.stderr)
        return 2
    return cli.main(argv)


def choose_backend(asked: str | None) -> str:
    """The backend to use.

    Args:
        asked: What the command line says; None: `KERAS_BACKEND`, and where
            that is not set, the first of `BACKENDS` that is installed.

    Returns:
        One of `BACKENDS`.

    Raises:
        ValueError: If it is unknown or not installed.
    """
    installed = installed_backends()
    named = asked or os.environ.get("KERAS_BACKEND") or None
    if named is None and not installed:
        raise ValueError(
            "no framework is installed; get one of them with "
            "pip install 'keras-policy-ext[jax]', [torch] or [tensorflow]"
        )
    backend = named or installed[0]
    if backend not in BACKENDS:
        where = "--backend" if asked else "KERAS_BACKEND"
        raise ValueError(
            f"unknown backend {backend!r} in {where}; allowed: "
            f"{', '.join(BACKENDS)}"
        )
    if backend not in installed:
        raise ValueError(
            f"the backend {backend!r} is not installed (installed: "
            f"{', '.join(installed) or 'none'}); get it with "
            f"pip install 'keras-policy-ext[{backend}]'"
        )
    return backend


def wrapped(message: str) -> str:
    """A message for stderr, broken at blanks where that is a terminal.

    Through a pipe or into a file it is one line, also where `COLUMNS` is set:
    a shell may export it to programs that read the message.
    """
    if not sys.stderr.isatty():
        return message
    width = shutil.get_terminal_size((80, 24)).columns
    return textwrap.fill(
        message,
        max(width, 20),
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def installed_backends() -> list[str]:
    """Those of `BACKENDS` that are installed here; nothing is imported."""
    return [name for name in BACKENDS if importlib.util.find_spec(name)]


def without_backend(error: Exception) -> str:
    """What to do where Keras cannot be imported.

    Args:
        error: Why it cannot.

    Returns:
        A message that names the frameworks that are installed.
    """
    installed = installed_backends()
    found = f"Keras cannot be imported: {error}. Installed frameworks: "
    if not installed:
        return (
            f"{found}none. Install one of them: pip install "
            "'keras-policy-ext[jax]', [torch] or [tensorflow]."
        )
    return (
        f"{found}{', '.join(installed)}. Set KERAS_BACKEND to one of them "
        "before Keras is imported: `export KERAS_BACKEND="
        f"{installed[0]}` in the shell, or os.environ['KERAS_BACKEND'] = "
        f"'{installed[0]}' in the first lines of the program."
    )


def _asked(argv: Sequence[str]) -> str | None:
    """The value of `--backend`, wherever it is; `cli` reads the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", nargs="?")
    return parser.parse_known_args(argv)[0].backend


if __name__ == "__main__":
    raise SystemExit(main())
