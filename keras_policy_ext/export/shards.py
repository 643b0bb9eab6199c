"""Several files of tensors, and the index that says what is in which."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence

from keras_policy_ext import _input_files
from keras_policy_ext.export import safetensors_files
from keras_policy_ext.export.safetensors_files import Slot, Tensor

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# transformers asks for a format that it knows.
_METADATA = {"format": "pt"}


def size_of(given: object) -> int:
    """The bytes that `max_shard_size` means.

    Raises:
        ValueError: If it means none.
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


def write(folder: pathlib.Path, tensors: Sequence[Tensor], most: int) -> None:
    """Write tensors in order, into one file or several with an index."""
    parts = _parts(tensors, most)
    if len(parts) == 1:
        safetensors_files.write(folder / FILE, parts[0], _METADATA)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        safetensors_files.write(folder / name, part, _METADATA)
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


def read(folder: pathlib.Path) -> dict[str, Slot]:
    """List the tensors in the files of a folder, by name.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If one is damaged, or the index does not fit.
    """
    index = folder / INDEX
    if not index.is_file():
        return safetensors_files.read(folder / FILE)[0]
    try:
        places = _input_files.json_in(index.read_bytes(), index)["weight_map"]
        names = sorted(set(places.values()))
        # A file of the folder, and no other.
        strange = [n for n in names if pathlib.PurePath(n).name != n]
    except safetensors_files.OF_DAMAGE as error:
        raise _wrong(index, repr(error)) from error
    if strange:
        raise _wrong(index, f"it names {strange[0]!r}")
    files = {name: safetensors_files.read(folder / name)[0] for name in names}
    lacking = [name for name, at in places.items() if name not in files[at]]
    if lacking:
        raise _wrong(index, f"{lacking[0]!r} is in no file")
    return {name: files[at][name] for name, at in places.items()}


def _wrong(index: pathlib.Path, found: str) -> ValueError:
    return ValueError(
        "The index of the files does not fit them. Received: "
        f"{str(index)!r}: {found}. Allowed: a folder as it was written. Copy "
        "it again, or export it again."
    )
