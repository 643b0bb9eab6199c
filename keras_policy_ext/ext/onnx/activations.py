"""Write activation functions: layers, arguments of layers, operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_policy_ext.ext.onnx.graph import Refused, Value
from keras_policy_ext.ext.onnx.registry import Context, layer, operation

_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654


def _operator(kind: str, **attributes: Any) -> Callable[..., Value]:
    """Return a function that applies one ONNX operator to a `Value`."""
    return lambda x: x.op(kind, **attributes)


def _relu(
    x: Value,
    negative_slope: float = 0.0,
    max_value: float | None = None,
    threshold: float = 0.0,
) -> Value:
    if threshold:
        is_above = x > threshold
        below: Value | float = 0.0
        if negative_slope:
            below = (x - threshold) * negative_slope
        y = is_above.where(x, below)
    elif negative_slope:
        y = _leaky_relu(x, negative_slope)
    else:
        y = x.op("Relu")
    return y if max_value is None else y.op("Min", float(max_value))


def _leaky_relu(x: Value, negative_slope: float = 0.2) -> Value:
    return x.op("LeakyRelu", alpha=float(negative_slope))


def _elu(x: Value, alpha: float = 1.0) -> Value:
    return x.op("Elu", alpha=float(alpha))


def _celu(x: Value, alpha: float = 1.0) -> Value:
    return x.op("Celu", alpha=float(alpha))


def _gelu(x: Value, approximate: bool = False) -> Value:
    """Add nodes that compute GELU; opset 19 has no operator `Gelu`."""
    if approximate:
        inner = x + x * x * x * 0.044715
        bent = (inner * _SQRT_2_OVER_PI).op("Tanh")
    else:
        bent = (x * _SQRT_HALF).op("Erf")
    return x * 0.5 * (bent + 1.0)


_hard_sigmoid = _operator("HardSigmoid", alpha=1 / 6, beta=0.5)


def _softmax(kind: str) -> Callable[..., Value]:
    """Return a function that adds a `Softmax` or `LogSoftmax` node."""

    def write(x: Value, axis: Any = -1) -> Value:
        axes = list(axis) if isinstance(axis, (list, tuple)) else [axis]
        if len(axes) != 1:
            raise Refused(f"it has several axes: {axis}", "one axis")
        return x.op(kind, axis=int(axes[0]))

    return write


def _glu(x: Value, axis: int = -1) -> Value:
    """Add nodes that multiply half of an axis by the other half's sigmoid."""
    size = x.size(axis)
    half = size / np.asarray(2)
    at = np.asarray([axis])
    first = x.op("Slice", np.asarray([0]), half, at)
    return first * x.op("Slice", half, size, at).op("Sigmoid")


def _hard_shrink(x: Value, threshold: float = 0.5) -> Value:
    return x.op("Shrink", lambd=float(threshold), bias=0.0)


def _soft_shrink(x: Value, threshold: float = 0.5) -> Value:
    return x.op("Shrink", lambd=float(threshold), bias=float(threshold))


def _sparse_plus(x: Value) -> Value:
    """Add nodes for `sparse_plus`: 0 below -1, `x` above 1, else a parabola."""
    low = (x + 1.0).op("Relu")
    parabola = low * low * 0.25
    return (x < 1.0).where(parabola, x)


def _sparsemax(x: Value, axis: int = -1) -> Value:
    """Add nodes that compute sparsemax as the installed Keras does."""
    size = x.size(axis)
    along = np.asarray(axis)
    largest = x.op("TopK", size, axis=axis, unused=1)
    total = largest.op("CumSum", along)
    ones = x.graph.op("Expand", 1.0, x.op("Shape", dtype="int64"))
    count = ones.op("CumSum", along)
    counts = (largest > (total - 1.0) / count).cast("float32")
    number = counts.reduce("Sum", [axis])
    summed = largest if _sparsemax_is_a_projection() else total
    sums = (summed * counts).reduce("Sum", [axis])
    return (x - (sums - 1.0) / number).op("Relu")


