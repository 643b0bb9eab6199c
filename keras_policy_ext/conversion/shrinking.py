"""What `keras-policy-ext shrink` does: load, freeze, save."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import keras

from keras_policy_ext._output_files import check_output, whole
from keras_policy_ext.conversion import summary
from keras_policy_ext.conversion.freezing import freeze, frozen_layers
from keras_policy_ext.conversion.frozen_report import FrozenReport
from keras_policy_ext.conversion.loading import load_model


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A frozen model, and the file to write.

    Attributes:
        model: It.
        source: The file that it was loaded from.
        output: The file to write.
        report: That of `freeze`.
    """

    model: keras.Model
    source: pathlib.Path
    output: pathlib.Path
    report: FrozenReport

    def run(self) -> None:
        """Write the file and print what was done."""
        with whole(self.output) as path:
            self.model.save(path)
        before, after = (
            summary.readable_bytes(path.stat().st_size)
            for path in (self.source, self.output)
        )
        print(self.report)
        print(f"{self.source} ({before}) -> {self.output} ({after})")


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
    report = freeze(model, **options)
    if not report.stored:
        raise ValueError(f"no layer of {source!r} can be frozen")
    return Shrunk(model, read, written, report)
