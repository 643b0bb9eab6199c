"""The command `keras-policy-ext shrink`: load, freeze, save."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_policy_ext.conversion import Converted, FrozenReport, Skipped, freeze
from keras_policy_ext.conversion.freezing import frozen_layers
from keras_policy_ext.ext import output_files
from keras_policy_ext.reports import (
    BaseReport,
    Column,
    Table,
    counted,
    readable_bytes,
)
from keras_policy_ext.saving import load_model


@dataclasses.dataclass(frozen=True, repr=False)
class ShrunkReport(BaseReport):
    """The report of `keras-policy-ext shrink`: which layers are frozen.

    Attributes:
        frozen: The report of `freeze`.
        stored_as: A description of how kernels are stored.
    """

    frozen: FrozenReport
    stored_as: str

    def _parts(self, full: bool, number: int) -> Iterator[str | Table]:
        frozen = self.frozen
        layers = sum(entry.in_float8 for entry in frozen.converted)
        yield (
            f"{counted(len(frozen.stored), 'kernel')} of "
            f"{counted(layers, 'layer')} stored in one byte per number: "
            f"{self.stored_as}"
        )
        columns = (
            Column("layers", right=True),
            Column("class"),
            Column("stored as / reason not stored", wraps=True),
        )
        rows = [
            [f"{len(group):,}", group[0].class_name, self._outcome(group[0])]
            for group in frozen.groups
        ]
        yield Table(columns, rows)
        yield frozen.kernels_note()

    def _outcome(self, entry: Converted | Skipped) -> str:
        if entry.in_float8:
            return self.stored_as
        # Behind the semicolon is what to do in a program.
        return entry.outcome.partition(";")[0]


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A frozen model that is to be saved, and the path of its file.

    Attributes:
        model: The frozen model.
        source: The file that it was loaded from.
        output: The file to write.
        report: The report on its layers.
    """

    model: keras.Model
    source: pathlib.Path
    output: pathlib.Path
    report: ShrunkReport

    def run(self) -> None:
        """Save the frozen model, and print the report and the file sizes."""
        with output_files.whole(self.output) as path:
            self.model.save(path)
        before, after = (
            readable_bytes(path.stat().st_size)
            for path in (self.source, self.output)
        )
        print(self.report)
        print(f"{self.source} ({before}) -> {self.output} ({after})")


def prepare(source: str, output: str, force: bool, **options: Any) -> Shrunk:
    """Load a model file and freeze the model, to be saved at `output`.

    Args:
        source: A `.keras` file.
        output: The `.keras` file to write.
        force: Whether to overwrite the output if it exists.
        **options: As for `freeze`.

    Raises:
        ValueError: If the source cannot be loaded, the output cannot be
            written, or the model cannot be frozen.
    """
    read, written = pathlib.Path(source), pathlib.Path(output)
    output_files.check_output(read, written, force)
    try:
        model = load_model(read, compile=False)
    except (OSError, TypeError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    if frozen_layers(model):
        raise ValueError(
            f"{source!r} is already frozen: its kernels are one byte each. "
            "Pass a file that is not frozen."
        )
    try:
        report = freeze(model, **options)
    except ValueError as error:
        raise ValueError(_in_a_shell(error, options)) from error
    if not report.stored:
        raise ValueError(f"no layer of {source!r} can be frozen")
    recipes = [layer.float8_policy.recipe for layer in frozen_layers(model)]
    stored_as = ", ".join(sorted({f"{x.weights} per {x.per}" for x in recipes}))
    return Shrunk(model, read, written, ShrunkReport(report, stored_as))


def _in_a_shell(error: ValueError, options: dict[str, Any]) -> str:
    """Return the first part of an error, with advice for the command line."""
    fault = str(error).partition(" Received: ")[0]
    if options["activations"] != "static":
        return fault
    return (
        f"{fault} `--activations static` takes the scales of a model that was "
        "trained in float8 with delayed scaling; `--activations dynamic` "
        "needs none."
    )
