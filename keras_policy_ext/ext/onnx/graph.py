"""An ONNX graph while it is written: nodes, values, initializers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from onnx import TensorProto, helper

from keras_policy_ext.formats import INTEGERS
from keras_policy_ext.stored_kernels import pack

Array = np.ndarray[Any, Any]
Axes = Sequence[int] | Array
Shape = tuple[int | None, ...]

FLOAT8 = {"float8_e4m3fn": "FLOAT8E4M3FN", "float8_e5m2": "FLOAT8E5M2"}
"""The names of the float8 formats in ONNX."""

INLINE_LIMIT = 2**31 - 2**26
"""The most bytes of weights in a model file: protobuf's limit is 2 GiB."""

_SMALL = 1024
_ALIGNMENT = 4096  # so that a reader can map each tensor into memory


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor in an ONNX graph; operators such as `+` on it add nodes.

    Attributes:
        graph: The graph that the nodes are added to.
        name: Its name in the file.
        dtype: The name of its dtype in NumPy.
        shape: The shape in Keras, with None for an unknown axis; None for
            the result of a node inside a layer.
    """

    graph: OnnxGraph = dataclasses.field(repr=False, compare=False)
    name: str
    dtype: str = "float32"
    shape: Shape | None = None

    # An array on the left then leaves its operator to this class.
    __array_ufunc__ = None

    @property
    def rank(self) -> int:
        """The number of axes; 0 if the shape is not known."""
        return len(self.shape or ())

    def op(self, kind: str, *others: Operand, **options: Any) -> Value:
        """Add a node whose first input is this value; return the output."""
        return self.graph.op(kind, self, *others, **options)

    def __add__(self, other: Operand) -> Value:
        return self.op("Add", other)

    def __sub__(self, other: Operand) -> Value:
        return self.op("Sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self.op("Mul", other)

    def __truediv__(self, other: Operand) -> Value:
        """Add a `Div` node; for integers it is an integer division."""
        return self.op("Div", other)

    def __neg__(self) -> Value:
        return self.op("Neg")

    def __gt__(self, other: Value | float) -> Value:
        return self.op("Greater", other, dtype="bool")

    def __lt__(self, other: Value | float) -> Value:
        return self.op("Less", other, dtype="bool")

    def where(self, x: Value | float, y: Value | float) -> Value:
        """Add a node that selects `x` where this value is True, else `y`."""
        dtype = next(z.dtype for z in (x, y) if isinstance(z, Value))
        return self.op("Where", x, y, dtype=dtype)

    def cast(self, dtype: str) -> Value:
        """Return this value in another dtype; add a `Cast` node if needed."""
        if self.dtype == dtype:
            return self
        cast = self.op("Cast", dtype=dtype, to=onnx_type(dtype))
        return dataclasses.replace(cast, shape=self.shape)

    def reduce(self, kind: str, axes: Axes, keepdims: bool = True) -> Value:
        """Add a `ReduceMean`, `ReduceSum`, … node over some axes."""
        over = np.asarray(axes, "int64")
        return self.op(f"Reduce{kind}", over, keepdims=int(keepdims))

    def size(self, axis: int) -> Value:
        """Add a node for the size of an axis at run time: int64, shape (1,)."""
        end = {} if axis == -1 else {"end": axis + 1}
        return self.op("Shape", dtype="int64", start=axis, **end)

    def reshape(self, *sizes: int) -> Value:
        """Add a `Reshape` node; 0 keeps the size of an axis, -1 infers it."""
        return self.op("Reshape", np.asarray(sizes, "int64"))

    def transpose(self, *order: int) -> Value:
        """Return this value with the axes permuted; add a node if needed."""
        if order == tuple(range(len(order))):
            return self
        return self.op("Transpose", perm=list(order))

    def unsqueeze(self, axes: Axes) -> Value:
        """Add a node that inserts axes of size 1."""
        return self.op("Unsqueeze", np.asarray(axes, "int64"))

    def squeeze(self, axes: Axes) -> Value:
        """Add a node that removes axes of size 1."""
        return self.op("Squeeze", np.asarray(axes, "int64"))


Operand = Value | Array | float


class OnnxGraph:
    """The nodes and initializers of an ONNX graph, in order."""

    def __init__(self, initializers: Initializers):
        self.nodes: list[Any] = []
        self._initializers = initializers
        self._names: set[str] = set()
        self._constants: dict[tuple[str, Shape, bytes], Value] = {}
        self._scope = ""

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """In the block, new node names begin with `name` and a slash."""
        before, self._scope = self._scope, f"{name}/"
        try:
            yield
        finally:
            self._scope = before

    def unique(self, name: str) -> str:
        """Return a name that is not used yet, with a number if needed."""
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
        """Add a node to the graph, and return its first output as a `Value`.

        Args:
            kind: The name of the operator.
            operands: Its inputs; numbers and arrays become constants.
            dtype: The dtype of the output; None for that of the first input.
            unused: The number of other outputs.
            **attributes: Its attributes.
        """
        inputs = [self._value(each) for each in operands]
        name = self.unique(f"{self._scope}{kind}")
        names = [each.name for each in inputs]
        outputs = [name, *(f"{name}:{n}" for n in range(unused))]
        node = helper.make_node(kind, names, outputs, name, **attributes)
        self.nodes.append(node)
        return Value(self, name, dtype or inputs[0].dtype)

    def constant(self, array: Any, name: str = "constant") -> Value:
        """Return an array as a `Value`: an initializer, shared if equal."""
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        return self._initializer(array, array.dtype.name, name)

    def values(self, operands: Iterable[Any]) -> list[Value]:
        """Convert constants to `Value`s, floats as float32; keep `Value`s."""
        return [
            each if isinstance(each, Value) else self.constant(_array(each))
            for each in operands
        ]

    def codes(self, codes: Array, format: str, name: str) -> Value:
        """Return codes (uint8) as a `Value` of the dtype of their format."""
        return self._initializer(np.ascontiguousarray(codes), format, name)

    def _initializer(self, array: Array, dtype: str, name: str) -> Value:
        """Return an array as a `Value`; equal arrays share one initializer."""
        digest = hashlib.blake2b(array.data, digest_size=16).digest()
        key = (dtype, array.shape, digest)
        if key not in self._constants:
            value = Value(self, self.unique(f"{self._scope}{name}"), *key[:2])
            data = pack(array, dtype) if dtype in INTEGERS else array
            self._initializers.add(
                value.name, onnx_type(dtype), array.shape, data
            )
            self._constants[key] = value
        return self._constants[key]

    def _value(self, operand: Operand) -> Value:
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, (int, float)):
            operand = np.asarray(operand, "float32")
        return self.constant(operand)


class Initializers:
    """The constant tensors of a graph; at most one large one is in memory."""

    def __init__(self, path: pathlib.Path):
        self.tensors: list[Any] = []
        self._path = path
        self._file = path.open("wb")
        self._places: dict[str, tuple[int, int]] = {}

    def add(
        self, name: str, data_type: int, shape: tuple[int, ...], data: Array
    ) -> None:
        """Add a constant tensor; write large data to the file."""
        tensor = TensorProto(name=name, data_type=data_type, dims=shape)
        data = np.ascontiguousarray(data)
        if data.nbytes < _SMALL:
            tensor.raw_data = data.tobytes()
        else:
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            self._places[name] = (self._file.tell(), data.nbytes)
            data.tofile(self._file)
        self.tensors.append(tensor)

    def finish(self) -> None:
        """Complete the tensors: copy data from the file, or refer to it."""
        self._file.close()
        total = sum(size for _, size in self._places.values())
        # The file then stays, as a part of the model.
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

    def close(self) -> None:
        """Close the file, whether or not `finish` was called."""
        self._file.close()


class Refused(Exception):
    """Raised where a layer cannot be written; `Walk.call` adds its name."""

    def __init__(self, reason: str, allowed: str):
        super().__init__(reason)
        self.reason = reason
        self.allowed = allowed


def onnx_type(dtype: str) -> int:
    """Return ONNX's type number for a dtype or a format of kernels."""
    if dtype == "int4":
        return int(TensorProto.INT4)
    if dtype in FLOAT8:
        return int(getattr(TensorProto, FLOAT8[dtype]))
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _array(constant: Any) -> Array:
    array = np.asarray(keras.ops.convert_to_numpy(constant))
    return array.astype("float32") if array.dtype.kind == "f" else array


def _refer(tensor: Any, location: str, offset: int, length: int) -> None:
    """Set the file, offset and length where the data of a tensor are."""
    tensor.data_location = TensorProto.EXTERNAL
    places = {"location": location, "offset": offset, "length": length}
    for key, value in places.items():
        tensor.external_data.add(key=key, value=str(value))
