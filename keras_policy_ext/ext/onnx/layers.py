"""Write layers without windows: matmuls, normalizations, merges, shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_policy_ext.contractions.equations import (
    explicit as explicit_equation,
)
from keras_policy_ext.contractions.equations import split as terms_of
from keras_policy_ext.ext.onnx import kernel_nodes
from keras_policy_ext.ext.onnx.activations import activated
from keras_policy_ext.ext.onnx.graph import Axes, Refused, Value
from keras_policy_ext.ext.onnx.registry import Context, layer

Array = np.ndarray[Any, Any]


@layer("Dense")
def _dense(context: Context, layer: keras.Layer, x: Value) -> Value:
    kernel = context.kernels.of(layer)
    x = kernel_nodes.rounded(x.cast("float32"), kernel, [-1])
    y = x.op("MatMul", kernel_nodes.matrix(context.graph, kernel))
    return _finished(context, layer, y)


@layer("EinsumDense")
def _einsum_dense(context: Context, layer: keras.Layer, x: Value) -> Value:
    kernel = context.kernels.of(layer)
    order = kernel.axes.summed + kernel.axes.free
    equation = explicit_equation(layer.equation, x.rank, len(order))
    first, second, out = terms_of(equation)
    summed = [i for i, axis in enumerate(first) if axis not in out]
    turned = "".join(second[axis] for axis in order)
    y = kernel_nodes.rounded(x.cast("float32"), kernel, summed).op(
        "Einsum",
        kernel_nodes.matrix(context.graph, kernel),
        equation=f"{first},{turned}->{out}",
    )
    y = _finished(context, layer, y)
    # Keras loses an axis here where `...` stands for two (3.12 to 3.15).
    sizes = dict(zip(first, x.shape or (), strict=True))
    sizes.update(zip(second, kernel.shape, strict=True))
    return dataclasses.replace(y, shape=tuple(sizes[axis] for axis in out))


def _finished(context: Context, layer: keras.Layer, y: Value) -> Value:
    """Add the nodes of a layer's bias and activation."""
    for bias in context.bias(layer):
        y = y + bias
    return activated(context, layer.activation, y)


@layer("Embedding")
def _embedding(context: Context, layer: keras.Layer, x: Value) -> Value:
    if layer.mask_zero:
        raise Refused("it makes a mask", "mask_zero=False")
    kernel = context.kernels.of(layer)
    if x.dtype not in ("int32", "int64"):
        x = x.cast("int32")
    return kernel_nodes.rows_of_table(kernel, x)


@layer("BatchNormalization")
def _batch_normalization(
    context: Context, layer: keras.Layer, x: Value
) -> Value:
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
    y = (x.cast("float32") - mean) * factor.astype("float32")
    return y + read(layer.beta).reshape(along) if layer.center else y


@layer("LayerNormalization")
def _layer_normalization(
    context: Context, layer: keras.Layer, x: Value
) -> Value:
    if getattr(layer, "rms_scaling", False):
        raise Refused("it has rms_scaling=True", "RMSNormalization")
    axes, rank = _sorted_axes(layer.axis, x.rank), x.rank
    y = _of_unit_variance(x.cast("float32"), axes, layer.epsilon)
    if layer.scale:
        y = y * _along(context, layer.gamma, axes, rank)
    if layer.center:
        y = y + _along(context, layer.beta, axes, rank)
    return y


@layer("RMSNormalization")
def _rms_normalization(context: Context, layer: keras.Layer, x: Value) -> Value:
    axes = _sorted_axes(layer.axis, x.rank)
    y = _of_unit_size(x.cast("float32"), axes, layer.epsilon)
    return y * _along(context, layer.scale, axes, x.rank)


