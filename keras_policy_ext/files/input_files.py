"""Check input files before arrays are read or memory is allocated.

A file of a few bytes can declare an array of terabytes, an array in another
file, or endlessly nested text. All readers of this package check here first.
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
"""The maximum nesting of JSON; Keras needs several Python calls per level."""

SPARE = 64 * 2**20
"""The bytes that any file may declare, however small it is."""

_MOST_UNPACKED = 20
"""How many times its own size a compressed file may unpack to."""

_MOST_CREATED = 16
"""How many times the elements of its file may be created: a model may be built
a few times, with the slots of an optimizer."""

_ALLOWED_KINDS = "biufcVSO"
_OPEN, _CLOSE = frozenset("[{"), frozenset("]}")


def json_in(text: str | bytes, where: object) -> Any:
    """Parse JSON text, or bytes in UTF-8; errors name it by `where`.

    Raises:
        ValueError: If it is not JSON, or nests too deep.
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
    """Raise if a zip archive has unsafe names or unpacks to too much data.

    Raises:
        ValueError: If a name occurs twice or leads out of the archive, or
            the content is far larger than the file.
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
    """Return the number of elements of all arrays in an HDF5 file.

    Raises:
        ValueError: If it links to other files or declares too much data.
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
                # Of others, `check_dataset` found all bytes in the file.
                declared += item.nbytes if _is_compressed(item) else 0
                numbers += item.size or 0
            elif isinstance(item, h5py.Group):
                address = h5py.h5o.get_info(item.id).addr
                if address not in seen:  # Hard links may form a circle.
                    seen.add(address)
                    waiting.append(item)
            else:
                raise damaged(path, f"{where!r} is neither group nor array")
    if declared:
        _check_size(path, declared, file.id.get_filesize())
    return numbers


def check_dataset(path: object, dataset: Any) -> None:
    """Raise ValueError if an HDF5 array's data are not all in the file."""
    if not isinstance(dataset, h5py.Dataset):
        return
    if dataset.external or dataset.is_virtual:
        raise damaged(path, f"{dataset.name!r} lies in another file")
    if dataset.dtype.kind not in _ALLOWED_KINDS:
        raise damaged(path, f"{dataset.name!r} is {dataset.dtype}")
    if not dataset.size:
        return
    stored = dataset.id.get_storage_size()
    whole = stored >= dataset.nbytes
    if _is_compressed(dataset):  # It is whole if all its chunks are there.
        chunks = math.prod(
            -(-size // chunk)  # Rounded up.
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
    """Check an HDF5 array with `check_dataset`, and return it as NumPy's."""
    check_dataset(path, value)
    return np.asarray(value)


@contextlib.contextmanager
def within_memory_of(path: object, numbers: int) -> Iterator[None]:
    """In the block, raise if a new model is far larger than the file.

    A config of a few bytes can request a layer of any size. `numbers` counts
    the elements of the weights in the file.

    Raises:
        ValueError: If a variable is larger than the file can fill, before its
            memory is allocated; or if the memory of this machine, or the stack,
            is too small.
    """
    spare = SPARE // 4  # Numbers of 4 bytes.
    created = 0  # Numbers in all variables, of every time a model is built.

    def check(shape: tuple[Any, ...]) -> None:
        """Raise if a variable of this shape is too large."""
        nonlocal created
        size = math.prod(shape)
        created += size
        if size > numbers + spare or created > _MOST_CREATED * numbers + spare:
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
    """Raise ValueError if an index of weights names a file elsewhere."""
    for name in names:
        if (
            not isinstance(name, str)
            or pathlib.PurePath(name).name != name
            or "\\" in name
            or "\0" in name
        ):
            raise damaged(path, f"it names {name!r}")


def damaged(path: object, fault: str) -> ValueError:
    """Return the ValueError for a damaged file."""
    return ValueError(
        f"This file is damaged or malicious. Received: {str(path)!r}: {fault}. "
        "Allowed: the file as it was written, by Keras or by this package. "
        "Copy it again, or take an earlier one."
    )


def _is_compressed(dataset: h5py.Dataset) -> bool:
    """Return True if an HDF5 array is stored in compressed chunks."""
    chunked = dataset.chunks is not None
    return chunked and dataset.id.get_create_plist().get_nfilters() > 0


def _check_size(path: object, declared: int, real: int) -> None:
    """Raise if a file declares far more bytes than it holds."""
    most = SPARE + _MOST_UNPACKED * real
    if declared > most:
        raise damaged(
            path,
            f"it declares {declared:,} bytes, and holds {real:,}, of which "
            f"{most:,} at most can come",
        )


def _nests_too_deep(text: str) -> bool:
    """Return True if brackets in JSON text nest too deep."""
    if text.count("[") + text.count("{") <= MOST_NESTED:
        return False
    depth = 0
    # Escaped backslashes and quotes are removed first: they end no string.
    text = text.replace("\\\\", "").replace('\\"', "")
    for number, part in enumerate(text.split('"')):
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
