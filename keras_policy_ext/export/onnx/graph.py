"""An ONNX graph while it is being written."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from onnx import TensorProto, helper

from keras_policy_ext.export.onnx.initializers import Initializers

Array = np.ndarray[Any, Any]
Shape = tuple[int | None, ...]

FLOAT8 = {"float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2"}
"""The names of the float8 formats in ONNX."""


@dataclasses.dataclass(frozen=True)
class Value:
    """What a node of the graph yields.

    Attributes:
        name: Its name in the file.
        dtype: The name of its dtype in NumPy.
        shape: As Keras knows it, None for an unknown axis; None where nobody
            asked.
    """

    name: str
    dtype: str = "float32"
    shape: Shape | None = None

    @property
    def rank(self) -> int:
        """The number of axes; of what a layer or operation was given."""
        return len(self.shape or ())


Operand = Value | Array | float


class OnnxGraph:
    """Nodes and initializers, in the order in which they are added."""

    def __init__(self, initializers: Initializers):
        self.nodes: list[Any] = []
        self._initializers = initializers
        self._names: set[str] = set()
        self._constants: dict[tuple[str, Shape, bytes], Value] = {}
        self._scope = ""

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Names that are given meanwhile begin with this one."""
        before, self._scope = self._scope, f"{name}/"
        try:
            yield
        finally:
            self._scope = before

    def unique(self, name: str) -> str:
        """A name like this one that nothing in the graph has."""
        found, number = name, 1
        while found in self._names:
            found, number = f"{name}_{number}", number + 1
        self._names.add(found)
        return found

    def op(
        self,
        kind: str,
        *operands: Operand,
        dtype: str | None = None,
        unused: int = 0,
        **attributes: Any,
    ) -> Value:
        """Add a node with one output.

        Args:
            kind: The name of the operator.
            operands: Its inputs; numbers and arrays become constants.
            dtype: Of its output; None for that of the first input.
            unused: How many outputs it has besides.
            **attributes: Its attributes.
        """
        inputs = [self._value(each) for each in operands]
        name = self.unique(f"{self._scope}{kind}")
        names = [each.name for each in inputs]
        outputs = [name, *(f"{name}:{n}" for n in range(unused))]
        node = helper.make_node(kind, names, outputs, name, **attributes)
        self.nodes.append(node)
        return Value(name, dtype or inputs[0].dtype)

    def cast(self, x: Value, dtype: str) -> Value:
        """A value in another dtype; itself if it has it."""
        if x.dtype == dtype:
            return x
        cast = self.op("Cast", x, dtype=dtype, to=onnx_type(dtype))
        return dataclasses.replace(cast, shape=x.shape)

    def constant(self, array: Any, name: str = "constant") -> Value:
        """An initializer; equal ones are there once."""
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        return self._initializer(array, array.dtype.name, name)

    def values(self, operands: Iterable[Any]) -> list[Value]:
        """Operands as values; tensors become constants, floats in float32."""
        return [
            each if isinstance(each, Value) else self.constant(_array(each))
            for each in operands
        ]

    def codes(self, codes: Array, format: str, name: str) -> Value:
        """An initializer of float8 numbers, from their codes in uint8."""
        return self._initializer(np.ascontiguousarray(codes), format, name)

    def _initializer(self, array: Array, dtype: str, name: str) -> Value:
        """A layer that is called twice has its weights in the file once."""
        digest = hashlib.blake2b(array.data, digest_size=16).digest()
        key = (dtype, array.shape, digest)
        if key not in self._constants:
            value = Value(self.unique(f"{self._scope}{name}"), *key[:2])
            self._initializers.add(value.name, onnx_type(dtype), array)
            self._constants[key] = value
        return self._constants[key]

    def reshape(self, x: Value, sizes: tuple[int, ...]) -> Value:
        """The same numbers in another shape; 0 keeps the size of an axis."""
        return self.op("Reshape", x, np.asarray(sizes, "int64"))

    def transpose(self, x: Value, order: tuple[int, ...]) -> Value:
        """The axes in another order."""
        if order == tuple(range(len(order))):
            return x
        return self.op("Transpose", x, perm=list(order))

    def _value(self, operand: Operand) -> Value:
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, (int, float)):
            operand = np.asarray(operand, "float32")
        return self.constant(operand)


def _array(constant: Any) -> Array:
    array = np.asarray(keras.ops.convert_to_numpy(constant))
    return array.astype("float32") if array.dtype.kind == "f" else array


def onnx_type(dtype: str) -> int:
    """The number that ONNX has for a dtype of NumPy or a float8 format."""
    if dtype in FLOAT8:
        return int(getattr(TensorProto, FLOAT8[dtype]))
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
