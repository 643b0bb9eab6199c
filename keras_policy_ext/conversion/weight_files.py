"""What is in a file of weights, by names and shapes; no array is read."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import h5py

from keras_policy_ext import _input_files

PathLike = str | os.PathLike[str]
Source = PathLike | io.BytesIO
WEIGHTS = "model.weights.h5"

OF_DAMAGE = (
    EOFError,
    LookupError,
    OSError,
    RuntimeError,  # as for an encrypted archive, which flipped bits look like
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What h5py and zipfile raise for a damaged file. To say what is wrong with
it is left to those that load it."""

_LOCAL_HEADER = 30  # bytes, before the name of a member of a zip archive


@contextlib.contextmanager
def opened(path: Source) -> Iterator[h5py.File | None]:
    """The HDF5 file of weights in a `.keras` file, or folder, or by itself.

    Args:
        path: Of one of them; or the bytes of a `.keras` file.

    Yields:
        The file; None if there is none in this format at this path.

    Raises:
        Exception: One of `OF_DAMAGE`, if it cannot be read.
    """
    place = pathlib.Path(str(path))
    if place.is_dir():
        place = place / WEIGHTS
    with contextlib.ExitStack() as stack:
        source: Any = None
        if isinstance(path, io.BytesIO):
            source = stack.enter_context(_member(path))
        elif place.suffix == ".keras" and place.is_file():
            archive = stack.enter_context(place.open("rb"))
            source = stack.enter_context(_member(archive))
        elif place.suffix in (".h5", ".hdf5") and place.is_file():
            source = place
        file = None if source is None else h5py.File(source, "r")
        yield file if file is None else stack.enter_context(file)


def parts_of(path: str) -> list[str]:
    """The file of weights, or those that an index names, beside it.

    Raises:
        ValueError: If the index is damaged, or names other places.
    """
    place = pathlib.Path(path)
    if place.suffix != ".json":
        return [path]
    index = _input_files.json_in(place.read_bytes(), path)
    if not isinstance(index, dict) or not isinstance(
        index.get("weight_map"), dict
    ):
        raise _input_files.damaged(path, "it is no index of weights")
    found = index["weight_map"].values()
    listed = [each if isinstance(each, list) else [each] for each in found]
    names = [name for names in listed for name in names]
    _input_files.check_names(path, names)
    return [str(place.parent / name) for name in sorted(set(names))]


def groups(file: h5py.File) -> list[h5py.Group]:
    """The groups that hold the variables of one layer each, by path.

    The optimizer's is none of them. A link out of the file is not followed.
    """
    found: list[h5py.Group] = []

    def visit(name: str, item: Any) -> None:
        is_layer = not name.startswith("optimizer/")
        if name.endswith("/vars") and isinstance(item, h5py.Group) and is_layer:
            found.append(item)

    file.visititems(visit)
    return found


def count(path: Source, wanted: Callable[[h5py.Group], object]) -> int:
    """How many `groups` of a file are wanted; 0 if it cannot be read."""
    try:
        with opened(path) as file:
            found = [] if file is None else groups(file)
            return sum(bool(wanted(group)) for group in found)
    except OF_DAMAGE:
        return 0


@contextlib.contextmanager
def _member(file: IO[bytes]) -> Iterator[IO[bytes] | None]:
    """The weights in an archive, as a file that can be read here and there.

    Keras stores them as they are. Where they are compressed they are
    unpacked into memory: each step back would start from the beginning.
    """
    with zipfile.ZipFile(file) as archive:
        if WEIGHTS not in archive.namelist():
            yield None
            return
        info = archive.getinfo(WEIGHTS)
        if info.compress_type != zipfile.ZIP_STORED:
            yield io.BytesIO(archive.read(WEIGHTS))
            return
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER)
        name, extra = (
            int.from_bytes(header[at : at + 2], "little") for at in (26, 28)
        )
        start = info.header_offset + _LOCAL_HEADER + name + extra
        with io.BufferedReader(_Section(file, start, info.file_size)) as part:
            yield part


class _Section(io.RawIOBase):
    """A part of an open file, in bytes, as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, size: int):
        super().__init__()
        self._file, self._start, self._size = file, start, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # SEEK_SET, SEEK_CUR and SEEK_END are 0, 1 and 2.
        base = (0, self._at, self._size)[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        content = self._file.read(size)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
