"""Layers that multiply with a kernel, and embeddings."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras_policy_ext.contractions import equations
from keras_policy_ext.export.onnx import stored
from keras_policy_ext.export.onnx.activations import activated
from keras_policy_ext.export.onnx.channels import (
    channels_first,
    padding_of,
    put_back,
)
from keras_policy_ext.export.onnx.graph import Value
from keras_policy_ext.export.onnx.kernels import OnnxKernel
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.export.onnx.registry import Context, layer


@layer("Dense")
def _dense(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    kernel = context.kernels.of(layer)
    x = graph.cast(x, "float32")
    x = stored.rounded(graph, x, kernel, [-1])
    y = graph.op("MatMul", x, stored.matrix(graph, kernel))
    return _finished(context, layer, y)


@layer("EinsumDense")
def _einsum_dense(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    kernel = context.kernels.of(layer)
    equation = equations.explicit(
        layer.equation, x.rank, len(kernel.axes.summed + kernel.axes.free)
    )
    first, second, out = equations.split(equation)
    summed = [i for i, axis in enumerate(first) if axis not in out]
    order = kernel.axes.summed + kernel.axes.free
    turned = "".join(second[axis] for axis in order)
    y = graph.op(
        "Einsum",
        stored.rounded(graph, graph.cast(x, "float32"), kernel, summed),
        stored.matrix(graph, kernel),
        equation=f"{first},{turned}->{out}",
    )
    y = _finished(context, layer, y)
    # Keras loses an axis here where `...` stands for two (3.12 to 3.15).
    sizes = dict(zip(first, x.shape or (), strict=True))
    sizes.update(zip(second, kernel.shape, strict=True))
    return dataclasses.replace(y, shape=tuple(sizes[axis] for axis in out))


@layer("Conv1D", "Conv2D", "Conv3D")
def _convolution(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    kernel = context.kernels.of(layer)
    rank, given = layer.rank, x
    x = channels_first(graph, x, layer.data_format)
    x = stored.rounded(graph, x, kernel, range(1, rank + 2))
    operands = [x, stored.convolution_kernel(graph, kernel)]
    if layer.use_bias:
        operands.append(
            graph.constant(context.kernels.weight(layer.bias), "bias")
        )
    y = graph.op(
        "Conv",
        *operands,
        strides=list(layer.strides),
        dilations=list(layer.dilation_rate),
        group=layer.groups,
        **padding_of(layer, given),
    )
    y = put_back(graph, y, layer.data_format, rank + 2)
    return activated(context, layer.activation, y)


@layer("Embedding")
def _embedding(context: Context, layer: Any, x: Value) -> Value:
    if layer.mask_zero:
        raise Refused("it makes a mask", "mask_zero=False")
    kernel: OnnxKernel = context.kernels.of(layer)
    if x.dtype not in ("int32", "int64"):
        x = context.graph.cast(x, "int32")
    return stored.rows_of_table(context.graph, kernel, x)


def _finished(context: Context, layer: Any, y: Value) -> Value:
    """Add the bias, activate."""
    if layer.bias is not None:
        bias = context.graph.constant(
            context.kernels.weight(layer.bias), "bias"
        )
        y = context.graph.op("Add", y, bias)
    return activated(context, layer.activation, y)
