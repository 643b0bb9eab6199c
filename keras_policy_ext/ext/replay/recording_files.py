"""The file of a flight recorder: a saved model, the batches since, and why."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
import zipfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext.ext import output_files
from keras_policy_ext.files import input_files

VERSION = 1
"""It rises when older versions of the package would misread a file."""

MODEL, _RECORD, _ARRAY = "model.keras", "record.json", "arrays/{}"

OF_A_STEP = 1024
"""The bytes of a step in the file beside its arrays, at most."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of training.

    Attributes:
        number: Its number, from 1.
        loss: The loss of its batch, before the update.
        batch: The batch, nested NumPy arrays.
    """

    number: int
    loss: float
    batch: Any

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes that it takes in the file, at most."""
        leaves = keras.tree.flatten(self.batch)
        arrays = [x for x in leaves if x is not None]
        return sum(x.nbytes + OF_A_STEP for x in arrays) + OF_A_STEP


@dataclasses.dataclass(frozen=True)
class RandomState:
    """The random state of a model, which no file of the model has.

    Attributes:
        seeds: The states of its seed generators.
        generators: Those of the framework, as `Backend.random_state` has them.
    """

    seeds: tuple[np.ndarray, ...]
    generators: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, model: keras.Model) -> RandomState:
        """Copy the random state of a model, and of this process."""
        seeds = (np.array(ops.convert_to_numpy(v)) for v in _seeds(model))
        return cls(tuple(seeds), tuple(backends.current.random_state()))

    def restore(self, model: keras.Model, with_generators: bool) -> bool:
        """Restore it in a model; return False if that has other seeds."""
        own = _seeds(model)
        if [tuple(v.shape) for v in own] != [x.shape for x in self.seeds]:
            return False
        for variable, x in zip(own, self.seeds, strict=True):
            dtype = keras.backend.standardize_dtype(variable.dtype)
            variable.assign(x.astype(dtype))
        if with_generators and self.generators:
            backends.current.restore_random_state(self.generators)
        return True

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in the file, at most."""
        arrays = (*self.seeds, *self.generators)
        return sum(x.nbytes + OF_A_STEP for x in arrays)


def _seeds(model: keras.Model) -> list[Any]:
    weights = {id(v) for v in model.weights}
    return [v for v in model.variables if id(v) not in weights]


@dataclasses.dataclass(frozen=True)
class Recording:
    """The contents of a file of a flight recorder, without the model.

    Attributes:
        reason: `"nonfinite"` or `"spike"`.
        spike: The factor by which a loss is a spike; None for none.
        earlier: The losses before the first of `steps`, at most 32.
        steps: The steps since the model was saved. The last one is the first
            bad one.
        random: The random state when the model was saved.
        versions: The backend, the device and the versions of what wrote the
            file, as `machine.facts` has them.
    """

    reason: str
    spike: float | None
    earlier: tuple[float, ...]
    steps: tuple[Step, ...]
    random: RandomState
    versions: dict[str, str]


def copied(batch: Any) -> Any:
    """Copy a batch, nested in dicts, lists and tuples, to NumPy arrays.

    Raises:
        TypeError: If it has something else than numbers.
    """
    if batch is None:
        return None
    if isinstance(batch, dict):
        return {str(key): copied(x) for key, x in batch.items()}
    if isinstance(batch, (list, tuple)):
        items = [copied(x) for x in batch]
        return items if isinstance(batch, list) else tuple(items)
    x = np.array(ops.convert_to_numpy(batch) if ops.is_tensor(batch) else batch)
    if x.dtype.kind not in "biuf" and not _is_extension(x.dtype.name):
        raise TypeError(
            "A batch cannot be recorded. Received: "
            f"{x.dtype} (of type {type(batch).__name__}). Allowed: numbers, "
            "as arrays or tensors in tuples, lists and dicts. Turn texts into "
            "numbers before the model."
        )
    return x


def _is_extension(name: str) -> bool:
    """Return True for the dtypes that `ml_dtypes` adds to NumPy's."""
    return name.startswith(("bfloat16", "float8", "int4", "uint4"))


