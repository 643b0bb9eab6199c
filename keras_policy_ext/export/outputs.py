"""Files and folders that appear whole under their names, or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

PathLike = str | os.PathLike[str]

_REPLACED = "replaced"


@contextlib.contextmanager
def whole(
    path: PathLike, *, folder: bool, overwrite: bool
) -> Iterator[pathlib.Path]:
    """A place to write to, which is moved to `path` at the end.

    It lies beside `path`, on the same disk. After an error it is removed; if
    the process is killed it stays, under a name that begins with a dot and
    ends with `.partial`. What was at `path` stays until then.

    Args:
        path: Where the output belongs.
        folder: Whether it is a folder.
        overwrite: Whether something may be at `path`.

    Yields:
        The path to write to: an empty folder, or a file that is not there.

    Raises:
        FileExistsError: If something is at `path` and may not be replaced.
        FileNotFoundError: If the folder for it does not exist.
    """
    target = pathlib.Path(path).absolute()
    check(target, folder=folder, overwrite=overwrite)
    beside = tempfile.mkdtemp(
        prefix=f".{target.name}.", suffix=".partial", dir=target.parent
    )
    workplace = pathlib.Path(beside)
    try:
        made = workplace / target.name
        if folder:
            made.mkdir()
        yield made
        # What came there meanwhile is not replaced either.
        check(target, folder=folder, overwrite=overwrite)
        _move(made, target, workplace / _REPLACED)
    finally:
        # What was replaced is kept, if nothing has taken its place.
        if os.path.lexists(target) or not (workplace / _REPLACED).exists():
            shutil.rmtree(workplace, ignore_errors=True)


def check(target: pathlib.Path, *, folder: bool, overwrite: bool) -> None:
    """Raise if an output cannot be put at `target`."""
    if not target.parent.is_dir():
        raise FileNotFoundError(
            "There is no folder to write to. Received: "
            f"{str(target)!r}. Allowed: a path in a folder that exists. Make "
            "the folder first."
        )
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(
            "There is something at this path already. Received: "
            f"{str(target)!r}. Allowed: a path that is free. Pass another "
            "one, or overwrite=True."
        )
    if (folder and not _is_export(target)) or (not folder and target.is_dir()):
        raise FileExistsError(
            "What is at this path is no earlier export, and is not replaced. "
            f"Received: {str(target)!r}. Allowed: "
            + (
                "a folder with a config.json and no folders"
                if folder
                else "a file"
            )
            + ". Pass another path."
        )


def _is_export(target: pathlib.Path) -> bool:
    """Return True if a folder is empty, or looks like that of a model."""
    if not target.is_dir() or target.is_symlink():
        return False
    within = list(target.iterdir())
    flat = not any(each.is_dir() for each in within)
    return not within or (flat and (target / "config.json").is_file())


def _move(
    made: pathlib.Path, target: pathlib.Path, aside: pathlib.Path
) -> None:
    """Put the output in place; a folder cannot replace one with files."""
    if not (made.is_dir() and target.exists()):
        os.replace(made, target)
        return
    os.replace(target, aside)
    try:
        os.replace(made, target)
    except OSError:
        os.replace(aside, target)
        raise
