"""Operations of `keras.ops` in the graph of a Functional model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_policy_ext.export.onnx.graph import Graph, Value
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.export.onnx.registry import Context, operation

_BINARY = {
    "Add": "Add",
    "Divide": "Div",
    "Maximum": "Max",
    "Minimum": "Min",
    "Multiply": "Mul",
    "Power": "Pow",
    "Subtract": "Sub",
    "TrueDivide": "Div",
}

_UNARY = {
    "Abs": "Abs",
    "Absolute": "Abs",
    "Cos": "Cos",
    "Exp": "Exp",
    "Log": "Log",
    "Negative": "Neg",
    "Reciprocal": "Reciprocal",
    "Sin": "Sin",
    "Sqrt": "Sqrt",
}

_REDUCTIONS = {
    "Max": "ReduceMax",
    "Mean": "ReduceMean",
    "Min": "ReduceMin",
    "Sum": "ReduceSum",
}

_FLOATING = ("Div", "Cos", "Exp", "Log", "Reciprocal", "Sin", "Sqrt")

_DTYPES = ("bool", "float32", "int32", "int64")


@operation(*_BINARY)
def _binary(context: Context, operation: Any, x: Any, y: Any) -> Value:
    kind = _BINARY[type(operation).__name__]
    pair = _promoted(context.graph, (x, y), kind in _FLOATING)
    return context.graph.op(kind, *pair)


@operation("Matmul")
def _matmul(context: Context, operation: Any, x: Any, y: Any) -> Value:
    return context.graph.op("MatMul", *_promoted(context.graph, (x, y), True))


@operation("Einsum")
def _einsum(context: Context, operation: Any, *operands: Any) -> Value:
    values = _promoted(context.graph, operands, True)
    equation = operation.subscripts
    if "->" not in equation:
        raise Refused(
            f"its equation {equation!r} does not name its output",
            "an equation with '->'",
        )
    return context.graph.op("Einsum", *values, equation=equation)


@operation(*_UNARY)
def _unary(context: Context, operation: Any, x: Value) -> Value:
    kind = _UNARY[type(operation).__name__]
    if kind in _FLOATING:
        x = context.graph.cast(x, "float32")
    return context.graph.op(kind, x)


@operation("Square")
def _square(context: Context, operation: Any, x: Value) -> Value:
    return context.graph.op("Mul", x, x)


@operation("Rsqrt")
def _rsqrt(context: Context, operation: Any, x: Value) -> Value:
    x = context.graph.cast(x, "float32")
    return context.graph.op("Reciprocal", context.graph.op("Sqrt", x))


@operation(*_REDUCTIONS)
def _reduction(context: Context, operation: Any, x: Value) -> Value:
    if getattr(operation, "initial", None) is not None:
        raise Refused("it has an initial value", "none")
    kind = _REDUCTIONS[type(operation).__name__]
    if kind == "ReduceMean":
        x = context.graph.cast(x, "float32")
    axis = operation.axis
    axes = range(x.rank) if axis is None else np.atleast_1d(axis)
    return context.graph.op(
        kind,
        x,
        np.asarray(axes, "int64"),
        keepdims=int(operation.keepdims),
    )


@operation("Reshape")
def _reshape(context: Context, operation: Any, x: Value) -> Value:
    sizes = operation.newshape
    if not all(
        isinstance(size, (int, np.integer, type(None))) for size in sizes
    ):
        raise Refused(f"its shape {sizes} is not known", "integers")
    return context.graph.reshape(
        x, tuple(-1 if size is None else int(size) for size in sizes)
    )


@operation("Transpose")
def _transpose(context: Context, operation: Any, x: Value) -> Value:
    axes = operation.axes or range(x.rank)[::-1]
    return context.graph.transpose(x, tuple(axis % x.rank for axis in axes))


@operation("ExpandDims")
def _expand_dims(context: Context, operation: Any, x: Value) -> Value:
    axes = np.atleast_1d(operation.axis).astype("int64")
    return context.graph.op("Unsqueeze", x, axes)


@operation("Squeeze")
def _squeeze(context: Context, operation: Any, x: Value) -> Value:
    if operation.axis is None:
        axes = np.flatnonzero([size == 1 for size in x.shape or ()])
    else:
        axes = np.atleast_1d(operation.axis)
    return context.graph.op("Squeeze", x, axes.astype("int64"))


@operation("Concatenate")
def _concatenate(context: Context, operation: Any, values: Any) -> Value:
    same = _promoted(context.graph, values, False)
    return context.graph.op("Concat", *same, axis=operation.axis)


@operation("Clip")
def _clip(context: Context, operation: Any, x: Value) -> Value:
    bounds = (operation.x_min, operation.x_max)
    if not all(isinstance(each, (int, float)) for each in bounds):
        raise Refused("its bounds are tensors", "numbers")
    if any(isinstance(each, float) for each in bounds):
        x = context.graph.cast(x, "float32")
    low, high = (np.asarray(each, x.dtype) for each in bounds)
    return context.graph.op("Clip", x, low, high)


@operation("Cast")
def _cast(context: Context, operation: Any, x: Value) -> Value:
    dtype = operation.dtype
    if dtype not in _DTYPES:
        raise Refused(
            f"it casts to {dtype}, and the file computes in float32",
            ", ".join(_DTYPES),
        )
    return context.graph.cast(x, dtype)


@operation("StopGradient")
def _stop_gradient(context: Context, operation: Any, x: Value) -> Value:
    return x


@operation("GetItem")
def _get_item(context: Context, operation: Any, x: Value, key: Any) -> Value:
    entries = list(key) if isinstance(key, (tuple, list)) else [key]
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        missing = x.rank - len(entries) + 1
        entries[at : at + 1] = [slice(None)] * missing
    if not all(isinstance(each, (int, slice)) for each in entries):
        raise Refused(
            "it takes something else from a tensor", "slices and integers"
        )
    graph = context.graph
    for axis, each in enumerate(entries):
        x = _cut(graph, x, axis, each)
    dropped = [i for i, each in enumerate(entries) if isinstance(each, int)]
    if not dropped:
        return x
    return graph.op("Squeeze", x, np.asarray(dropped, "int64"))


def _cut(graph: Graph, x: Value, axis: int, entry: int | slice) -> Value:
    """A part of one axis, which stays."""
    if entry == slice(None):
        return x
    if isinstance(entry, int):
        end = entry + 1 if entry != -1 else None
        entry = slice(entry, end)
    step = 1 if entry.step is None else entry.step
    far = np.iinfo("int64").max
    start = (0 if step > 0 else far) if entry.start is None else entry.start
    stop = (far if step > 0 else -far) if entry.stop is None else entry.stop
    bounds = (np.asarray([each], "int64") for each in (start, stop, axis, step))
    return graph.op("Slice", x, *bounds)


def _promoted(graph: Graph, operands: Any, floating: bool) -> list[Value]:
    """Operands in one dtype: float32 if one of them, or the result, is."""
    values = [
        each if isinstance(each, Value) else graph.constant(_array(each))
        for each in operands
    ]
    dtypes = {
        each.dtype
        for each, operand in zip(values, operands, strict=True)
        if isinstance(operand, Value) or each.dtype == "float32"
    }
    dtype = dtypes.pop() if len(dtypes) == 1 and not floating else "float32"
    return [graph.cast(each, dtype) for each in values]


def _array(constant: Any) -> Any:
    array = np.asarray(keras.ops.convert_to_numpy(constant))
    return array.astype("float32") if array.dtype.kind == "f" else array
