"""The numbers of an ONNX model, in the file or in one beside it."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from onnx import TensorProto

INLINE_LIMIT = 2**31 - 2**26
"""Bytes of numbers that a model file may hold: protobuf ends at 2 GiB."""

_SMALL = 1024
_ALIGNMENT = 4096  # so that a reader can map each tensor into memory

Array = np.ndarray[Any, Any]


class Initializers:
    """Tensors whose numbers are on disk as soon as they are added.

    So only one of them is ever in memory, however many there are.
    """

    def __init__(self, path: pathlib.Path):
        self.tensors: list[Any] = []
        self._path = path
        self._file = path.open("wb")
        self._places: dict[str, tuple[int, int]] = {}

    def add(self, name: str, data_type: int, array: Array) -> None:
        """Add a tensor: the bytes of the array, as numbers of this type."""
        tensor = TensorProto(name=name, data_type=data_type, dims=array.shape)
        data = np.ascontiguousarray(array)
        if data.nbytes < _SMALL:
            tensor.raw_data = data.tobytes()
        else:
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            self._places[name] = (self._file.tell(), data.nbytes)
            data.tofile(self._file)
        self.tensors.append(tensor)

    def finish(self) -> bool:
        """Take the numbers into the tensors if a model file can hold them.

        Returns:
            Whether they stay in the file, which is then part of the model.
        """
        self._file.close()
        total = sum(size for _, size in self._places.values())
        outside = total > INLINE_LIMIT
        with self._path.open("rb") as file:
            for tensor in self.tensors:
                place = self._places.get(tensor.name)
                if place is not None and outside:
                    _refer(tensor, self._path.name, *place)
                elif place is not None:
                    file.seek(place[0])
                    tensor.raw_data = file.read(place[1])
        if not outside:
            self._path.unlink()
        return outside

    def close(self) -> None:
        """Close the file, finished or not."""
        self._file.close()


def _refer(tensor: Any, location: str, offset: int, length: int) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    places = {"location": location, "offset": offset, "length": length}
    for key, value in places.items():
        tensor.external_data.add(key=key, value=str(value))
