"""`keras-policy-ext demo`: one transformer in three precisions.

Importing this module imports no Keras, so that `prepare` can check all that
can go wrong before a framework is loaded.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from keras_policy_ext.diagnostics import plots
from keras_policy_ext.diagnostics.demo import text
from keras_policy_ext.diagnostics.demo.settings import Settings, Size

if TYPE_CHECKING:
    from rich.console import Console

    from keras_policy_ext.diagnostics.demo.session import Outcome

__all__ = ["Prepared", "Settings", "Size", "prepare", "run"]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """All that the demo needs, checked; the folder exists."""

    settings: Settings
    corpus: text.Corpus
    folder: pathlib.Path


def prepare(settings: Settings) -> Prepared:
    """Check what can be checked before training; make the output folder.

    Raises:
        ValueError: If matplotlib is missing, the text cannot be read or is
            too short, or the folder cannot be made.
    """
    plots.require_matplotlib()
    corpus = text.load(settings.text, settings.size.context)
    folder = pathlib.Path(settings.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"Cannot make the folder {folder}: {reason}.") from (
            error
        )
    return Prepared(settings, corpus, folder)


def run(prepared: Prepared, console: Console | None = None) -> Outcome:
    """Train in every precision, print the tables, write the files."""
    from keras_policy_ext.diagnostics.demo import session

    return session.run(
        prepared.settings, prepared.corpus, prepared.folder, console
    )
