"""The two file formats of tf_keras: HDF5, and the `.keras` archive.

Files are opened for reading only. What is in them is data: the names of
classes in a config are never imported, and arrays must be numbers that lie
in the file itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import textwrap
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import ml_dtypes
import numpy as np

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
"""What a damaged file raises in h5py, in Keras and here. Nobody checks all of
a file: of 90 HDF5 files with flipped bytes, 29 met one of these."""

_ZIP = b"PK\x03\x04"
_HDF5 = b"\x89HDF\r\n\x1a\n"


@dataclasses.dataclass(frozen=True)
class LegacyFile:
    """An open file that tf_keras wrote."""

    path: pathlib.Path
    model_config: dict[str, Any]
    compile_config: dict[str, Any] | None
    """Arguments of `compile`; None if the model was not compiled."""
    weights: h5py.Group
    """Of HDF5: a group for each layer. Of an archive: the whole tree."""
    optimizer: list[h5py.Dataset]
    """Its variables, the number of iterations first; empty if unsaved."""
    is_archive: bool
    scaled_by_default: bool
    """Whether `compile` wrapped the optimizer, which an archive only shows
    by the place of its variables."""


@contextlib.contextmanager
def open_legacy(path: str | os.PathLike[str]) -> Iterator[LegacyFile]:
    """Open a `.h5` or `.keras` file that tf_keras wrote.

    The format is told by the content and not by the name.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is none, damaged, or has weights only.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise ValueError(_wrong(path, _folder(path)))
    with path.open("rb") as opened:
        start = opened.read(len(_HDF5))
    if start.startswith(_ZIP):
        context = _open_archive(path)
    elif start == _HDF5:
        context = _open_hdf5(path)
    else:
        raise ValueError(_wrong(path, _other(start)))
    # The caller's errors are behind: from here on, they are of the content.
    with _damage_as_value_error(path), context as file:
        yield file


def cause(error: BaseException) -> str:
    """An error as a part of a message: its kind and its words, shortened."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)


@contextlib.contextmanager
def _damage_as_value_error(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OF_DAMAGE as error:
        raise ValueError(
            _wrong(
                path,
                "is damaged, or does not fit a class in `custom_objects`: "
                f"{cause(error)}",
            )
        ) from error


def array(dataset: Any, shape: tuple[int, ...] | None, where: str) -> Any:
    """Read one array of numbers.

    Args:
        dataset: What an HDF5 group gave.
        shape: The shape that it must have; None for any.
        where: How errors name it.

    Raises:
        ValueError: If it has another shape, lies outside of the file, or
            holds anything but numbers.
    """
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(
            f"The array of {where} is missing. The file is damaged."
        )
    # Before the data: a shape alone may stand for more than the memory has.
    if shape is not None and tuple(dataset.shape) != tuple(shape):
        raise ValueError(
            f"The array of {where} has the wrong shape. Received: "
            f"{tuple(dataset.shape)}. Allowed: {tuple(shape)}. Check that "
            "custom layers are those of the file."
        )
    if dataset.external or dataset.is_virtual:
        raise ValueError(
            f"The array of {where} lies outside of the file. Received: a "
            "reference to another file. Allowed: arrays in the file itself. "
            "Save the model again."
        )
    if dataset.dtype.kind not in "biuf" and dataset.dtype != _BFLOAT16:
        raise ValueError(
            f"The array of {where} holds no numbers. Received: the dtype "
            f"{dataset.dtype}. Allowed: numbers. Objects are not loaded."
        )
    if dataset.nbytes > _DEFLATE * max(dataset.id.get_storage_size(), 1):
        # Reading would make zeros of what was never written.
        raise ValueError(
            f"The array of {where} was never written. Received: the shape "
            f"{tuple(dataset.shape)} without its numbers. The file is damaged."
        )
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


def member(group: Any, name: str) -> Any:
    """What a group holds under a name; None if nothing, or only a link."""
    link = group.get(name, getlink=True) if name in group else None
    return group[name] if isinstance(link, h5py.HardLink) else None


def names(group: h5py.Group, attribute: str) -> list[str]:
    """A list of names in an attribute, which long ones are split over."""
    parts = [attribute] if attribute in group.attrs else []
    while (more := f"{attribute}{len(parts)}") in group.attrs:
        parts.append(more)
    return [
        name.decode("utf8") if isinstance(name, bytes) else str(name)
        for part in parts
        for name in group.attrs[part]
    ]


_BFLOAT16 = np.dtype("V2")  # how HDF5 returns it
_DEFLATE = 1032  # the most that deflate saves; small arrays may be unwritten


@contextlib.contextmanager
def _open_hdf5(path: pathlib.Path) -> Iterator[LegacyFile]:
    try:
        opened = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(_wrong(path, f"is damaged: {error}")) from error
    with opened as file:
        version = _text(file.attrs.get("keras_version"))
        if "model_config" not in file.attrs:
            raise ValueError(_wrong(path, _without_model(file)))
        _check_version(path, version)
        weights = member(file, "model_weights")
        if weights is None:
            raise ValueError(_wrong(path, "has no weights: it is damaged"))
        training = file.attrs.get("training_config")
        yield LegacyFile(
            path=path,
            model_config=_parse(path, file.attrs["model_config"]),
            compile_config=(
                None
                if training is None
                else _compile_config(_parse(path, training))
            ),
            weights=weights,
            optimizer=_saved_slots(member(file, "optimizer_weights")),
            is_archive=False,
            scaled_by_default=False,
        )


@contextlib.contextmanager
def _open_archive(path: pathlib.Path) -> Iterator[LegacyFile]:
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(path))
            parts = {
                name: archive.read(name)
                for name in (
                    "metadata.json",
                    "config.json",
                    "model.weights.h5",
                )
            }
            tree = stack.enter_context(
                h5py.File(io.BytesIO(parts["model.weights.h5"]), "r")
            )
        except KeyError as error:
            raise ValueError(_wrong(path, f"is no model: {error}")) from error
        except (zipfile.BadZipFile, OSError, EOFError) as error:
            raise ValueError(_wrong(path, f"is damaged: {error}")) from error
        metadata = _parse(path, parts["metadata.json"])
        _check_version(path, metadata.get("keras_version"))
        assets = [n for n in archive.namelist() if n.startswith("assets/")]
        if assets:
            raise ValueError(
                _wrong(path, f"has assets, such as a vocabulary: {assets}")
            )
        config = _parse(path, parts["config.json"])
        slots = member(tree, "optimizer")
        yield LegacyFile(
            path=path,
            model_config=config,
            compile_config=config.pop("compile_config", None),
            weights=tree,
            optimizer=_numbered(member(slots, "vars") if slots else None),
            is_archive=True,
            scaled_by_default=bool(slots) and "inner_optimizer" in slots,
        )


def _compile_config(training: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `compile` in the training config of an HDF5 file."""
    return {
        "optimizer": training.get("optimizer_config"),
        "loss": training.get("loss"),
        "loss_weights": training.get("loss_weights"),
        "metrics": training.get("metrics"),
        "weighted_metrics": training.get("weighted_metrics"),
    }


