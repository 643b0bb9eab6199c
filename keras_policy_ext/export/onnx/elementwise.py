"""Layers that do nothing, merge, change shapes, normalize or rescale."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_policy_ext.export.onnx.graph import Graph, Value
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.export.onnx.registry import Context, layer

Array = np.ndarray[Any, Any]


@layer(
    "ActivityRegularization",
    "AlphaDropout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "Identity",
    "InputLayer",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
)
def _nothing(context: Context, layer: Any, x: Value) -> Value:
    return x


_MERGES = {
    "Add": "Add",
    "Subtract": "Sub",
    "Multiply": "Mul",
    "Maximum": "Max",
    "Minimum": "Min",
    "Average": "Add",
}


@layer(*_MERGES)
def _merge(context: Context, layer: Any, values: list[Value]) -> Value:
    graph = context.graph
    name = next(n for n in _MERGES if isinstance(layer, _class(n)))
    if name == "Average":
        values = [graph.cast(each, "float32") for each in values]
    y, *others = _alike(graph, values)
    for each in others:
        y = graph.op(_MERGES[name], y, each)
    return y if name != "Average" else graph.op("Div", y, float(len(values)))


@layer("Concatenate")
def _concatenate(context: Context, layer: Any, values: list[Value]) -> Value:
    same = _of_one_dtype(context.graph, values)
    return context.graph.op("Concat", *same, axis=layer.axis)


@layer("Flatten")
def _flatten(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    if x.rank == 1:
        return graph.reshape(x, (0, 1))
    if layer.data_format == "channels_first":
        x = graph.transpose(x, (0, *range(2, x.rank), 1))
    return graph.reshape(x, (0, -1))


@layer("Reshape")
def _reshape(context: Context, layer: Any, x: Value) -> Value:
    sizes = (-1 if size is None else size for size in layer.target_shape)
    return context.graph.reshape(x, (0, *sizes))


@layer("Permute")
def _permute(context: Context, layer: Any, x: Value) -> Value:
    return context.graph.transpose(x, (0, *layer.dims))


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


def _of_unit_size(graph: Graph, x: Value, axes: Array, epsilon: float) -> Value:
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


def _alike(graph: Graph, values: list[Value]) -> list[Value]:
    """Values of one dtype and rank; Keras puts new axes after the first."""
    rank = max(each.rank for each in values)
    return [
        graph.op("Unsqueeze", each, np.arange(1, 1 + rank - each.rank))
        if each.rank < rank
        else each
        for each in _of_one_dtype(graph, values)
    ]


def _of_one_dtype(graph: Graph, values: list[Value]) -> list[Value]:
    if len({each.dtype for each in values}) == 1:
        return values
    return [graph.cast(each, "float32") for each in values]


def _class(name: str) -> Any:
    return getattr(keras.layers, name)
