"""Files of models and weights: check, open, search, copy and rewrite them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import h5py

from keras_policy_ext.files import input_files, keras_float8
from keras_policy_ext.files.saved_layers import (
    FrozenWeights,
    is_frozen,
)
from keras_policy_ext.recipes import FrozenKernels

PathLike = str | os.PathLike[str]
Source = PathLike | io.BytesIO
WEIGHTS = "model.weights.h5"
CONFIG = "config.json"
METADATA = "metadata.json"

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
"""The errors that h5py and zipfile raise for a damaged file. The loaders say
what is wrong with it."""

_LOCAL_HEADER = 30  # bytes, before the name of a member of a zip archive


@contextlib.contextmanager
def opened(path: Source) -> Iterator[h5py.File | None]:
    """In the block, the HDF5 weights of a model file or folder are open.

    `.keras` files may be bytes, and shards are open as one file. It yields
    None if there is no HDF5 file.

    Raises:
        Exception: If the file cannot be read; one of `OF_DAMAGE`.
    """
    place = pathlib.Path(str(path))
    if place.is_dir():
        place = place / WEIGHTS
    with contextlib.ExitStack() as stack:
        source: Any = None
        if isinstance(path, io.BytesIO):
            source = stack.enter_context(_weights_in_archive(path))
        elif place.suffix == ".keras" and place.is_file():
            archive = stack.enter_context(place.open("rb"))
            source = stack.enter_context(_weights_in_archive(archive))
        elif place.suffix in (".h5", ".hdf5") and place.is_file():
            source = place
        elif place.suffix == ".json" and place.is_file():
            source = stack.enter_context(_shards_as_one_file(_shards(place)))
        file = None if source is None else h5py.File(source, "r")
        yield file if file is None else stack.enter_context(file)


def _shards(place: pathlib.Path) -> list[str]:
    """Return the paths of the files of weights that an index lists."""
    index = input_files.json_in(place.read_bytes(), place)
    if not isinstance(index, dict) or not isinstance(
        index.get("weight_map"), dict
    ):
        raise input_files.damaged(place, "it is no index of weights")
    names = [
        name
        for each in index["weight_map"].values()
        for name in (each if isinstance(each, list) else [each])
    ]
    input_files.check_names(place, names)
    return [str(place.parent / name) for name in sorted(set(names))]


@contextlib.contextmanager
def _shards_as_one_file(parts: list[str]) -> Iterator[str]:
    """In the block, an HDF5 file exists that links to the arrays of others."""

    def link(name: str, item: Any) -> None:
        """Link to an array from the new file."""
        if isinstance(item, h5py.Dataset):
            file[name] = h5py.ExternalLink(item.file.filename, item.name)

    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / WEIGHTS)
        with h5py.File(path, "w") as file:
            for part in parts:
                with h5py.File(os.path.abspath(part), "r") as shard:
                    shard.visititems(link)
        yield path


@contextlib.contextmanager
def copied(path: PathLike) -> Iterator[str]:
    """In the block, a copy of a file's HDF5 weights exists at a path."""
    with tempfile.TemporaryDirectory() as folder:
        copy = str(pathlib.Path(folder) / WEIGHTS)
        with opened(path) as source, h5py.File(copy, "w") as file:
            if source is not None:
                for name in source:
                    source.copy(name, file, expand_external=True)
        yield copy


@contextlib.contextmanager
def rewritten(
    path: PathLike, change: Callable[[h5py.Group], None]
) -> Iterator[str]:
    """In the block, a copy of the weights exists in which layers are changed.

    `change` gets the group of each layer.
    """
    with copied(path) as copy:
        rewrite(copy, change)
        yield copy


def rewrite(path: PathLike, change: Callable[[h5py.Group], None]) -> None:
    """Change the groups of all layers in a file of weights."""
    with h5py.File(path, "a") as file:
        for group in groups(file):
            change(group)


@contextlib.contextmanager
def unpacked(path: PathLike, under: str = "") -> Iterator[pathlib.Path]:
    """In the block, a folder exists with copies of the files in a model's file.

    With those whose names begin with `under`.
    """
    place = pathlib.Path(str(path))
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "model"
        if place.is_dir():
            # Without their modes: copies of read-only files are written to.
            shutil.copytree(place, copy, copy_function=shutil.copyfile)
        else:
            with zipfile.ZipFile(place) as archive:
                names = archive.namelist()
                archive.extractall(
                    copy, [x for x in names if x.startswith(under)]
                )
        yield copy


