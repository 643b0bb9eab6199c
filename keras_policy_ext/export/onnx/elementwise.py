"""Layers that do nothing, merge, or change shapes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_policy_ext.export.onnx.graph import OnnxGraph, Value
from keras_policy_ext.export.onnx.normalizations import of_length_one
from keras_policy_ext.export.onnx.registry import Context, layer


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
    values = graph.values(values)
    name = next(n for n in _MERGES if isinstance(layer, _class(n)))
    if name == "Average":
        values = [graph.cast(each, "float32") for each in values]
    y, *others = _alike(graph, values)
    for each in others:
        y = graph.op(_MERGES[name], y, each)
    return y if name != "Average" else graph.op("Div", y, float(len(values)))


@layer("Concatenate")
def _concatenate(context: Context, layer: Any, values: list[Value]) -> Value:
    same = _of_one_dtype(context.graph, context.graph.values(values))
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


@layer("RepeatVector")
def _repeat(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    row = graph.op("Unsqueeze", x, np.asarray([1], "int64"))
    return graph.op("Tile", row, np.asarray([1, layer.n, 1], "int64"))


@layer("Dot")
def _dot(context: Context, layer: Any, values: list[Value]) -> Value:
    axes, values = layer.axes, context.graph.values(values)
    axes = [axes, axes] if isinstance(axes, int) else axes
    ranks = [each.rank for each in values]
    at = [axis % rank for axis, rank in zip(axes, ranks, strict=True)]
    if layer.normalize:
        values = [
            of_length_one(context.graph, each, [axis])
            for axis, each in zip(at, values, strict=True)
        ]
    names = iter("cdefghijklmnopqrstuvwxyz")
    first, second = (
        ["a", *(next(names) for _ in range(1, rank))] for rank in ranks
    )
    first[at[0]] = second[at[1]] = "b"
    out = [each for each in first + second[1:] if each != "b"]
    terms = ("".join(each) for each in (first, second, out))
    y = context.graph.op("Einsum", *values, equation="{},{}->{}".format(*terms))
    if len(out) > 1:
        return y
    return context.graph.op("Unsqueeze", y, np.asarray([1], "int64"))


@layer("Permute")
def _permute(context: Context, layer: Any, x: Value) -> Value:
    return context.graph.transpose(x, (0, *layer.dims))


def _alike(graph: OnnxGraph, values: list[Value]) -> list[Value]:
    """Values of one dtype and rank; Keras puts new axes after the first."""
    rank = max(each.rank for each in values)
    return [
        graph.op("Unsqueeze", each, np.arange(1, 1 + rank - each.rank))
        if each.rank < rank
        else each
        for each in _of_one_dtype(graph, values)
    ]


def _of_one_dtype(graph: OnnxGraph, values: list[Value]) -> list[Value]:
    if len({each.dtype for each in values}) == 1:
        return values
    return [graph.cast(each, "float32") for each in values]


def _class(name: str) -> Any:
    return getattr(keras.layers, name)
