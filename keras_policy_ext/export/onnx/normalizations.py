"""Layers that normalize or rescale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_policy_ext.export.onnx.graph import OnnxGraph, Value
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.export.onnx.registry import Context, layer

Array = np.ndarray[Any, Any]


@layer("BatchNormalization")
def _batch_normalization(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    read = context.kernels.weight
    along = [1] * x.rank
    along[layer.axis] = -1
    mean, variance = (
        read(each).reshape(along)
        for each in (layer.moving_mean, layer.moving_variance)
    )
    factor = 1 / np.sqrt(variance + np.float32(layer.epsilon))
    if layer.scale:
        factor = factor * read(layer.gamma).reshape(along)
    y = graph.op("Sub", graph.cast(x, "float32"), mean)
    y = graph.op("Mul", y, factor.astype("float32"))
    if not layer.center:
        return y
    return graph.op("Add", y, read(layer.beta).reshape(along))


@layer("LayerNormalization")
def _layer_normalization(context: Context, layer: Any, x: Value) -> Value:
    if getattr(layer, "rms_scaling", False):
        raise Refused("it has rms_scaling=True", "RMSNormalization")
    graph = context.graph
    axes = _axes(layer.axis, x.rank)
    x = graph.cast(x, "float32")
    mean = graph.op("ReduceMean", x, axes, keepdims=1)
    y = _of_unit_size(graph, graph.op("Sub", x, mean), axes, layer.epsilon)
    if layer.scale:
        y = graph.op("Mul", y, _along(context, layer.gamma, axes, x.rank))
    if layer.center:
        y = graph.op("Add", y, _along(context, layer.beta, axes, x.rank))
    return y


@layer("RMSNormalization")
def _rms_normalization(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    axes = _axes(layer.axis, x.rank)
    y = _of_unit_size(graph, graph.cast(x, "float32"), axes, layer.epsilon)
    return graph.op("Mul", y, _along(context, layer.scale, axes, x.rank))


@layer("GroupNormalization")
def _group_normalization(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    rank, axis, groups = x.rank, layer.axis % x.rank, layer.groups
    channels = (x.shape or ())[axis]
    last = [each for each in range(rank) if each != axis] + [axis]
    x = graph.transpose(graph.cast(x, "float32"), tuple(last))
    x = graph.reshape(x, (*[0] * (rank - 1), groups, channels // groups))
    axes = np.asarray([*range(1, rank - 1), rank], "int64")
    mean = graph.op("ReduceMean", x, axes, keepdims=1)
    y = _of_unit_size(graph, graph.op("Sub", x, mean), axes, layer.epsilon)
    y = graph.reshape(y, (*[0] * (rank - 1), channels))
    if layer.scale:
        y = graph.op("Mul", y, context.kernels.weight(layer.gamma))
    if layer.center:
        y = graph.op("Add", y, context.kernels.weight(layer.beta))
    return graph.transpose(y, tuple(np.argsort(last)))


@layer("UnitNormalization")
def _unit_normalization(context: Context, layer: Any, x: Value) -> Value:
    return of_length_one(context.graph, x, _axes(layer.axis, x.rank))


@layer("Normalization")
def _normalization(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    mean, variance = (
        np.asarray(keras.ops.convert_to_numpy(each), "float32")
        for each in (layer.mean, layer.variance)
    )
    size = np.maximum(np.sqrt(variance), np.float32(keras.config.epsilon()))
    x = graph.cast(x, "float32")
    if layer.invert:
        return graph.op("Add", graph.op("Mul", x, size), mean)
    return graph.op("Div", graph.op("Sub", x, mean), size)


@layer("Rescaling")
def _rescaling(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    scale, offset = (
        np.asarray(each, "float32") for each in (layer.scale, layer.offset)
    )
    if scale.ndim and keras.config.image_data_format() == "channels_first":
        raise Refused(
            "it has a scale for each channel, and channels come first",
            "one scale, or channels last",
        )
    y = graph.op("Mul", graph.cast(x, "float32"), scale)
    return graph.op("Add", y, offset)


def of_length_one(
    graph: OnnxGraph,
    x: Value,
    axes: Sequence[int] | Array,
    epsilon: float = 1e-12,
) -> Value:
    """`x / sqrt(sum(x²))`; where that is near zero, `x / epsilon`."""
    x = graph.cast(x, "float32")
    over = np.asarray(axes, "int64")
    square = graph.op("ReduceSum", graph.op("Mul", x, x), over, keepdims=1)
    factor = graph.op("Reciprocal", graph.op("Sqrt", square))
    return graph.op("Mul", x, graph.op("Min", factor, 1 / epsilon))


def _of_unit_size(
    graph: OnnxGraph, x: Value, axes: Array, epsilon: float
) -> Value:
    """`x / sqrt(mean(x²) + epsilon)`."""
    square = graph.op("ReduceMean", graph.op("Mul", x, x), axes, keepdims=1)
    size = graph.op("Sqrt", graph.op("Add", square, float(epsilon)))
    return graph.op("Div", x, size)


def _axes(axis: Any, rank: int) -> Array:
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return np.sort(np.asarray(axes, "int64") % rank)


def _along(context: Context, weight: Any, axes: Array, rank: int) -> Array:
    """A weight whose axes are these, with axes of size 1 between them."""
    values = context.kernels.weight(weight)
    sizes = [1] * rank
    for axis, size in zip(axes, values.shape, strict=True):
        sizes[axis] = size
    return values.reshape(sizes)
