"""Depthwise, separable and transposed convolutions."""

from __future__ import annotations

from typing import Any

from keras_policy_ext.contractions import ConvTranspose
from keras_policy_ext.export.onnx import stored
from keras_policy_ext.export.onnx.activations import activated
from keras_policy_ext.export.onnx.channels import (
    channels_first,
    padding_of,
    put_back,
)
from keras_policy_ext.export.onnx.graph import Value
from keras_policy_ext.export.onnx.registry import Context, layer

_DEPTHWISE = "depthwise kernels stay in floats"


@layer("DepthwiseConv1D", "DepthwiseConv2D")
def _depthwise(context: Context, layer: Any, x: Value) -> Value:
    y = _by_channel(context, layer, layer.kernel, x, _bias(context, layer))
    y = put_back(context.graph, y, layer.data_format, x.rank)
    return activated(context, layer.activation, y)


@layer("SeparableConv1D", "SeparableConv2D")
def _separable(context: Context, layer: Any, x: Value) -> Value:
    y = _by_channel(context, layer, layer.depthwise_kernel, x, [])
    y = context.graph.op("Conv", *_operands(context, layer, y))
    y = put_back(context.graph, y, layer.data_format, x.rank)
    return activated(context, layer.activation, y)


@layer("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
def _transposed(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    y = graph.op(
        "ConvTranspose",
        *_operands(context, layer, channels_first(graph, x, layer.data_format)),
        strides=list(layer.strides),
        dilations=list(layer.dilation_rate),
        **_cut_off(layer),
    )
    y = put_back(graph, y, layer.data_format, x.rank)
    return activated(context, layer.activation, y)


def _operands(context: Context, layer: Any, x: Value) -> list[Value]:
    """Inputs with channels first, rounded if asked, the kernel, the bias."""
    graph, kernel = context.graph, context.kernels.of(layer)
    return [
        stored.rounded(graph, x, kernel, range(1, layer.rank + 2)),
        stored.convolution_kernel(graph, kernel),
        *_bias(context, layer),
    ]


def _by_channel(
    context: Context, layer: Any, kernel: Any, x: Value, bias: list[Value]
) -> Value:
    """Each channel with `depth_multiplier` windows of its own."""
    values = context.kernels.weight(kernel, _DEPTHWISE)
    *window, channels, multiplier = values.shape
    values = values.transpose(layer.rank, layer.rank + 1, *range(layer.rank))
    return context.graph.op(
        "Conv",
        channels_first(context.graph, x, layer.data_format),
        context.graph.constant(
            values.reshape(channels * multiplier, 1, *window), "kernel"
        ),
        *bias,
        strides=list(layer.strides),
        dilations=list(layer.dilation_rate),
        group=channels,
        **padding_of(layer, x),
    )


def _bias(context: Context, layer: Any) -> list[Value]:
    if not layer.use_bias:
        return []
    return [context.graph.constant(context.kernels.weight(layer.bias), "bias")]


def _cut_off(layer: Any) -> dict[str, Any]:
    """What is cut off at both ends of each axis, or added at the last one."""
    contraction = ConvTranspose(
        layer.strides,
        layer.padding,
        layer.dilation_rate,
        layer.data_format,
        layer.output_padding,
    )
    around = contraction.around(layer.kernel_size)
    before, after = zip(*around, strict=True)
    return {
        "pads": [max(-each, 0) for each in (*before, *after)],
        "output_padding": [max(each, 0) for each in after],
    }