def _sparsemax_is_a_projection() -> bool:
    """Return True if Keras's sparsemax of (1, 0.5) is (0.75, 0.25)."""
    # This is right, since it adds up to 1. Keras up to 3.15 returns (0.25, 0):
    # its threshold comes from a sum of cumulative sums.
    found = keras.ops.sparsemax(np.asarray([1.0, 0.5], "float32"))
    return bool(np.sum(keras.ops.convert_to_numpy(found)) > 0.5)


def _squareplus(x: Value, b: float = 4.0) -> Value:
    root = (x * x + float(b)).op("Sqrt")
    return (x + root) * 0.5


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "celu": _celu,
    "elu": _elu,
    "exponential": _operator("Exp"),
    "gelu": _gelu,
    "glu": _glu,
    "hard_shrink": _hard_shrink,
    "hard_sigmoid": _hard_sigmoid,
    "hard_silu": lambda x: x * _hard_sigmoid(x),
    "hard_tanh": lambda x: x.op("Clip", -1.0, 1.0),
    "leaky_relu": _leaky_relu,
    "linear": lambda x: x,
    "log_sigmoid": lambda x: -((-x).op("Softplus")),
    "log_softmax": _softmax("LogSoftmax"),
    "mish": _operator("Mish"),
    "relu": _relu,
    "relu6": lambda x: _relu(x, max_value=6.0),
    # The constants of ONNX, which it rounds to float32, as Keras does.
    "selu": _operator("Selu"),
    "sigmoid": _operator("Sigmoid"),
    "silu": lambda x: x * x.op("Sigmoid"),
    "soft_shrink": _soft_shrink,
    "softmax": _softmax("Softmax"),
    "softplus": _operator("Softplus"),
    "softsign": _operator("Softsign"),
    "sparse_plus": _sparse_plus,
    "sparse_sigmoid": _operator("HardSigmoid", alpha=0.5, beta=0.5),
    "sparsemax": _sparsemax,
    "squareplus": _squareplus,
    "tanh": _operator("Tanh"),
    "tanh_shrink": lambda x: x - x.op("Tanh"),
}
"""Writers by names in `keras.activations`, with the same arguments."""


def activated(context: Context, activation: Any, x: Value) -> Value:
    """Add the nodes of a layer's activation function.

    Raises:
        Refused: If it cannot be written.
    """
    if activation is None:
        return x
    if isinstance(activation, keras.Layer):
        return context.call(activation, x)
    for name, write in FUNCTIONS.items():
        if activation is getattr(keras.activations, name, None):
            return write(x.cast("float32"))
    name = getattr(activation, "__name__", repr(activation))
    raise Refused(
        f"its activation is {name}",
        f"of keras.activations {', '.join(sorted(FUNCTIONS))}",
    )


@layer("Activation")
def _activation(context: Context, layer: keras.Layer, x: Value) -> Value:
    return activated(context, layer.activation, x)


@layer("ReLU")
def _relu_layer(context: Context, layer: keras.Layer, x: Value) -> Value:
    x = x.cast("float32")
    return _relu(x, layer.negative_slope, layer.max_value, layer.threshold)


@layer("LeakyReLU")
def _leaky_relu_layer(context: Context, layer: keras.Layer, x: Value) -> Value:
    return _leaky_relu(x, layer.negative_slope)


@layer("ELU")
def _elu_layer(context: Context, layer: keras.Layer, x: Value) -> Value:
    return _elu(x, layer.alpha)


@layer("PReLU")
def _prelu(context: Context, layer: keras.Layer, x: Value) -> Value:
    return x.op("PRelu", context.kernels.weight(layer.alpha))


@layer("Softmax")
def _softmax_layer(context: Context, layer: keras.Layer, x: Value) -> Value:
    return FUNCTIONS["softmax"](x, layer.axis)


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
def _function(context: Context, operation: keras.Operation, x: Value) -> Value:
    name, *options = _OPERATIONS[type(operation).__name__]
    given = {option: getattr(operation, option) for option in options}
    return FUNCTIONS[name](x.cast("float32"), **given)


@operation("Threshold")
def _threshold_operation(
    context: Context, operation: keras.Operation, x: Value
) -> Value:
    x = x.cast("float32")
    other = float(operation.default_value)
    return (x > float(operation.threshold)).where(x, other)
