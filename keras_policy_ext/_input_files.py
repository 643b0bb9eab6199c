"""Checks of what files declare, before anything is read or allocated.

A file of a few bytes can declare an array of terabytes, one that lies in
another file, or text that nests without an end. All readers of this package
ask here first.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import h5py
import numpy as np

from keras_policy_ext._keras import calls

MOST_NESTED = 200
"""Levels of brackets in JSON; Keras needs some calls of Python for each."""

SPARE = 64 * 2**20
"""Bytes that may be declared by any file, however small it is."""

_MOST_SAVED = 20
"""How many times its bytes a file may hold, where it is compressed."""

_MOST_MADE = 16
"""How many times the numbers of its file a model may have, made anew a few
times, with the slots of an optimizer."""

_NUMBERS = "biufcVSO"
_OPEN, _CLOSE = frozenset("[{"), frozenset("]}")


def json_in(text: str | bytes, where: object) -> Any:
    """Parse JSON that nests no deeper than what reads it can follow.

    Args:
        text: The text; bytes are UTF-8.
        where: How errors name it.

    Raises:
        ValueError: If it is no JSON, or nests too deep.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf8")
        if _nests_too_deep(text):
            raise ValueError(f"it nests deeper than {MOST_NESTED} levels")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"its JSON is damaged: {error}") from error


def check_archive(path: object, archive: zipfile.ZipFile) -> None:
    """Raise if an archive holds more than it should, or elsewhere.

    Raises:
        ValueError: If a name is there twice or leads out of the archive, or
            what is in it is far larger than the file.
    """
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise damaged(path, f"it has {double!r} twice")
    for name in names:
        parts = pathlib.PurePosixPath(name.replace("\\", "/")).parts
        if ".." in parts or name.startswith(("/", "\\")) or ":" in name:
            raise damaged(path, f"{name!r} is no place in it")
    real = sum(member.compress_size for member in members)
    declared = sum(member.file_size for member in members)
    _check_size(path, declared, real)


def check_hdf5(path: object, file: h5py.File) -> int:
    """Raise if what is in an HDF5 file is not in it, or far too large.

    Raises:
        ValueError: If so.

    Returns:
        How many numbers its arrays have.
    """
    declared = numbers = 0
    seen: set[Any] = set()
    waiting: list[h5py.Group] = [file]
    while waiting:
        group = waiting.pop()
        for name in group:
            where = f"{group.name.rstrip('/')}/{name}"
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise damaged(path, f"{where!r} is a link to another place")
            item = group[name]
            if isinstance(item, h5py.Dataset):
                check_dataset(path, item)
                declared += item.nbytes if _is_compressed(item) else 0
                numbers += item.size or 0
            elif isinstance(item, h5py.Group):
                key = h5py.h5o.get_info(item.id).addr
                if key not in seen:
                    seen.add(key)
                    waiting.append(item)
            else:
                raise damaged(path, f"{where!r} is neither group nor array")
    if declared:
        _check_size(path, declared, file.id.get_filesize())
    return numbers


def check_dataset(path: object, dataset: Any) -> None:
    """Raise if an array of HDF5 is not in its file as a whole.

    Args:
        path: How errors name the file.
        dataset: The array; anything that is none of HDF5 is taken as it is.

    Raises:
        ValueError: If so.
    """
    if not isinstance(dataset, h5py.Dataset):
        return
    if dataset.external or dataset.is_virtual:
        raise damaged(path, f"{dataset.name!r} lies in another file")
    if dataset.dtype.kind not in _NUMBERS:
        raise damaged(path, f"{dataset.name!r} is {dataset.dtype}")
    if not dataset.size:
        return
    stored = dataset.id.get_storage_size()
    whole = stored >= dataset.nbytes
    if _is_compressed(dataset):
        chunks = math.prod(
            -(-size // chunk)
            for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)
        )
        whole = dataset.id.get_num_chunks() == chunks
        _check_size(path, dataset.nbytes, dataset.file.id.get_filesize())
    if not whole:
        raise damaged(
            path,
            f"{dataset.name!r} has the shape {dataset.shape} "
            f"({dataset.nbytes:,} bytes), and {stored:,} bytes of it are there",
        )


def array_in(path: object, value: Any) -> np.ndarray[Any, Any]:
    """An array of a file, once it is looked at.

    Raises:
        ValueError: As `check_dataset`.
    """
    check_dataset(path, value)
    return np.asarray(value)


@contextlib.contextmanager
def within_memory_of(path: object, numbers: int) -> Iterator[None]:
    """Let a model that is made in this block be no larger than its file.

    A config of a few bytes can ask for a layer of any size.

    Args:
        path: How errors name the file.
        numbers: How many numbers the weights in it have.

    Raises:
        ValueError: Before memory is taken for what the file cannot fill; or
            if the memory of this machine, or the stack, does not suffice.
    """
    spare = SPARE // 4
    made = 0

    def check(shape: tuple[Any, ...]) -> None:
        nonlocal made
        size = math.prod(shape)
        made += size
        if size > numbers + spare or made > _MOST_MADE * numbers + spare:
            raise damaged(
                path,
                f"its config asks for a weight of shape {shape}, and there "
                f"are {numbers:,} numbers in the file",
            )

    try:
        with calls.before_each_variable(check):
            yield
    except (MemoryError, OverflowError, RecursionError) as error:
        raise damaged(path, repr(error)) from error


def check_names(path: object, names: Iterable[object]) -> None:
    """Raise if an index names files that are not beside it.

    Raises:
        ValueError: If so.
    """
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name:
            raise damaged(path, f"it names {name!r}")
        if "\\" in name or "\0" in name:
            raise damaged(path, f"it names {name!r}")


def damaged(path: object, found: str) -> ValueError:
    """The error for a file that is not as it was written."""
    return ValueError(
        f"This file is damaged or malicious. Received: {str(path)!r}: {found}. "
        "Allowed: the file as it was written, by Keras or by this package. "
        "Copy it again, or take an earlier one."
    )


def _is_compressed(dataset: h5py.Dataset) -> bool:
    chunked = dataset.chunks is not None
    return chunked and dataset.id.get_create_plist().get_nfilters() > 0


def _check_size(path: object, declared: int, real: int) -> None:
    most = SPARE + _MOST_SAVED * real
    if declared > most:
        raise damaged(
            path,
            f"it declares {declared:,} bytes, and holds {real:,}, of which "
            f"{most:,} at most can come",
        )


def _nests_too_deep(text: str) -> bool:
    """Return whether brackets outside of strings nest too deep."""
    if text.count("[") + text.count("{") <= MOST_NESTED:
        return False
    depth = 0
    for number, part in enumerate(_split_strings(text)):
        if number % 2:
            continue  # Within a string.
        for character in part:
            if character in _OPEN:
                depth += 1
                if depth > MOST_NESTED:
                    return True
            elif character in _CLOSE:
                depth -= 1
    return False


def _split_strings(text: str) -> list[str]:
    """Split JSON into text outside and inside of strings, in turn."""
    return text.replace("\\\\", "").replace('\\"', "").split('"')
