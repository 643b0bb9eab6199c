"""Files in the form `safetensors`, read and written a tensor at a time.

A file is eight bytes with the length of a header, the header in JSON, and the
numbers of one tensor after the other. Nothing in it can be run. The library
of that name writes a whole file from memory, and its NumPy form cannot read
float8.

Source: https://github.com/huggingface/safetensors, `README.md`, "Format".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from keras_policy_ext import _input_files

PathLike = str | os.PathLike[str]
Array = np.ndarray[Any, Any]

DTYPES = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("uint8"),
    "I8": np.dtype("int8"),
    "I16": np.dtype("int16"),
    "U16": np.dtype("uint16"),
    "I32": np.dtype("int32"),
    "U32": np.dtype("uint32"),
    "I64": np.dtype("int64"),
    "U64": np.dtype("uint64"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""The names of dtypes in a header, and what they mean in NumPy."""

_LENGTH = 8
_LARGEST_HEADER = 100_000_000  # bytes, as in the library
_METADATA = "__metadata__"

OF_DAMAGE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading JSON raises that is damaged, or of another kind."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that is still to be computed.

    Attributes:
        name: Its name in the file.
        dtype: One of `DTYPES`.
        shape: Its shape.
        make: Computes it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write(
    path: PathLike, tensors: Sequence[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file; one tensor at a time is in memory.

    Raises:
        OSError: If it cannot be written, such as on a full disk.
        ValueError: If a tensor is not what was said of it.
    """
    with open(path, "wb") as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors:
            file.write(_bytes(tensor).data)
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text


def _bytes(tensor: Tensor) -> Array:
    array = np.asarray(tensor.make())
    dtype = DTYPES[tensor.dtype]
    if array.shape != tensor.shape or array.dtype != dtype:
        raise ValueError(
            f"The tensor {tensor.name!r} is not what its file says. Received: "
            f"{array.dtype} {array.shape}. Allowed: {dtype} {tensor.shape}. "
            "This is a bug; please report it."
        )
    # In the order of its axes, however it lies in memory.
    return array.reshape(-1).view("uint8")


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a tensor is in a file, and how it is read.

    Attributes:
        path: The file.
        dtype: One of `DTYPES`.
        shape: Its shape.
        start: Its first byte in the file.
    """

    path: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self) -> Array:
        """The tensor as a read-only view of the file."""
        dtype = DTYPES[self.dtype]
        if not math.prod(self.shape):
            return np.zeros(self.shape, dtype)
        raw = np.memmap(
            self.path,
            "uint8",
            "r",
            offset=self.start,
            shape=(math.prod(self.shape) * dtype.itemsize,),
        )
        return np.asarray(raw).view(dtype).reshape(self.shape)


def read(path: PathLike) -> tuple[dict[str, Slot], dict[str, str]]:
    """What is in a file: its tensors by name, and its metadata.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, truncated or something else.
    """
    place = pathlib.Path(path)
    size = place.stat().st_size
    with place.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if size < _LENGTH or length > min(size - _LENGTH, _LARGEST_HEADER):
            raise _damaged(place, "it ends within its header")
        text = file.read(length)
    try:
        _input_files.json_in(text, place)
        entries = json.loads(text, object_pairs_hook=_without_doubles)
        metadata = entries.pop(_METADATA, {})
        start = _LENGTH + length
        slots = {
            name: _slot(place, start, entry) for name, entry in entries.items()
        }
    except OF_DAMAGE as error:
        raise _damaged(place, f"its header is not one ({error})") from error
    _check_places(place, slots.values(), start, size)
    return slots, metadata


def _slot(place: pathlib.Path, start: int, entry: Any) -> Slot:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    for number in (begin, end, *shape):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is no size")
    size = math.prod(shape) * DTYPES[entry["dtype"]].itemsize
    if end - begin != size:
        raise ValueError(f"{end - begin} bytes for {size}")
    return Slot(place, entry["dtype"], shape, start + begin)


def _check_places(
    place: pathlib.Path, slots: Iterable[Slot], start: int, size: int
) -> None:
    """Raise unless the tensors fill the file, one after the other."""
    for slot in sorted(slots, key=lambda slot: (slot.start, slot.shape)):
        if slot.start != start:
            raise _damaged(place, "its tensors overlap or leave gaps")
        start += math.prod(slot.shape) * DTYPES[slot.dtype].itemsize
    if start != size:
        raise _damaged(
            place, f"it has {size:,} bytes, and its header tells of {start:,}"
        )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in it twice")
    return found


def _damaged(place: pathlib.Path, found: str) -> ValueError:
    return ValueError(
        "This is no whole safetensors file. Received: "
        f"{str(place)!r}: {found}. Allowed: a file as it was written. Copy it "
        "again, or export it again."
    )