def write(path: pathlib.Path, model: pathlib.Path, found: Recording) -> None:
    """Write a recording; a failure leaves no incomplete file.

    Args:
        path: The file to write.
        model: The `.keras` file of the model.
        found: The rest.
    """
    arrays: list[np.ndarray] = []
    record = {
        "version": VERSION,
        "reason": found.reason,
        "spike": found.spike,
        # As text, since JSON has no word for NaN.
        "earlier": [str(x) for x in found.earlier],
        "steps": [
            {
                "number": step.number,
                "loss": str(step.loss),
                "batch": _packed(step.batch, arrays),
            }
            for step in found.steps
        ],
        "seeds": _packed(found.random.seeds, arrays),
        "generators": _packed(found.random.generators, arrays),
        "versions": found.versions,
    }
    text = json.dumps(record)
    with (
        output_files.whole(path) as part,
        zipfile.ZipFile(part, "w") as archive,
    ):
        archive.writestr(_RECORD, text)
        archive.write(model, MODEL)
        for number, x in enumerate(arrays):
            archive.writestr(_ARRAY.format(number), x.tobytes())


def _packed(batch: Any, arrays: list[np.ndarray]) -> Any:
    """Return a batch as JSON types, and append its arrays to `arrays`."""
    if batch is None:
        return None
    if isinstance(batch, dict):
        return {"dict": {k: _packed(x, arrays) for k, x in batch.items()}}
    if isinstance(batch, (list, tuple)):
        kind = "list" if isinstance(batch, list) else "tuple"
        return {kind: [_packed(x, arrays) for x in batch]}
    arrays.append(batch)
    number, name = len(arrays) - 1, batch.dtype.name
    return {"array": number, "dtype": name, "shape": list(batch.shape)}


def read(path: pathlib.Path, folder: pathlib.Path) -> Recording:
    """Read a recording; its model is then `folder / MODEL`.

    Raises:
        ValueError: If it is no such file, or damaged, or of a newer version.
        OSError: If it cannot be read.
    """
    path.open("rb").close()
    if not zipfile.is_zipfile(path):
        raise ValueError(_no_recording(path))
    with zipfile.ZipFile(path) as archive:
        input_files.check_archive(path, archive)
        if _RECORD not in archive.namelist():
            raise ValueError(_no_recording(path))
        try:
            record = input_files.json_in(archive.read(_RECORD), path)
            if record["version"] > VERSION:
                raise ValueError(
                    f"it has version {record['version']}, and this package "
                    f"reads up to {VERSION}: install a newer one"
                )
            found = Recording(
                str(record["reason"]),
                None if record["spike"] is None else float(record["spike"]),
                tuple(map(float, record["earlier"])),
                tuple(
                    Step(
                        int(step["number"]),
                        float(step["loss"]),
                        _unpacked(step["batch"], archive),
                    )
                    for step in record["steps"]
                ),
                RandomState(
                    tuple(_unpacked(record["seeds"], archive)),
                    tuple(_unpacked(record["generators"], archive)),
                ),
                {str(k): str(v) for k, v in record["versions"].items()},
            )
            if not found.steps:
                raise ValueError("it has no steps")
            with (
                archive.open(MODEL) as source,
                (folder / MODEL).open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            zipfile.BadZipFile,
        ) as error:
            raise input_files.damaged(path, str(error)) from error
    return found


def _no_recording(path: pathlib.Path) -> str:
    return (
        f"This file is no recording. Received: {str(path)!r}. Allowed: the "
        "file that keras_policy_ext.record or callbacks.FlightRecorder wrote. "
        "Pass the path that you gave to them."
    )


def _unpacked(packed: Any, archive: zipfile.ZipFile) -> Any:
    if packed is None:
        return None
    if "dict" in packed:
        items = packed["dict"].items()
        return {key: _unpacked(x, archive) for key, x in items}
    if "list" in packed:
        return [_unpacked(x, archive) for x in packed["list"]]
    if "tuple" in packed:
        return tuple(_unpacked(x, archive) for x in packed["tuple"])
    dtype = np.dtype(str(packed["dtype"]))
    if dtype.kind not in "biuf" and not _is_extension(dtype.name):
        raise ValueError(f"it has an array of {dtype}")
    numbers = archive.read(_ARRAY.format(int(packed["array"])))
    shape: Sequence[int] = packed["shape"]
    # A copy, since what shares the bytes cannot be written.
    return np.frombuffer(numbers, dtype).reshape(shape).copy()
