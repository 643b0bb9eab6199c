"""Write convolutions, pooling and other windows over images.

In ONNX the channels come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_policy_ext.ext.onnx import kernel_nodes
from keras_policy_ext.ext.onnx.activations import activated
from keras_policy_ext.ext.onnx.graph import Refused, Value
from keras_policy_ext.ext.onnx.registry import Context, layer
from keras_policy_ext.kernels import ConvTranspose

_DEPTHWISE = "depthwise kernels stay in floats"
_RANKS = ("1D", "2D", "3D")

_NEAREST: dict[str, Any] = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}
_LINEAR: dict[str, Any] = {
    "mode": "linear",
    "coordinate_transformation_mode": "half_pixel",
}


@layer("Conv1D", "Conv2D", "Conv3D")
def _convolution(context: Context, layer: keras.Layer, x: Value) -> Value:
    y = _convolved(
        context,
        layer,
        _channels_first(layer, x),
        strides=list(layer.strides),
        dilations=list(layer.dilation_rate),
        group=layer.groups,
        **_padding(layer, x),
    )
    y = _put_back(layer, y, x.rank)
    return activated(context, layer.activation, y)


@layer("DepthwiseConv1D", "DepthwiseConv2D")
def _depthwise(context: Context, layer: keras.Layer, x: Value) -> Value:
    y = _by_channel(context, layer, layer.kernel, x, context.bias(layer))
    y = _put_back(layer, y, x.rank)
    return activated(context, layer.activation, y)


@layer("SeparableConv1D", "SeparableConv2D")
def _separable(context: Context, layer: keras.Layer, x: Value) -> Value:
    y = _by_channel(context, layer, layer.depthwise_kernel, x, [])
    y = _put_back(layer, _convolved(context, layer, y), x.rank)
    return activated(context, layer.activation, y)


@layer("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
def _transposed(context: Context, layer: keras.Layer, x: Value) -> Value:
    y = _convolved(
        context,
        layer,
        _channels_first(layer, x),
        kind="ConvTranspose",
        strides=list(layer.strides),
        dilations=list(layer.dilation_rate),
        **_cut_off(layer),
    )
    y = _put_back(layer, y, x.rank)
    return activated(context, layer.activation, y)


@layer(*(f"{kind}Pooling{d}" for kind in ("Max", "Average") for d in _RANKS))
def _pool(context: Context, layer: keras.Layer, x: Value) -> Value:
    """Add a pooling node; an average leaves out the padding."""
    padding: dict[str, Any] = {}
    if layer.padding == "same":
        padding = _same_padding(layer, x, layer.pool_size)
    y = _channels_first(layer, x).op(
        "MaxPool" if "Max" in _stock_name(layer) else "AveragePool",
        kernel_shape=list(layer.pool_size),
        strides=list(layer.strides),
        **padding,
    )
    return _put_back(layer, y, x.rank)


@layer(
    *(f"Global{kind}Pooling{d}" for kind in ("Max", "Average") for d in _RANKS)
)
def _pool_all(context: Context, layer: keras.Layer, x: Value) -> Value:
    kind = "Max" if "Max" in _stock_name(layer) else "Mean"
    first = 1 if layer.data_format == "channels_last" else 2
    axes = range(first, first + x.rank - 2)
    return x.cast("float32").reduce(kind, axes, layer.keepdims)


@layer(*(f"ZeroPadding{d}" for d in _RANKS))
def _zero_padding(context: Context, layer: keras.Layer, x: Value) -> Value:
    padding = layer.padding
    around = [padding] if isinstance(padding[0], int) else [*padding]
    channels = 2 if layer.data_format == "channels_first" else 1
    before, after = np.transpose(
        [(0, 0)] * channels + around + [(0, 0)] * (2 - channels)
    )
    return x.op("Pad", np.concatenate([before, after]))


@layer(*(f"Cropping{d}" for d in _RANKS))
def _cropping(context: Context, layer: keras.Layer, x: Value) -> Value:
    cropping = layer.cropping
    around = [cropping] if isinstance(cropping[0], int) else [*cropping]
    first = 2 if getattr(layer, "data_format", "") == "channels_first" else 1
    begin, end = np.transpose(around).astype("int64")
    end = np.where(end > 0, -end, np.iinfo("int64").max)
    return x.op("Slice", begin, end, np.arange(first, first + len(around)))


@layer(*(f"UpSampling{d}" for d in _RANKS))
def _up_sampling(context: Context, layer: keras.Layer, x: Value) -> Value:
    ways = {"nearest": _NEAREST, "bilinear": _LINEAR}
    way = ways.get(getattr(layer, "interpolation", "nearest"))
    if way is None:
        raise Refused(
            f"its interpolation is {layer.interpolation!r}",
            ", ".join(map(repr, ways)),
        )
    y = _channels_first(layer, x)
    scales = np.array([1, 1, *np.atleast_1d(layer.size)], "float32")
    y = y.op("Resize", np.zeros(0, "float32"), scales, **way)
    return _put_back(layer, y, x.rank)


def _convolved(
    context: Context,
    layer: keras.Layer,
    x: Value,
    kind: str = "Conv",
    **options: Any,
) -> Value:
    """Add a `Conv` node with the layer's kernel and bias, channels first."""
    kernel = context.kernels.of(layer)
    x = kernel_nodes.rounded(x, kernel, range(1, layer.rank + 2))
    operand = kernel_nodes.convolution_kernel(context.graph, kernel)
    return x.op(kind, operand, *context.bias(layer), **options)