def _saved_slots(group: h5py.Group | None) -> list[h5py.Dataset]:
    if group is None:
        return []
    return [descend(group, name) for name in names(group, "weight_names")]


def descend(group: Any, name: str) -> Any:
    """What lies under a name with slashes; no step may be a link."""
    for part in name.split("/"):
        group = None if group is None else member(group, part)
    return group


def _numbered(group: h5py.Group | None) -> list[h5py.Dataset]:
    if group is None:
        return []
    return [member(group, str(i)) for i in range(len(group))]


def saved_weights(group: h5py.Group) -> list[tuple[str, Any]]:
    """Names and arrays of one layer of an HDF5 file, in their order."""
    return [
        (name, descend(group, name)) for name in names(group, "weight_names")
    ]


def _parse(path: pathlib.Path, text: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(_text(text) or "")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            _wrong(path, f"is damaged, its JSON too: {error}")
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(_wrong(path, "is damaged: its config is no dict"))
    return parsed


def _text(value: Any) -> str | None:
    return value.decode("utf8") if isinstance(value, bytes) else value


def _check_version(path: pathlib.Path, version: Any) -> None:
    if str(version).startswith("2."):
        return
    if str(version).split(".")[0] in ("0", "1", "None"):
        raise ValueError(
            _wrong(path, f"is older than Keras 2 (version {version})")
        )
    raise ValueError(
        f"This file needs no migration. Received: {os.fspath(path)!r}, "
        f"written by Keras {version}. Allowed: files of Keras 2 and tf_keras. "
        "Load it with keras.saving.load_model."
    )


def _without_model(file: h5py.File) -> str:
    if "layer_names" in file.attrs or "layers" in file or "vars" in file:
        return (
            "has weights only; build the model in Keras 3 and call its "
            "load_weights"
        )
    return "is HDF5, but no model of Keras"


def _folder(path: pathlib.Path) -> str:
    if (path / "saved_model.pb").exists():
        return (
            "is a TensorFlow SavedModel, which holds a program and not a "
            "model of layers; load it with tf_keras and save it as .h5 or "
            ".keras, or use keras.layers.TFSMLayer"
        )
    return "is a folder"


def _other(start: bytes) -> str:
    if start[:1] == b"\x80":
        return "is a pickle, which would run code; it is never loaded"
    return (
        "is neither HDF5 nor an archive, or is damaged"
        if start
        else ("is empty")
    )


def _wrong(path: pathlib.Path, what: str) -> str:
    return (
        f"Cannot load this file. Received: {os.fspath(path)!r}, which "
        f"{what}. Allowed: a model that tf_keras or Keras 2 saved as .h5 or "
        ".keras. Save it again in tf_keras with model.save."
    )
