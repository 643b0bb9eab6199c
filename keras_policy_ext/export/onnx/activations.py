"""Activation functions, as layers, arguments of layers and operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_policy_ext.export.onnx.graph import OnnxGraph, Value
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.export.onnx.registry import Context, layer, operation

_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654


def _operator(kind: str, **attributes: Any) -> Callable[..., Value]:
    """One operator of ONNX."""

    def write(graph: OnnxGraph, x: Value) -> Value:
        return graph.op(kind, x, **attributes)

    return write


def _linear(graph: OnnxGraph, x: Value) -> Value:
    return x


def _relu(
    graph: OnnxGraph,
    x: Value,
    negative_slope: float = 0.0,
    max_value: float | None = None,
    threshold: float = 0.0,
) -> Value:
    if threshold:
        is_above = graph.op("Greater", x, threshold, dtype="bool")
        below: Value | float = 0.0
        if negative_slope:
            excess = graph.op("Sub", x, threshold)
            below = graph.op("Mul", excess, negative_slope)
        y = graph.op("Where", is_above, x, below, dtype="float32")
    elif negative_slope:
        y = graph.op("LeakyRelu", x, alpha=float(negative_slope))
    else:
        y = graph.op("Relu", x)
    return y if max_value is None else graph.op("Min", y, float(max_value))


def _relu6(graph: OnnxGraph, x: Value) -> Value:
    return _relu(graph, x, max_value=6.0)


def _leaky_relu(
    graph: OnnxGraph, x: Value, negative_slope: float = 0.2
) -> Value:
    return graph.op("LeakyRelu", x, alpha=float(negative_slope))


def _elu(graph: OnnxGraph, x: Value, alpha: float = 1.0) -> Value:
    return graph.op("Elu", x, alpha=float(alpha))


def _celu(graph: OnnxGraph, x: Value, alpha: float = 1.0) -> Value:
    return graph.op("Celu", x, alpha=float(alpha))


def _selu(graph: OnnxGraph, x: Value) -> Value:
    # The constants of ONNX, which it rounds to float32, as Keras does.
    return graph.op("Selu", x)


def _silu(graph: OnnxGraph, x: Value) -> Value:
    return graph.op("Mul", x, graph.op("Sigmoid", x))


def _gelu(graph: OnnxGraph, x: Value, approximate: bool = False) -> Value:
    """GELU without the operator `Gelu`, which opset 19 lacks."""
    if approximate:
        cube = graph.op("Mul", graph.op("Mul", x, x), x)
        inner = graph.op("Add", x, graph.op("Mul", cube, 0.044715))
        bent = graph.op("Tanh", graph.op("Mul", inner, _SQRT_2_OVER_PI))
    else:
        bent = graph.op("Erf", graph.op("Mul", x, _SQRT_HALF))
    half = graph.op("Mul", x, 0.5)
    return graph.op("Mul", half, graph.op("Add", bent, 1.0))


def _hard_sigmoid(graph: OnnxGraph, x: Value) -> Value:
    return graph.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)


def _hard_silu(graph: OnnxGraph, x: Value) -> Value:
    return graph.op("Mul", x, _hard_sigmoid(graph, x))


def _hard_tanh(graph: OnnxGraph, x: Value) -> Value:
    return graph.op("Clip", x, -1.0, 1.0)


def _log_sigmoid(graph: OnnxGraph, x: Value) -> Value:
    return graph.op("Neg", graph.op("Softplus", graph.op("Neg", x)))


def _softmax(kind: str) -> Callable[..., Value]:
    def write(graph: OnnxGraph, x: Value, axis: Any = -1) -> Value:
        axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
        if len(axes) != 1:
            raise Refused(f"it has several axes: {axis}", "one axis")
        return graph.op(kind, x, axis=int(axes[0]))

    return write


def _glu(graph: OnnxGraph, x: Value, axis: int = -1) -> Value:
    """The first half of an axis, as far as the second lets it pass."""
    size = _size(graph, x, axis)
    half = graph.op("Div", size, np.asarray(2))
    at = np.asarray([axis])
    first = graph.op("Slice", x, np.asarray([0]), half, at)
    second = graph.op("Slice", x, half, size, at)
    return graph.op("Mul", first, graph.op("Sigmoid", second))


def _hard_shrink(graph: OnnxGraph, x: Value, threshold: float = 0.5) -> Value:
    return graph.op("Shrink", x, lambd=float(threshold), bias=0.0)


def _soft_shrink(graph: OnnxGraph, x: Value, threshold: float = 0.5) -> Value:
    return graph.op("Shrink", x, lambd=float(threshold), bias=float(threshold))


def _sparse_plus(graph: OnnxGraph, x: Value) -> Value:
    """0 below -1, `x` above 1, and a parabola between."""
    low = graph.op("Relu", graph.op("Add", x, 1.0))
    parabola = graph.op("Mul", graph.op("Mul", low, low), 0.25)
    is_below = graph.op("Less", x, 1.0, dtype="bool")
    return graph.op("Where", is_below, parabola, x, dtype="float32")


def _sparse_sigmoid(graph: OnnxGraph, x: Value) -> Value:
    return graph.op("HardSigmoid", x, alpha=0.5, beta=0.5)


def _sparsemax(graph: OnnxGraph, x: Value, axis: int = -1) -> Value:
    """Sparsemax as in the Keras that is installed."""
    size = _size(graph, x, axis)
    along = np.asarray(axis)
    largest = graph.op("TopK", x, size, axis=axis, unused=1)
    total = graph.op("CumSum", largest, along)
    ones = graph.op("Expand", 1.0, graph.op("Shape", x, dtype="int64"))
    count = graph.op("CumSum", ones, along)
    mean = graph.op("Div", graph.op("Sub", total, 1.0), count)
    counts = graph.op("Greater", largest, mean, dtype="bool")
    counts = graph.cast(counts, "float32")
    over = np.asarray([axis])
    number = graph.op("ReduceSum", counts, over, keepdims=1)
    summed = largest if _sparsemax_is_a_projection() else total
    sums = graph.op("Mul", summed, counts)
    sums = graph.op("ReduceSum", sums, over, keepdims=1)
    least = graph.op("Div", graph.op("Sub", sums, 1.0), number)
    return graph.op("Relu", graph.op("Sub", x, least))


def _sparsemax_is_a_projection() -> bool:
    """Return True if sparsemax of (1, 0.5) is (0.75, 0.25), which adds up to 1.

    Keras up to 3.15 finds (0.25, 0): its threshold comes from a sum of
    cumulative sums.
    """
    found = keras.ops.sparsemax(np.asarray([1.0, 0.5], "float32"))
    return bool(np.sum(keras.ops.convert_to_numpy(found)) > 0.5)


def _size(graph: OnnxGraph, x: Value, axis: int) -> Value:
    """The size of an axis, (1,), where no one may know it before."""
    end = {} if axis == -1 else {"end": axis + 1}
    return graph.op("Shape", x, dtype="int64", start=axis, **end)


def _squareplus(graph: OnnxGraph, x: Value, b: float = 4.0) -> Value:
    root = graph.op("Sqrt", graph.op("Add", graph.op("Mul", x, x), float(b)))
    return graph.op("Mul", graph.op("Add", x, root), 0.5)


def _tanh_shrink(graph: OnnxGraph, x: Value) -> Value:
    return graph.op("Sub", x, graph.op("Tanh", x))


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "celu": _celu,
    "elu": _elu,
    "exponential": _operator("Exp"),
    "gelu": _gelu,
    "glu": _glu,
    "hard_shrink": _hard_shrink,
    "hard_sigmoid": _hard_sigmoid,
    "hard_silu": _hard_silu,
    "hard_tanh": _hard_tanh,
    "leaky_relu": _leaky_relu,
    "linear": _linear,
    "log_sigmoid": _log_sigmoid,
    "log_softmax": _softmax("LogSoftmax"),
    "mish": _operator("Mish"),
    "relu": _relu,
    "relu6": _relu6,
    "selu": _selu,
    "sigmoid": _operator("Sigmoid"),
    "silu": _silu,
    "soft_shrink": _soft_shrink,
    "softmax": _softmax("Softmax"),
    "softplus": _operator("Softplus"),
    "softsign": _operator("Softsign"),
    "sparse_plus": _sparse_plus,
    "sparse_sigmoid": _sparse_sigmoid,
    "sparsemax": _sparsemax,
    "squareplus": _squareplus,
    "tanh": _operator("Tanh"),
    "tanh_shrink": _tanh_shrink,
}
"""By their names in `keras.activations`; with its arguments and defaults."""


def activated(context: Context, activation: Any, x: Value) -> Value:
    """What a layer does at its end: `activation(x)`.

    Raises:
        Refused: If there is no way to write it.
    """
    if activation is None:
        return x
    if isinstance(activation, keras.Layer):
        return context.call(activation, x)
    for name, write in FUNCTIONS.items():
        if activation is getattr(keras.activations, name, None):
            return write(context.graph, context.graph.cast(x, "float32"))
    name = getattr(activation, "__name__", repr(activation))
    raise Refused(
        f"its activation is {name}",
        f"of keras.activations {', '.join(sorted(FUNCTIONS))}",
    )


@layer("Activation")
def _activation(context: Context, layer: Any, x: Value) -> Value:
    return activated(context, layer.activation, x)


@layer("ReLU")
def _relu_layer(context: Context, layer: Any, x: Value) -> Value:
    return _relu(
        context.graph,
        context.graph.cast(x, "float32"),
        layer.negative_slope,
        layer.max_value,
        layer.threshold,
    )


@layer("LeakyReLU")
def _leaky_relu_layer(context: Context, layer: Any, x: Value) -> Value:
    return _leaky_relu(context.graph, x, layer.negative_slope)


@layer("ELU")
def _elu_layer(context: Context, layer: Any, x: Value) -> Value:
    return _elu(context.graph, x, layer.alpha)


@layer("PReLU")
def _prelu(context: Context, layer: Any, x: Value) -> Value:
    return context.graph.op("PRelu", x, context.kernels.weight(layer.alpha))


@layer("Softmax")
def _softmax_layer(context: Context, layer: Any, x: Value) -> Value:
    return FUNCTIONS["softmax"](context.graph, x, layer.axis)


_OPERATIONS = {
    "Celu": ("celu", "alpha"),
    "Elu": ("elu", "alpha"),
    "Gelu": ("gelu", "approximate"),
    "Glu": ("glu", "axis"),
    "HardShrink": ("hard_shrink", "threshold"),
    "HardSigmoid": ("hard_sigmoid",),
    "HardSilu": ("hard_silu",),
    "HardTanh": ("hard_tanh",),
    "LeakyRelu": ("leaky_relu", "negative_slope"),
    "LogSigmoid": ("log_sigmoid",),
    "LogSoftmax": ("log_softmax", "axis"),
    "ReLU": ("relu", "negative_slope", "max_value", "threshold"),
    "Relu": ("relu",),
    "Relu6": ("relu6",),
    "Selu": ("selu",),
    "Sigmoid": ("sigmoid",),
    "Silu": ("silu",),
    "SoftShrink": ("soft_shrink", "threshold"),
    "Softmax": ("softmax", "axis"),
    "Softplus": ("softplus",),
    "Softsign": ("softsign",),
    "SparsePlus": ("sparse_plus",),
    "SparseSigmoid": ("sparse_sigmoid",),
    "Sparsemax": ("sparsemax", "axis"),
    "Squareplus": ("squareplus", "b"),
    "Tanh": ("tanh",),
    "TanhShrink": ("tanh_shrink",),
}


@operation(*_OPERATIONS)
def _function(context: Context, operation: Any, x: Value) -> Value:
    name, *options = _OPERATIONS[type(operation).__name__]
    given = {option: getattr(operation, option) for option in options}
    x = context.graph.cast(x, "float32")
    return FUNCTIONS[name](context.graph, x, **given)


@operation("Threshold")
def _threshold_operation(context: Context, operation: Any, x: Value) -> Value:
    graph = context.graph
    x, least = graph.cast(x, "float32"), float(operation.threshold)
    is_above = graph.op("Greater", x, least, dtype="bool")
    other = float(operation.default_value)
    return graph.op("Where", is_above, x, other, dtype="float32")