def _by_channel(
    context: Context,
    layer: keras.Layer,
    kernel: Any,
    x: Value,
    bias: list[Value],
) -> Value:
    """Add a depthwise `Conv` node: each channel has kernels of its own."""
    values = context.kernels.weight(kernel, _DEPTHWISE)
    *window, channels, multiplier = values.shape
    values = values.transpose(layer.rank, layer.rank + 1, *range(layer.rank))
    values = values.reshape(channels * multiplier, 1, *window)
    return _channels_first(layer, x).op(
        "Conv",
        context.graph.constant(values, "kernel"),
        *bias,
        strides=list(layer.strides),
        dilations=list(layer.dilation_rate),
        group=channels,
        **_padding(layer, x),
    )


def _channels_first(layer: keras.Layer, x: Value) -> Value:
    """Return inputs as float32 of shape (batch, channels, *window axes)."""
    x, rank = x.cast("float32"), x.rank
    if getattr(layer, "data_format", "") == "channels_first":
        return x
    return x.transpose(0, rank - 1, *range(1, rank - 1))


def _put_back(layer: keras.Layer, y: Value, rank: int) -> Value:
    """Transpose outputs from channels first to the layer's data format."""
    if getattr(layer, "data_format", "") == "channels_first":
        return y
    return y.transpose(0, *range(2, rank), 1)


def _padding(layer: keras.Layer, x: Value) -> dict[str, Any]:
    """Return the padding attributes of a layer's `Conv` node."""
    window = [
        (size - 1) * rate + 1
        for size, rate in zip(
            layer.kernel_size, layer.dilation_rate, strict=True
        )
    ]
    if layer.padding == "same":
        return _same_padding(layer, x, window)
    causal = layer.padding == "causal"
    before = [size - 1 if causal else 0 for size in window]
    return {"pads": [*before, *[0] * layer.rank]}


def _same_padding(
    layer: keras.Layer, x: Value, window: Sequence[int]
) -> dict[str, Any]:
    """Return the attributes for padding "same", the extra one at the end."""
    first = 2 if layer.data_format == "channels_first" else 1
    sizes = (x.shape or ())[first : first + len(window)]
    steps = list(zip(sizes, window, layer.strides, strict=True))
    if any(size is None and stride > 1 for size, _, stride in steps):
        if any(stride > width for _, width, stride in steps):
            raise Refused(
                "its stride is larger than its window, and its inputs have "
                "an unknown size",
                'inputs of a known size, or padding="valid"',
            )
        # onnxruntime refuses it with dilation, which Keras has only without
        # strides. It computes a negative width if a stride is larger than the
        # window.
        return {"auto_pad": "SAME_UPPER"}
    pads = [
        max(0, width - 1 - (((size or 1) - 1) % stride))
        for size, width, stride in steps
    ]
    before = [pad // 2 for pad in pads]
    after = [pad - pad // 2 for pad in pads]
    return {"pads": before + after}


def _cut_off(layer: keras.Layer) -> dict[str, Any]:
    """Return the padding attributes of a layer's `ConvTranspose` node."""
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


def _stock_name(layer: keras.Layer) -> str:
    """Return the name of the first Keras class in a layer's MRO."""
    return next(
        base.__name__
        for base in type(layer).__mro__
        if base.__module__.startswith("keras.")
    )