@layer("GroupNormalization")
def _group_normalization(
    context: Context, layer: keras.Layer, x: Value
) -> Value:
    rank, axis, groups = x.rank, layer.axis % x.rank, layer.groups
    channels = (x.shape or ())[axis]
    last = [each for each in range(rank) if each != axis] + [axis]
    same = [0] * (rank - 1)
    x = x.cast("float32").transpose(*last)
    x = x.reshape(*same, groups, channels // groups)
    y = _of_unit_variance(x, [*range(1, rank - 1), rank], layer.epsilon)
    y = y.reshape(*same, channels)
    if layer.scale:
        y = y * context.kernels.weight(layer.gamma)
    if layer.center:
        y = y + context.kernels.weight(layer.beta)
    return y.transpose(*map(int, np.argsort(last)))


@layer("UnitNormalization")
def _unit_normalization(
    context: Context, layer: keras.Layer, x: Value
) -> Value:
    return of_length_one(x, _sorted_axes(layer.axis, x.rank))


@layer("Normalization")
def _normalization(context: Context, layer: keras.Layer, x: Value) -> Value:
    mean, variance = (
        np.asarray(keras.ops.convert_to_numpy(each), "float32")
        for each in (layer.mean, layer.variance)
    )
    size = np.maximum(np.sqrt(variance), np.float32(keras.config.epsilon()))
    x = x.cast("float32")
    return x * size + mean if layer.invert else (x - mean) / size


@layer("Rescaling")
def _rescaling(context: Context, layer: keras.Layer, x: Value) -> Value:
    scale, offset = (
        np.asarray(each, "float32") for each in (layer.scale, layer.offset)
    )
    if scale.ndim and keras.config.image_data_format() == "channels_first":
        raise Refused(
            "it has a scale for each channel, and channels come first",
            "one scale, or channels last",
        )
    return x.cast("float32") * scale + offset


def of_length_one(x: Value, axes: Axes, epsilon: float = 1e-12) -> Value:
    """Add nodes: `x / sqrt(sum(x²))`, or `x / epsilon` if the sum is near 0."""
    x = x.cast("float32")
    root = (x * x).reduce("Sum", axes).op("Sqrt")
    return x * root.op("Reciprocal").op("Min", 1 / epsilon)


def _of_unit_variance(x: Value, axes: Axes, epsilon: float) -> Value:
    """Add nodes: `(x - mean(x)) / sqrt(variance(x) + epsilon)`."""
    return _of_unit_size(x - x.reduce("Mean", axes), axes, epsilon)


def _of_unit_size(x: Value, axes: Axes, epsilon: float) -> Value:
    """Add nodes: `x / sqrt(mean(x²) + epsilon)`."""
    square = (x * x).reduce("Mean", axes)
    return x / (square + float(epsilon)).op("Sqrt")


def _sorted_axes(axis: Any, rank: int) -> Array:
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return np.sort(np.asarray(axes, "int64") % rank)


def _along(context: Context, weight: Any, axes: Array, rank: int) -> Array:
    """Return a weight reshaped to `rank` axes: sizes at `axes`, 1 elsewhere."""
    values = context.kernels.weight(weight)
    sizes = [1] * rank
    for axis, size in zip(axes, values.shape, strict=True):
        sizes[axis] = size
    return values.reshape(sizes)


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
def _nothing(context: Context, layer: keras.Layer, x: Value) -> Value:
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
def _merge(context: Context, layer: keras.Layer, inputs: list[Value]) -> Value:
    values = context.graph.values(inputs)
    name = next(
        n for n in _MERGES if isinstance(layer, getattr(keras.layers, n))
    )
    if name == "Average":
        values = [each.cast("float32") for each in values]
    # Keras puts new axes after the first.
    rank = max(each.rank for each in values)
    y, *others = [
        each.unsqueeze(range(1, 1 + rank - each.rank))
        if each.rank < rank
        else each
        for each in _of_one_dtype(values)
    ]
    for each in others:
        y = y.op(_MERGES[name], each)
    return y if name != "Average" else y / float(len(values))


@layer("Concatenate")
def _concatenate(
    context: Context, layer: keras.Layer, inputs: list[Value]
) -> Value:
    values = _of_one_dtype(context.graph.values(inputs))
    return context.graph.op("Concat", *values, axis=layer.axis)


def _of_one_dtype(values: list[Value]) -> list[Value]:
    if len({each.dtype for each in values}) == 1:
        return values
    return [each.cast("float32") for each in values]


@layer("Dot")
def _dot(context: Context, layer: keras.Layer, inputs: list[Value]) -> Value:
    axes, values = layer.axes, context.graph.values(inputs)
    axes = [axes, axes] if isinstance(axes, int) else axes
    ranks = [each.rank for each in values]
    at = [axis % rank for axis, rank in zip(axes, ranks, strict=True)]
    if layer.normalize:
        values = [
            of_length_one(each, [axis])
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
    return y if len(out) > 1 else y.unsqueeze([1])


@layer("Flatten")
def _flatten(context: Context, layer: keras.Layer, x: Value) -> Value:
    if x.rank == 1:
        return x.reshape(0, 1)
    if layer.data_format == "channels_first":
        x = x.transpose(0, *range(2, x.rank), 1)
    return x.reshape(0, -1)


@layer("Reshape")
def _reshape(context: Context, layer: keras.Layer, x: Value) -> Value:
    sizes = (-1 if size is None else size for size in layer.target_shape)
    return x.reshape(0, *sizes)


@layer("RepeatVector")
def _repeat(context: Context, layer: keras.Layer, x: Value) -> Value:
    return x.unsqueeze([1]).op("Tile", np.asarray([1, layer.n, 1], "int64"))


@layer("Permute")
def _permute(context: Context, layer: keras.Layer, x: Value) -> Value:
    return x.transpose(0, *layer.dims)
