"""Write operations of `keras.ops` in the graph of a Functional model."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from keras_policy_ext.ext.onnx.graph import OnnxGraph, Refused, Value
from keras_policy_ext.ext.onnx.layers import of_length_one
from keras_policy_ext.ext.onnx.registry import Context, operation

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

_UNARY = {"Abs": "Abs", "Absolute": "Abs", "Negative": "Neg", "Sign": "Sign"}

_FLOATING = {
    "Arccos": "Acos",
    "Arccosh": "Acosh",
    "Arcsin": "Asin",
    "Arcsinh": "Asinh",
    "Arctan": "Atan",
    "Arctanh": "Atanh",
    "Ceil": "Ceil",
    "Cos": "Cos",
    "Cosh": "Cosh",
    "Erf": "Erf",
    "Exp": "Exp",
    "Floor": "Floor",
    "Log": "Log",
    "Reciprocal": "Reciprocal",
    "Sin": "Sin",
    "Sinh": "Sinh",
    "Sqrt": "Sqrt",
    "Tan": "Tan",
}

_COMPARISONS = {
    "Equal": "Equal",
    "Greater": "Greater",
    "GreaterEqual": "GreaterOrEqual",
    "Less": "Less",
    "LessEqual": "LessOrEqual",
}

_LOGICAL = {
    "LogicalAnd": "And",
    "LogicalNot": "Not",
    "LogicalOr": "Or",
    "LogicalXor": "Xor",
}

_REDUCTIONS = {
    "Amax": "Max",
    "Amin": "Min",
    "Logsumexp": "LogSumExp",
    "Max": "Max",
    "Mean": "Mean",
    "Min": "Min",
    "Prod": "Prod",
    "Sum": "Sum",
}

_DTYPES = ("bool", "float32", "int32", "int64")


@operation(*_BINARY)
def _binary(
    context: Context, operation: keras.Operation, x: Any, y: Any
) -> Value:
    kind = _BINARY[type(operation).__name__]
    x, y = _promoted(context.graph, (x, y), kind == "Div")
    return context.graph.op(kind, x, y)


@operation("Matmul")
def _matmul(
    context: Context, operation: keras.Operation, x: Any, y: Any
) -> Value:
    return context.graph.op("MatMul", *_promoted(context.graph, (x, y), True))


@operation("Einsum")
def _einsum(
    context: Context, operation: keras.Operation, *operands: Any
) -> Value:
    values = _promoted(context.graph, operands, True)
    equation = operation.subscripts
    if "->" not in equation:
        raise Refused(
            f"its equation {equation!r} does not name its output",
            "an equation with '->'",
        )
    return context.graph.op("Einsum", *values, equation=equation)


@operation(*_COMPARISONS)
def _comparison(
    context: Context, operation: keras.Operation, x: Any, y: Any
) -> Value:
    kind = _COMPARISONS[type(operation).__name__]
    pair = _promoted(context.graph, (x, y), False)
    return context.graph.op(kind, *pair, dtype="bool")


@operation("NotEqual")
def _not_equal(
    context: Context, operation: keras.Operation, x: Any, y: Any
) -> Value:
    pair = _promoted(context.graph, (x, y), False)
    return context.graph.op("Equal", *pair, dtype="bool").op("Not")


@operation(*_LOGICAL)
def _logical(
    context: Context, operation: keras.Operation, *operands: Value
) -> Value:
    kind = _LOGICAL[type(operation).__name__]
    return context.graph.op(kind, *(each.cast("bool") for each in operands))


@operation("Where")
def _where(
    context: Context, operation: keras.Operation, test: Any, x: Any, y: Any
) -> Value:
    x, y = _promoted(context.graph, (x, y), False)
    return test.cast("bool").where(x, y)


@operation(*_UNARY)
def _unary(context: Context, operation: keras.Operation, x: Value) -> Value:
    return x.op(_UNARY[type(operation).__name__])


@operation(*_FLOATING)
def _floating(context: Context, operation: keras.Operation, x: Value) -> Value:
    return x.cast("float32").op(_FLOATING[type(operation).__name__])


@operation("Expm1")
def _expm1(context: Context, operation: keras.Operation, x: Value) -> Value:
    return x.cast("float32").op("Exp") - 1.0


_LOGARITHMS = {"Log2": 1 / math.log(2), "Log10": 1 / math.log(10)}


@operation(*_LOGARITHMS)
def _logarithm(context: Context, operation: keras.Operation, x: Value) -> Value:
    factor = _LOGARITHMS[type(operation).__name__]
    return x.cast("float32").op("Log") * factor


@operation("Log1p")
def _log1p(context: Context, operation: keras.Operation, x: Value) -> Value:
    return (x.cast("float32") + 1.0).op("Log")


@operation("Round")
def _round(context: Context, operation: keras.Operation, x: Value) -> Value:
    if operation.decimals:
        raise Refused(f"it has decimals={operation.decimals}", "0")
    return x.cast("float32").op("Round")


@operation("Var", "Std")
def _spread(context: Context, operation: keras.Operation, x: Value) -> Value:
    axes = _reduced_axes(operation, x)
    x = x.cast("float32")
    from_mean = x - x.reduce("Mean", axes)
    square = from_mean * from_mean
    y = square.reduce("Mean", axes, operation.keepdims)
    return y if type(operation).__name__ == "Var" else y.op("Sqrt")


@operation("Square")
def _square(context: Context, operation: keras.Operation, x: Value) -> Value:
    return x * x


@operation("Rsqrt")
def _rsqrt(context: Context, operation: keras.Operation, x: Value) -> Value:
    return x.cast("float32").op("Sqrt").op("Reciprocal")


@operation(*_REDUCTIONS)
def _reduction(context: Context, operation: keras.Operation, x: Value) -> Value:
    if getattr(operation, "initial", None) is not None:
        raise Refused("it has an initial value", "none")
    kind = _REDUCTIONS[type(operation).__name__]
    if kind in ("Mean", "LogSumExp"):
        x = x.cast("float32")
    if getattr(operation, "dtype", None) not in (None, x.dtype):
        raise Refused(f"its dtype is {operation.dtype}", "that of its input")
    return x.reduce(kind, _reduced_axes(operation, x), operation.keepdims)


def _reduced_axes(operation: keras.Operation, x: Value) -> Any:
    """Return the axes over which an operation reduces `x`."""
    axis = operation.axis
    return range(x.rank) if axis is None else np.atleast_1d(axis)


@operation("Stack")
def _stack(context: Context, operation: keras.Operation, values: Any) -> Value:
    graph, axis = context.graph, operation.axis
    values = _promoted(graph, values, False)
    rows = [each.unsqueeze([axis]) for each in values]
    return graph.op("Concat", *rows, axis=axis)


@operation("Swapaxes")
def _swap(context: Context, operation: keras.Operation, x: Value) -> Value:
    order = [*range(x.rank)]
    a, b = operation.axis1, operation.axis2
    order[a], order[b] = order[b], order[a]
    return x.transpose(*order)


@operation("Normalize")
def _normalize(context: Context, operation: keras.Operation, x: Value) -> Value:
    if operation.order != 2:
        raise Refused(f"its order is {operation.order}", "2")
    epsilon = operation.epsilon or keras.config.epsilon()
    return of_length_one(x, _reduced_axes(operation, x), float(epsilon))


@operation("Reshape")
def _reshape(context: Context, operation: keras.Operation, x: Value) -> Value:
    sizes = operation.newshape
    if not all(
        isinstance(size, (int, np.integer, type(None))) for size in sizes
    ):
        raise Refused(f"its shape {sizes} is not known", "integers")
    return x.reshape(*(-1 if size is None else int(size) for size in sizes))


@operation("Transpose")
def _transpose(context: Context, operation: keras.Operation, x: Value) -> Value:
    axes = operation.axes or range(x.rank)[::-1]
    return x.transpose(*(axis % x.rank for axis in axes))


@operation("ExpandDims")
def _expand_dims(
    context: Context, operation: keras.Operation, x: Value
) -> Value:
    return x.unsqueeze(np.atleast_1d(operation.axis))


@operation("Squeeze")
def _squeeze(context: Context, operation: keras.Operation, x: Value) -> Value:
    if operation.axis is None:
        ones = [i for i, size in enumerate(x.shape or ()) if size == 1]
        return x.squeeze(ones)
    return x.squeeze(np.atleast_1d(operation.axis))


@operation("Concatenate")
def _concatenate(
    context: Context, operation: keras.Operation, values: Any
) -> Value:
    same = _promoted(context.graph, values, False)
    return context.graph.op("Concat", *same, axis=operation.axis)


@operation("Clip")
def _clip(context: Context, operation: keras.Operation, x: Value) -> Value:
    bounds = (operation.x_min, operation.x_max)
    if not all(isinstance(each, (int, float)) for each in bounds):
        raise Refused("its bounds are tensors", "numbers")
    if any(isinstance(each, float) for each in bounds):
        x = x.cast("float32")
    return x.op("Clip", *(np.asarray(each, x.dtype) for each in bounds))


@operation("Cast")
def _cast(context: Context, operation: keras.Operation, x: Value) -> Value:
    dtype = operation.dtype
    if dtype not in _DTYPES:
        raise Refused(
            f"it casts to {dtype}, and the file computes in float32",
            ", ".join(_DTYPES),
        )
    return x.cast(dtype)


@operation("StopGradient")
def _stop_gradient(
    context: Context, operation: keras.Operation, x: Value
) -> Value:
    return x


@operation("GetItem")
def _get_item(
    context: Context, operation: keras.Operation, x: Value, key: Any
) -> Value:
    entries = list(key) if isinstance(key, (tuple, list)) else [key]
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        missing = x.rank - len(entries) + 1
        entries[at : at + 1] = [slice(None)] * missing
    if not all(isinstance(each, (int, slice)) for each in entries):
        raise Refused(
            "it takes something else from a tensor", "slices and integers"
        )
    for axis, each in enumerate(entries):
        x = _cut(x, axis, each)
    dropped = [i for i, each in enumerate(entries) if isinstance(each, int)]
    return x.squeeze(dropped) if dropped else x


def _cut(x: Value, axis: int, entry: int | slice) -> Value:
    """Add a node that slices one axis; an integer index keeps the axis."""
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
    return x.op("Slice", *bounds)


def _promoted(graph: OnnxGraph, operands: Any, floating: bool) -> list[Value]:
    """Convert to one dtype: float32 with `floating` or if operands differ."""
    values = graph.values(operands)
    dtypes = {
        each.dtype
        for each, operand in zip(values, operands, strict=True)
        if isinstance(operand, Value) or each.dtype == "float32"
    }
    dtype = dtypes.pop() if len(dtypes) == 1 and not floating else "float32"
    return [each.cast(dtype) for each in values]
