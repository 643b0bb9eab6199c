"""The two file formats of tf_keras: HDF5, and the `.keras` archive.

Files are opened for reading only, and their content is treated as data: class
names in a config are never imported, and arrays must be numbers that are
stored in the file itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import textwrap
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import h5py
import ml_dtypes
import numpy as np

from keras_policy_ext.files import input_files

OF_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    UnicodeError,
    zlib.error,
)
"""The errors that a damaged file raises in h5py, in Keras and here. Nothing
checks a whole file: of 90 HDF5 files with flipped bytes, 29 raised one."""

_ZIP = b"PK\x03\x04"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
_BFLOAT16 = np.dtype("V2")  # how HDF5 returns it
_DEFLATE = 1032  # the most that deflate saves; small arrays may be unwritten


@dataclasses.dataclass(frozen=True)
class LegacyFile:
    """The configs, weights and optimizer state in an open tf_keras file."""

    path: pathlib.Path
    model_config: dict[str, Any]
    compile_config: dict[str, Any] | None
    """Arguments of `compile`; None if the model was not compiled."""
    weights: h5py.Group
    """In HDF5 a group for each layer, in an archive the whole tree."""
    optimizer: list[h5py.Dataset]
    """Its variables, the number of iterations first; empty if unsaved."""
    is_archive: bool = False
    scaled_by_default: bool = False
    """Whether `compile` wrapped the optimizer. An archive shows this only by
    the place of its variables."""


class _WrongFileError(Exception):
    """Raised for an unreadable file; the text completes a sentence about it."""


@contextlib.contextmanager
def open_legacy(path: str | os.PathLike[str]) -> Iterator[LegacyFile]:
    """In the block, a `.h5` or `.keras` file of tf_keras is open.

    The format is detected from the content, not from the name.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no such file, is damaged, or has weights only.
    """
    path = pathlib.Path(path)
    start = None
    if not path.is_dir():
        with path.open("rb") as opened:
            start = opened.read(len(_HDF5))
    # The caller's errors are behind: from here on, they are of the content.
    try:
        with _opened(path, start) as file:
            yield file
    except _WrongFileError as wrong:
        raise ValueError(_wrong(path, str(wrong))) from wrong.__cause__
    except OF_DAMAGE as error:
        what = "is damaged, or does not fit a class in `custom_objects`: "
        raise ValueError(_wrong(path, what + cause(error))) from error


def cause(error: BaseException) -> str:
    """Return an error's type and text for a message, at most 300 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)


def array(
    dataset: object, shape: tuple[int, ...] | None, where: str
) -> np.ndarray:
    """Read one HDF5 array of numbers; convert bfloat16 to float32.

    Args:
        dataset: An entry of an HDF5 group.
        shape: The shape that it must have; None for any.
        where: The name of the array in errors.

    Raises:
        ValueError: If it has another shape, is stored outside of the file, or
            holds anything but numbers.
    """
    # Before the data: a shape alone may stand for more than the memory has.
    wrong = _wrong_dataset(dataset, shape)
    if wrong:
        raise ValueError(f"The array of {where} {wrong}")
    try:
        value = np.asarray(dataset)
    except OSError as error:
        raise ValueError(
            f"The array of {where} cannot be read: {error}. The file is "
            "damaged."
        ) from error
    if value.dtype == _BFLOAT16:
        # float32 has all of its numbers, and every backend takes it.
        return value.view(ml_dtypes.bfloat16).astype(np.float32)
    return value


def member(group: h5py.Group | None, name: str) -> Any:
    """Return the entry of an HDF5 group at a path such as "a/b", or None."""
    for part in name.split("/"):
        if group is None or part not in group:
            return None
        # A soft or external link may lead out of the file.
        link = group.get(part, getlink=True)
        group = group[part] if isinstance(link, h5py.HardLink) else None
    return group


def saved_weights(group: h5py.Group | None) -> list[tuple[str, Any]]:
    """Return (name, array) of each weight in a layer's HDF5 group, in order."""
    if group is None:
        return []
    # A long list of names is split over several attributes.
    attribute = "weight_names"
    parts = [attribute] if attribute in group.attrs else []
    while (more := f"{attribute}{len(parts)}") in group.attrs:
        parts.append(more)
    names = [_text(name) for part in parts for name in group.attrs[part]]
    return [(name, member(group, name)) for name in names]


def _opened(
    path: pathlib.Path, start: bytes | None
) -> contextlib.AbstractContextManager[LegacyFile]:
    if (path / "saved_model.pb").exists():
        raise _WrongFileError(
            "is a TensorFlow SavedModel, which holds a program and not a "
            "model of layers; load it with tf_keras and save it as .h5 or "
            ".keras, or use keras.layers.TFSMLayer"
        )
    if start is None:
        raise _WrongFileError("is a folder")
    if start.startswith(_ZIP):
        return _open_archive(path)
    if start == _HDF5:
        return _open_hdf5(path)
    if start[:1] == b"\x80":
        raise _WrongFileError(
            "is a pickle, which would run code; it is never loaded"
        )
    if not start:
        raise _WrongFileError("is empty")
    raise _WrongFileError("is neither HDF5 nor an archive, or is damaged")


