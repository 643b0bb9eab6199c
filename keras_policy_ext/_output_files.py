"""Files that the commands write."""

from __future__ import annotations

import pathlib


def check_output(
    source: pathlib.Path, output: pathlib.Path, force: bool
) -> None:
    """Raise if a command cannot write its model to this path.

    Args:
        source: What it reads, which is never overwritten.
        output: A `.keras` file.
        force: Whether a file that exists is overwritten.

    Raises:
        ValueError: If so, with the line that the command prints.
    """
    name = str(output)
    if output.suffix != ".keras":
        raise ValueError(f"the output must be a .keras file, not {name!r}")
    if not output.parent.is_dir():
        raise ValueError(f"there is no folder {str(output.parent)!r}")
    if not output.exists():
        return
    if source.exists() and output.samefile(source):
        raise ValueError(f"{name!r} is the input, which is never overwritten")
    if not force or output.is_dir():
        raise ValueError(f"{name!r} exists; overwrite it with --force")
