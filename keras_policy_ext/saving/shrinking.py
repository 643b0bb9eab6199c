"""What `keras-policy-ext shrink` does: load, freeze, save."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import keras

from keras_policy_ext._output_files import check_output, whole
from keras_policy_ext.conversion import summary, tables
from keras_policy_ext.conversion.freezing import freeze, frozen_layers
from keras_policy_ext.conversion.frozen_report import FrozenReport
from keras_policy_ext.conversion.report import Converted, Skipped
from keras_policy_ext.conversion.tables import Column, Table
from keras_policy_ext.saving.loading import load_model


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A frozen model, and the file to write.

    Attributes:
        model: It.
        source: The file that it was loaded from.
        output: The file to write.
        report: That of `freeze`.
        stored_as: How kernels are stored, in words.
    """

    model: keras.Model
    source: pathlib.Path
    output: pathlib.Path
    report: FrozenReport
    stored_as: str

    def run(self) -> None:
        """Write the file and print what was done."""
        with whole(self.output) as path:
            self.model.save(path)
        before, after = (
            summary.readable_bytes(path.stat().st_size)
            for path in (self.source, self.output)
        )
        print("\n".join(self.lines()))
        print(f"{self.source} ({before}) -> {self.output} ({after})")

    def lines(self) -> list[str]:
        """What became of the layers, as wide as the terminal."""
        report, width = self.report, shutil.get_terminal_size((80, 24)).columns
        layers = sum(entry.in_float8 for entry in report.converted)
        head = (
            f"{summary.counted(len(report.stored), 'kernel')} of "
            f"{summary.counted(layers, 'layer')} stored in one byte per "
            f"number: {self.stored_as}"
        )
        rows = [
            [f"{len(group):,}", group[0].class_name, self._outcome(group[0])]
            for group in report.groups
        ]
        columns = (
            Column("layers", right=True),
            Column("class"),
            Column("stored as / reason not stored"),
        )
        return [
            *tables.wrap(head, width),
            "",
            *Table(columns, rows).text(width),
            "",
            *tables.wrap(report.kernels_note(), width),
        ]

    def _outcome(self, entry: Converted | Skipped) -> str:
        if entry.in_float8:
            return self.stored_as
        # Behind the semicolon is what to do in a program.
        return tables.printable(entry.outcome.partition(";")[0])


def prepare(source: str, output: str, force: bool, **options: Any) -> Shrunk:
    """Load a file and freeze it, after a look at where the result is to go.

    Args:
        source: A `.keras` file.
        output: Likewise; the one to write.
        force: Whether to overwrite it, if it exists.
        **options: As for `freeze`.

    Raises:
        ValueError: If the file cannot be loaded or the other not written, or
            the model not frozen.
    """
    read, written = pathlib.Path(source), pathlib.Path(output)
    check_output(read, written, force)
    try:
        model = load_model(read, compile=False)
    except (OSError, TypeError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    if frozen_layers(model):
        raise ValueError(f"{source!r} is frozen; its kernels are one byte each")
    try:
        report = freeze(model, **options)
    except ValueError as error:
        raise ValueError(_in_a_shell(error, options)) from error
    if not report.stored:
        raise ValueError(f"no layer of {source!r} can be frozen")
    stored_as = f"{options['weights']} per {options['granularity']}"
    return Shrunk(model, read, written, report, stored_as)


def _in_a_shell(error: ValueError, options: dict[str, Any]) -> str:
    """The fault alone, with what to do on the command line."""
    fault = str(error).partition(" Received: ")[0]
    if options["activations"] != "static":
        return fault
    return (
        f"{fault} `--activations static` takes the scales of a model that was "
        "trained in float8 with delayed scaling; `--activations dynamic` "
        "needs none."
    )