@contextlib.contextmanager
def _open_hdf5(path: pathlib.Path) -> Iterator[LegacyFile]:
    try:
        opened = h5py.File(path, "r")
    except OSError as error:
        raise _WrongFileError(f"is damaged: {error}") from error
    with opened as file:
        if "model_config" not in file.attrs:
            raise _WrongFileError(_without_model(file))
        version = file.attrs.get("keras_version")
        _check_version(path, None if version is None else _text(version))
        weights = member(file, "model_weights")
        if weights is None:
            raise _WrongFileError("has no weights: it is damaged")
        compiled = None
        if "training_config" in file.attrs:
            training = _parse(file.attrs["training_config"])
            compiled = {key: training.get(key) for key in _COMPILED}
            compiled["optimizer"] = training.get("optimizer_config")
        slots = saved_weights(member(file, "optimizer_weights"))
        yield LegacyFile(
            path=path,
            model_config=_parse(file.attrs["model_config"]),
            compile_config=compiled,
            weights=weights,
            optimizer=[slot for _, slot in slots],
        )


@contextlib.contextmanager
def _open_archive(path: pathlib.Path) -> Iterator[LegacyFile]:
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(path))
            input_files.check_archive(path, archive)
            metadata = archive.read("metadata.json")
            config_text = archive.read("config.json")
            content = io.BytesIO(archive.read("model.weights.h5"))
            tree = stack.enter_context(h5py.File(content, "r"))
        except KeyError as error:
            raise _WrongFileError(f"is no model: {error}") from error
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise _WrongFileError(f"is damaged: {error}") from error
        _check_version(path, _parse(metadata).get("keras_version"))
        assets = [n for n in archive.namelist() if n.startswith("assets/")]
        if assets:
            raise _WrongFileError(f"has assets, such as a vocabulary: {assets}")
        config = _parse(config_text)
        slots = member(tree, "optimizer/vars")
        count = 0 if slots is None else len(slots)
        yield LegacyFile(
            path=path,
            model_config=config,
            compile_config=config.pop("compile_config", None),
            weights=tree,
            optimizer=[member(slots, str(i)) for i in range(count)],
            is_archive=True,
            scaled_by_default=(
                member(tree, "optimizer/inner_optimizer") is not None
            ),
        )


def _parse(text: str | bytes) -> dict[str, Any]:
    try:
        parsed = input_files.json_in(text, "config")
    except ValueError as error:
        found = error.__cause__ or error
        raise _WrongFileError(
            f"has a config that is not JSON: {found}"
        ) from error
    if not isinstance(parsed, dict):
        raise _WrongFileError("is damaged: its config is no dict")
    return parsed


def _text(value: object) -> str:
    return value.decode("utf8") if isinstance(value, bytes) else str(value)


def _check_version(path: pathlib.Path, version: object) -> None:
    if str(version).startswith("2."):
        return
    if str(version).split(".")[0] in ("0", "1", "None"):
        raise _WrongFileError(f"is older than Keras 2 (version {version})")
    raise ValueError(
        f"This file needs no migration. Received: {os.fspath(path)!r}, "
        f"written by Keras {version}. Allowed: files of Keras 2 and tf_keras. "
        "Load it with keras.saving.load_model."
    )


def _wrong_dataset(
    dataset: object, shape: tuple[int, ...] | None
) -> str | None:
    """Return what is wrong with an HDF5 array, or None; no data are read."""
    if not isinstance(dataset, h5py.Dataset):
        return "is missing. The file is damaged."
    if shape is not None and tuple(dataset.shape) != tuple(shape):
        return (
            f"has the wrong shape. Received: {tuple(dataset.shape)}. Allowed: "
            f"{tuple(shape)}. Check that custom layers are the same as in the "
            "file."
        )
    if dataset.external or dataset.is_virtual:
        return (
            "lies outside of the file. Received: a reference to another file. "
            "Allowed: arrays in the file itself. Save the model again."
        )
    if dataset.dtype.kind not in "biuf" and dataset.dtype != _BFLOAT16:
        return (
            f"does not hold numbers. Received: the dtype {dataset.dtype}. "
            "Allowed: numbers. Objects are not loaded."
        )
    if dataset.nbytes > _DEFLATE * max(dataset.id.get_storage_size(), 1):
        # Reading would make zeros of what was never written.
        return (
            f"was never written. Received: the shape {tuple(dataset.shape)} "
            "without its numbers. The file is damaged."
        )
    return None


def _without_model(file: h5py.File) -> str:
    if "layer_names" in file.attrs or "layers" in file or "vars" in file:
        return (
            "has weights only; build the model in Keras 3 and call its "
            "load_weights"
        )
    return "is HDF5, but no model of Keras"


def _wrong(path: pathlib.Path, what: str) -> str:
    return (
        f"Cannot load this file. Received: {os.fspath(path)!r}, which "
        f"{what}. Allowed: a model that tf_keras or Keras 2 saved as .h5 or "
        ".keras. Save it again in tf_keras with model.save."
    )