def content(path: Source, name: str) -> bytes:
    """Return what a file in a model's file or folder, or in bytes, contains.

    Raises:
        KeyError: If the archive lacks it.
        OSError: If the folder lacks it.
    """
    if isinstance(path, io.BytesIO):
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    place = pathlib.Path(str(path))
    if place.is_dir():
        return (place / name).read_bytes()
    with zipfile.ZipFile(place) as archive:
        return archive.read(name)


def lacks_config(path: PathLike) -> bool:
    """Return True for a folder that Keras has not written as a model file."""
    # A folder with others of its files has lost its config.
    place = pathlib.Path(str(path))
    names = CONFIG, METADATA, WEIGHTS
    return place.is_dir() and not any((place / each).exists() for each in names)


def first_recipe(path: PathLike) -> FrozenKernels | None:
    """Return the recipe of the first frozen layer in a file, or None."""
    with opened(path) as file:
        listed = [] if file is None else groups(file)
        first = next(filter(is_frozen, listed), None)
        return first and FrozenWeights.of(first, first.name).recipe


def has_scaler(weights: PathLike) -> bool | None:
    """Return True if a file holds a loss scaler; None without an optimizer."""
    try:
        with h5py.File(weights, "r") as file:
            if "optimizer" in file:
                return "optimizer/inner_optimizer" in file
            return None
    except OSError:  # No HDF5 file: weights in shards.
        return None


def groups(file: h5py.File) -> list[h5py.Group]:
    """Return the HDF5 groups that each hold the variables of one layer."""
    # The optimizer's group is left out. Links to other files are not followed.
    of_layers: list[h5py.Group] = []

    def visit(name: str, item: Any) -> None:
        """List an item that is the group of a layer."""
        is_layer = not name.startswith("optimizer/")
        if name.endswith("/vars") and isinstance(item, h5py.Group) and is_layer:
            of_layers.append(item)

    file.visititems(visit)
    return of_layers


def count(path: Source, wanted: Callable[[h5py.Group], object]) -> int:
    """Count the layer groups of a file for which `wanted` returns True."""
    try:
        with opened(path) as file:
            listed = [] if file is None else groups(file)
            return sum(bool(wanted(group)) for group in listed)
    except OF_DAMAGE:
        return 0


@contextlib.contextmanager
def _weights_in_archive(
    file: IO[bytes],
) -> Iterator[IO[bytes] | io.RawIOBase | None]:
    """In the block, the weights in a `.keras` archive are open, if there."""
    with zipfile.ZipFile(file) as archive:
        if WEIGHTS not in archive.namelist():
            yield None
            return
        # Keras stores them uncompressed. Others are unpacked into memory: each
        # seek backwards would unpack them from the beginning.
        info = archive.getinfo(WEIGHTS)
        if info.compress_type != zipfile.ZIP_STORED:
            yield io.BytesIO(archive.read(WEIGHTS))
            return
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER)
        # Its last four bytes: the lengths of the two fields that follow, the
        # name and extra data. The content is behind these.
        name, extra = (
            int.from_bytes(header[at : at + 2], "little") for at in (26, 28)
        )
        start = info.header_offset + _LOCAL_HEADER + name + extra
        yield _Section(file, start, info.file_size)


class _Section(io.RawIOBase):
    """A range of bytes of an open file, readable as a file of its own.

    That of `zipfile` seeks backwards by reading all from the beginning: 47 s
    against 0.1 for 240 MiB (Python 3.11). Expires with Python 3.12.
    """

    def __init__(self, file: IO[bytes], start: int, size: int):
        """Begin at the first byte of the range."""
        super().__init__()
        self._file, self._start, self._size = file, start, size
        self._at = 0  # The next byte to read, counted from `start`.

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset in the range; return the new position."""
        # SEEK_SET, SEEK_CUR and SEEK_END are 0, 1 and 2.
        base = (0, self._at, self._size)[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; return their number."""
        size = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        content = self._file.read(size)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def check_exists(path: PathLike) -> None:
    """Raise FileNotFoundError if a local path has no file or folder."""
    text = str(path)
    if "://" not in text and not pathlib.Path(text).exists():
        raise FileNotFoundError(
            f"There is no such file. Received: {text!r}. Allowed: the path "
            "of a file, or of a folder, that exists. Check the spelling and "
            "the working directory."
        )


@dataclasses.dataclass(frozen=True)
class Contents:
    """What was found in a file while its weights were checked."""

    numbers: int = 0  # The elements of all arrays.
    has_frozen_layers: bool = False
    has_keras_float8: bool = False  # Layers in Keras's own float8.


