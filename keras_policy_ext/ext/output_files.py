"""Write the output files of the commands."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator


def check_output(
    source: pathlib.Path | None,
    output: pathlib.Path,
    force: bool,
    suffix: str = ".keras",
) -> None:
    """Raise ValueError if a command cannot write a file to the path `output`.

    The text is the line that the command prints. The input is never
    overwritten; another file is with `force`.
    """
    name = str(output)
    if output.suffix != suffix:
        raise ValueError(f"the output must be a {suffix} file, not {name!r}")
    if not output.parent.is_dir():
        raise ValueError(f"there is no folder {str(output.parent)!r}")
    if not output.exists():
        return
    if source is not None and source.exists() and output.samefile(source):
        raise ValueError(f"{name!r} is the input, which is never overwritten")
    if not force or output.is_dir():
        raise ValueError(f"{name!r} exists; overwrite it with --force")


@contextlib.contextmanager
def whole(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """In the block, write to the yielded path; it is then moved to `output`.

    A failure leaves no incomplete file, and does not change `output`.
    """
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        part = pathlib.Path(folder) / output.name
        yield part
        os.replace(part, output)
