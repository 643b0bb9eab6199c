"""Operations of `keras.ops` in the graph of a Functional model."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from keras_policy_ext.export.onnx.graph import OnnxGraph, Value
from keras_policy_ext.export.onnx.normalizations import of_length_one
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
    "Amax": "ReduceMax",
    "Amin": "ReduceMin",
    "Logsumexp": "ReduceLogSumExp",
    "Max": "ReduceMax",
    "Mean": "ReduceMean",
    "Min": "ReduceMin",
    "Prod": "ReduceProd",
    "Sum": "ReduceSum",
}

_DTYPES = ("bool", "float32", "int32", "int64")


@operation(*_BINARY)
def _binary(context: Context, operation: Any, x: Any, y: Any) -> Value:
    kind = _BINARY[type(operation).__name__]
    pair = _promoted(context.graph, (x, y), kind == "Div")
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


@operation(*_COMPARISONS)
def _comparison(context: Context, operation: Any, x: Any, y: Any) -> Value:
    kind = _COMPARISONS[type(operation).__name__]
    pair = _promoted(context.graph, (x, y), False)
    return context.graph.op(kind, *pair, dtype="bool")


@operation("NotEqual")
def _not_equal(context: Context, operation: Any, x: Any, y: Any) -> Value:
    pair = _promoted(context.graph, (x, y), False)
    equal = context.graph.op("Equal", *pair, dtype="bool")
    return context.graph.op("Not", equal)


@operation(*_LOGICAL)
def _logical(context: Context, operation: Any, *operands: Value) -> Value:
    kind = _LOGICAL[type(operation).__name__]
    flags = [context.graph.cast(each, "bool") for each in operands]
    return context.graph.op(kind, *flags)


@operation("Where")
def _where(
    context: Context, operation: Any, test: Any, x: Any, y: Any
) -> Value:
    pair = _promoted(context.graph, (x, y), False)
    test = context.graph.cast(test, "bool")
    return context.graph.op("Where", test, *pair, dtype=pair[0].dtype)


@operation(*_UNARY)
def _unary(context: Context, operation: Any, x: Value) -> Value:
    return context.graph.op(_UNARY[type(operation).__name__], x)


@operation(*_FLOATING)
def _floating(context: Context, operation: Any, x: Value) -> Value:
    x = context.graph.cast(x, "float32")
    return context.graph.op(_FLOATING[type(operation).__name__], x)


@operation("Expm1")
def _expm1(context: Context, operation: Any, x: Value) -> Value:
    x = context.graph.cast(x, "float32")
    return context.graph.op("Sub", context.graph.op("Exp", x), 1.0)


_LOGARITHMS = {"Log2": 1 / math.log(2), "Log10": 1 / math.log(10)}


@operation(*_LOGARITHMS)
def _logarithm(context: Context, operation: Any, x: Value) -> Value:
    logarithm = context.graph.op("Log", context.graph.cast(x, "float32"))
    factor = _LOGARITHMS[type(operation).__name__]
    return context.graph.op("Mul", logarithm, factor)


@operation("Log1p")
def _log1p(context: Context, operation: Any, x: Value) -> Value:
    x = context.graph.cast(x, "float32")
    return context.graph.op("Log", context.graph.op("Add", x, 1.0))


@operation("Round")
def _round(context: Context, operation: Any, x: Value) -> Value:
    if operation.decimals:
        raise Refused(f"it has decimals={operation.decimals}", "0")
    return context.graph.op("Round", context.graph.cast(x, "float32"))


@operation("Var", "Std")
def _spread(context: Context, operation: Any, x: Value) -> Value:
    graph = context.graph
    x = graph.cast(x, "float32")
    axes = _reduced(operation, x)
    from_mean = graph.op("Sub", x, graph.op("ReduceMean", x, axes, keepdims=1))
    square = graph.op("Mul", from_mean, from_mean)
    keepdims = int(operation.keepdims)
    y = graph.op("ReduceMean", square, axes, keepdims=keepdims)
    return y if type(operation).__name__ == "Var" else graph.op("Sqrt", y)


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
    if kind in ("ReduceMean", "ReduceLogSumExp"):
        x = context.graph.cast(x, "float32")
    if getattr(operation, "dtype", None) not in (None, x.dtype):
        raise Refused(f"its dtype is {operation.dtype}", "that of its input")
    keepdims = int(operation.keepdims)
    return context.graph.op(kind, x, _reduced(operation, x), keepdims=keepdims)


def _reduced(operation: Any, x: Value) -> Any:
    """The axes of an operation that sums, or the like; None for all."""
    axis = operation.axis
    axes = range(x.rank) if axis is None else np.atleast_1d(axis)
    return np.asarray(axes, "int64")


@operation("Stack")
def _stack(context: Context, operation: Any, values: Any) -> Value:
    graph, axis = context.graph, np.asarray([operation.axis])
    rows = [
        graph.op("Unsqueeze", each, axis)
        for each in _promoted(graph, values, False)
    ]
    return graph.op("Concat", *rows, axis=operation.axis)


@operation("Swapaxes")
def _swap(context: Context, operation: Any, x: Value) -> Value:
    order = [*range(x.rank)]
    a, b = operation.axis1, operation.axis2
    order[a], order[b] = order[b], order[a]
    return context.graph.transpose(x, tuple(order))


@operation("Normalize")
def _normalize(context: Context, operation: Any, x: Value) -> Value:
    if operation.order != 2:
        raise Refused(f"its order is {operation.order}", "2")
    epsilon = operation.epsilon or keras.config.epsilon()
    return of_length_one(
        context.graph, x, _reduced(operation, x), float(epsilon)
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


def _cut(graph: OnnxGraph, x: Value, axis: int, entry: int | slice) -> Value:
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


def _promoted(graph: OnnxGraph, operands: Any, floating: bool) -> list[Value]:
    """Operands in one dtype: float32 if one of them, or the result, is."""
    values = graph.values(operands)
    dtypes = {
        each.dtype
        for each, operand in zip(values, operands, strict=True)
        if isinstance(operand, Value) or each.dtype == "float32"
    }
    dtype = dtypes.pop() if len(dtypes) == 1 and not floating else "float32"
    return [graph.cast(each, dtype) for each in values]
