"""Read and write safetensors files and shards, one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from keras_policy_ext.files.input_files import json_in
from keras_policy_ext.stored_kernels import StoredKernel

Array = np.ndarray[Any, Any]


class OneAtATime:
    """A kernel that is quantized only when it is written, then released.

    Its scales are kept, because they are written next.

    Args:
        make: Makes the kernel.
    """

    def __init__(self, make: Callable[[], StoredKernel]) -> None:
        self._make = make
        self._kept: Array | None = None

    def kernel(self) -> StoredKernel:
        """Quantize and return the kernel; only the scales stay in memory."""
        stored = self._make()
        self._kept = np.array(stored.scale)
        return stored

    def scales(self) -> Array:
        """Return the scales of the kernel, and release them."""
        if self._kept is None:
            self.kernel()
        kept, self._kept = self._kept, None
        return np.asarray(kept)


FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# transformers asks for a format that it knows.
_OF_TORCH = {"format": "pt"}


def size_of(given: object) -> int:
    """Convert `max_shard_size`, such as "5GB", to a number of bytes.

    Raises:
        ValueError: If it is not a size.
    """
    text = str(given).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if isinstance(given, bool) or size < 1:
        raise ValueError(
            "`max_shard_size` is not a size of a file. Received: "
            f"max_shard_size={given!r}. Allowed: a number of bytes, or a text "
            "such as '5GB' or '500MB'. Pass one of them."
        )
    return size


def write_shards(
    folder: pathlib.Path, tensors: Sequence[Tensor], most: int
) -> None:
    """Write tensors to one safetensors file, or to several with an index."""
    parts = _parts(tensors, most)
    if len(parts) == 1:
        write(folder / FILE, parts[0], _OF_TORCH)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write(folder / name, part, _OF_TORCH)
        places.update({tensor.name: name for tensor in part})
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf8")


def _parts(tensors: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    parts: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.nbytes > most:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts


def read_folder(folder: pathlib.Path) -> dict[str, Slot]:
    """Return the position of each tensor in a folder's files, by name.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If one is damaged, or the index does not fit.
    """
    index = folder / INDEX
    if not index.is_file():
        return read(folder / FILE)[0]
    try:
        places = json_in(index.read_bytes(), index)["weight_map"]
        names = sorted(set(places.values()))
        # A file of the folder, and no other.
        strange = [n for n in names if pathlib.PurePath(n).name != n]
    except OF_DAMAGE as error:
        raise _wrong(index, repr(error)) from error
    if strange:
        raise _wrong(index, f"it names {strange[0]!r}")
    files = {name: read(folder / name)[0] for name in names}
    lacking = [name for name, at in places.items() if name not in files[at]]
    if lacking:
        raise _wrong(index, f"{lacking[0]!r} is in no file")
    return {name: files[at][name] for name, at in places.items()}


def _wrong(index: pathlib.Path, found: str) -> ValueError:
    return ValueError(
        "The index of this folder does not match its weight files. Received: "
        f"{str(index)!r}: {found}. Allowed: the folder as it was written. Copy "
        "it again, or export it again."
    )


PathLike = str | os.PathLike[str]

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
"""NumPy dtypes by their names in a header."""

CODES = {str(dtype): name for name, dtype in DTYPES.items()}

_LENGTH = 8
_LARGEST_HEADER = 100_000_000  # bytes, as in the library
_METADATA = "__metadata__"

OF_DAMAGE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors from reading JSON that is damaged or of another kind."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write, whose values are computed only when it is written.

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
        """The bytes that the tensor takes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write(
    path: PathLike, tensors: Sequence[Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors to a safetensors file, with one at a time in memory.

    Raises:
        OSError: If it cannot be written, such as on a full disk.
        ValueError: If a tensor has another dtype or shape than declared.
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
            f"The tensor {tensor.name!r} does not match the header of its "
            f"file. Received: {array.dtype} {array.shape}. Allowed: {dtype} "
            f"{tensor.shape}. This is a bug; please report it."
        )
    # In the order of its axes, however it lies in memory.
    return array.reshape(-1).view("uint8")


@dataclasses.dataclass(frozen=True)
class Slot:
    """The file, position, dtype and shape of a tensor in a safetensors file.

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
        """Return the tensor as an array that maps the file, read-only."""
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
    """Return ({name: position of the tensor}, metadata) of a file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, truncated or of another format.
    """
    place = pathlib.Path(path)
    size = place.stat().st_size
    with place.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if size < _LENGTH or length > min(size - _LENGTH, _LARGEST_HEADER):
            raise _damaged(place, "it ends within its header")
        text = file.read(length)
    try:
        json_in(text, place)
        entries = json.loads(text, object_pairs_hook=_without_doubles)
        metadata = entries.pop(_METADATA, {})
        start = _LENGTH + length
        slots = {
            name: _slot(place, start, entry) for name, entry in entries.items()
        }
    except OF_DAMAGE as error:
        raise _damaged(place, f"its header cannot be read ({error})") from error
    _check_places(place, slots.values(), start, size)
    return slots, metadata


def _slot(place: pathlib.Path, start: int, entry: Any) -> Slot:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    for number in (begin, end, *shape):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is not a valid size or offset")
    size = math.prod(shape) * DTYPES[entry["dtype"]].itemsize
    if end - begin != size:
        raise ValueError(
            f"a tensor has {end - begin} bytes, but its shape and dtype need "
            f"{size}"
        )
    return Slot(place, entry["dtype"], shape, start + begin)


def _check_places(
    place: pathlib.Path, slots: Iterable[Slot], start: int, size: int
) -> None:
    """Raise if tensors in a file overlap, leave gaps, or exceed its size."""
    for slot in sorted(slots, key=lambda slot: (slot.start, slot.shape)):
        if slot.start != start:
            raise _damaged(place, "its tensors overlap or leave gaps")
        start += math.prod(slot.shape) * DTYPES[slot.dtype].itemsize
    if start != size:
        raise _damaged(
            place, f"it has {size:,} bytes, but its header describes {start:,}"
        )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in the header twice")
    return found


def _damaged(place: pathlib.Path, found: str) -> ValueError:
    return ValueError(
        "This safetensors file is damaged or incomplete. Received: "
        f"{str(place)!r}: {found}. Allowed: the file as it was written. Copy "
        "it again, or export it again."
    )