def check_model(path: PathLike) -> Contents:
    """Check a model's file or folder; return what it has.

    Keras does not detect all damage, and reports a truncated file as missing
    (keras 3.12 to 3.15). Keras 3.12.4, 3.14.1 and 3.15 refuse links, and arrays
    that are virtual or in another file; 3.12.0 does not, and 3.13.2 and 3.14.0
    refuse the last alone. 3.12.4 and 3.15 refuse an array of more than 4 GiB of
    which less than a thousandth is there.

    Raises:
        ValueError: If it is damaged or malicious.
        FileNotFoundError: If a local path does not exist.
    """
    text = str(path)
    if text.startswith("hf://"):
        raise ValueError(
            f"{text!r} is on the Hugging Face Hub, and not a file on this "
            f"machine. Received: {text!r}. Allowed: a local path. Download it "
            "first with `huggingface_hub.snapshot_download` and pass the "
            "folder."
        )
    check_exists(path)
    if text.endswith((".h5", ".json")) and count(path, lambda group: True):
        raise ValueError(
            f"This file has weights, and no model. Received: {text!r}. "
            "Allowed: a `.keras` file, or a folder that `model.save` wrote. "
            "Make the model, and call `keras_policy_ext.load_weights(model, "
            "path)`; with `as_saved=True` for the policies in the file."
        )
    if text.endswith(".keras") and pathlib.Path(text).is_file():
        _check_archive(path)
    return _check_content(path)


def check_weights(path: PathLike) -> Contents:
    """Check a file of weights; return what it has.

    Raises:
        ValueError: If the file is damaged.
        FileNotFoundError: If there is no such file.
    """
    check_exists(path)
    if str(path).endswith(".keras"):
        _check_archive(path)
    try:
        return _check_content(path)
    except OSError as error:  # As h5py raises for truncated files.
        raise input_files.damaged(path, str(error)) from error


def _check_content(path: PathLike) -> Contents:
    """Look through weights; raise if arrays link elsewhere or are not there."""
    try:
        place, numbers = pathlib.Path(str(path)), 0
        shards = _shards(place) if place.suffix == ".json" else []
        for shard in shards:
            with opened(shard) as file:
                if file is not None:
                    numbers += input_files.check_hdf5(shard, file)
        with opened(path) as file:
            if file is None:
                return Contents()
            if not shards:
                numbers = input_files.check_hdf5(path, file)
            layers = groups(file)
            return Contents(
                numbers,
                any(is_frozen(group) for group in layers),
                any(map(keras_float8.is_group, layers)),
            )
    except (KeyError, RuntimeError, TypeError, zlib.error) as error:
        # As h5py raises for damaged files.
        raise input_files.damaged(path, str(error)) from error


@contextlib.contextmanager
def weights_of(path: PathLike) -> Iterator[str]:
    """In the block, the HDF5 weights of a model's file exist at a path."""
    # Weights in an archive are extracted first: Keras reads in any order, and
    # each seek backwards in an archive starts from the beginning.
    text = str(path)
    if pathlib.Path(text).is_dir():
        yield str(pathlib.Path(text) / WEIGHTS)
    elif text.endswith(".keras") and pathlib.Path(text).is_file():
        with copied(path) as copy:
            yield copy
    else:
        yield text


@contextlib.contextmanager
def on_disk(source: Any) -> Iterator[str]:
    """In the block, a `.keras` file or folder exists at the path it yields.

    The source is a folder, an open file, or the bytes of a `.keras` file.
    """
    if not isinstance(source, io.BytesIO):
        yield str(getattr(source, "name", source))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        path.write_bytes(source.getbuffer())
        yield str(path)


def _check_archive(path: PathLike) -> None:
    """Raise if a `.keras` file is unsafe, damaged, or no Keras model."""
    refused = fault = None
    try:
        with zipfile.ZipFile(str(path)) as archive:
            names = archive.namelist()
            try:
                input_files.check_archive(path, archive)
                if (damaged := archive.testzip()) is not None:
                    fault = f"the checksum of {damaged} is wrong"
            except ValueError as error:  # Too large or unsafe.
                refused = error
    except OF_DAMAGE as error:
        fault = f"it cannot be read ({error})"
    if refused:
        raise refused
    if fault:
        raise ValueError(
            f"This `.keras` file is damaged or truncated. Received: "
            f"{str(path)!r}: {fault}. Allowed: a file as `model.save` wrote "
            "it. Copy it again, or take an earlier checkpoint."
        )
    lacking = [name for name in (CONFIG, WEIGHTS) if name not in names]
    if lacking:
        raise ValueError(
            "This is an archive, but not one of a Keras model. Received: "
            f"{str(path)!r}, which lacks {' and '.join(lacking)}. Allowed: "
            "a `.keras` file as `model.save` writes it. Pass another file."
        )
