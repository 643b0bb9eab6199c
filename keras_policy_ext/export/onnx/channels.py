"""Windows over images: in ONNX the channels come first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_policy_ext.export.onnx.graph import OnnxGraph, Value
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.export.onnx.registry import Context, layer


def channels_first(graph: OnnxGraph, x: Value, data_format: str) -> Value:
    """Inputs in float32 as (batch, channels, *window axes)."""
    rank = x.rank
    x = graph.cast(x, "float32")
    if data_format == "channels_first":
        return x
    return graph.transpose(x, (0, rank - 1, *range(1, rank - 1)))


def put_back(graph: OnnxGraph, x: Value, data_format: str, rank: int) -> Value:
    """Outputs of this rank in the format of the layer."""
    if data_format == "channels_first":
        return x
    return graph.transpose(x, (0, *range(2, rank), 1))


def same_padding(
    x: Value, data_format: str, window: Sequence[int], strides: Sequence[int]
) -> dict[str, Any]:
    """Padding that covers the inputs, on both sides, the odd one at the end.

    By `auto_pad` where a size is unknown that matters; onnxruntime refuses it
    for convolutions with dilation, which Keras has without strides only, and
    computes a negative width where a stride is larger than the window.

    Raises:
        Refused: If that may be so.
    """
    first = 2 if data_format == "channels_first" else 1
    sizes = (x.shape or ())[first : first + len(window)]
    steps = list(zip(sizes, window, strides, strict=True))
    if any(size is None and stride > 1 for size, _, stride in steps):
        if any(stride > width for _, width, stride in steps):
            raise Refused(
                "its stride is larger than its window, and its inputs have "
                "an unknown size",
                'inputs of a known size, or padding="valid"',
            )
        return {"auto_pad": "SAME_UPPER"}
    pads = [
        max(0, width - 1 - (((size or 1) - 1) % stride))
        for size, width, stride in steps
    ]
    before = [pad // 2 for pad in pads]
    after = [pad - pad // 2 for pad in pads]
    return {"pads": before + after}


def padding_of(layer: Any, x: Value) -> dict[str, Any]:
    """How a convolution is padded."""
    window = [
        (size - 1) * rate + 1
        for size, rate in zip(
            layer.kernel_size, layer.dilation_rate, strict=True
        )
    ]
    if layer.padding == "same":
        return same_padding(x, layer.data_format, window, layer.strides)
    causal = layer.padding == "causal"
    before = [size - 1 if causal else 0 for size in window]
    return {"pads": [*before, *[0] * layer.rank]}


_RANKS = ("1D", "2D", "3D")


@layer(*(f"{kind}Pooling{d}" for kind in ("Max", "Average") for d in _RANKS))
def _pool(context: Context, layer: Any, x: Value) -> Value:
    """Average pooling counts no padding."""
    graph = context.graph
    kind = "MaxPool" if "Max" in _stock_name(layer) else "AveragePool"
    padding: dict[str, Any] = {}
    if layer.padding == "same":
        padding = same_padding(
            x, layer.data_format, layer.pool_size, layer.strides
        )
    y = graph.op(
        kind,
        channels_first(graph, x, layer.data_format),
        kernel_shape=list(layer.pool_size),
        strides=list(layer.strides),
        **padding,
    )
    return put_back(graph, y, layer.data_format, x.rank)


@layer(
    *(f"Global{kind}Pooling{d}" for kind in ("Max", "Average") for d in _RANKS)
)
def _pool_all(context: Context, layer: Any, x: Value) -> Value:
    kind = "ReduceMax" if "Max" in _stock_name(layer) else "ReduceMean"
    first = 1 if layer.data_format == "channels_last" else 2
    axes = np.arange(first, first + x.rank - 2)
    return context.graph.op(
        kind,
        context.graph.cast(x, "float32"),
        axes,
        keepdims=int(layer.keepdims),
    )


@layer(*(f"ZeroPadding{d}" for d in _RANKS))
def _zero_padding(context: Context, layer: Any, x: Value) -> Value:
    padding = layer.padding
    around = [padding] if isinstance(padding[0], int) else [*padding]
    channels = 2 if layer.data_format == "channels_first" else 1
    before, after = np.transpose(
        [(0, 0)] * channels + around + [(0, 0)] * (2 - channels)
    )
    return context.graph.op("Pad", x, np.concatenate([before, after]))


@layer(*(f"Cropping{d}" for d in _RANKS))
def _cropping(context: Context, layer: Any, x: Value) -> Value:
    cropping = layer.cropping
    around = [cropping] if isinstance(cropping[0], int) else [*cropping]
    first = 2 if getattr(layer, "data_format", "") == "channels_first" else 1
    begin, end = np.transpose(around).astype("int64")
    end = np.where(end > 0, -end, np.iinfo("int64").max)
    axes = np.arange(first, first + len(around))
    return context.graph.op("Slice", x, begin, end, axes)


@layer(*(f"UpSampling{d}" for d in _RANKS))
def _up_sampling(context: Context, layer: Any, x: Value) -> Value:
    graph = context.graph
    ways = {"nearest": _NEAREST, "bilinear": _LINEAR}
    way = ways.get(getattr(layer, "interpolation", "nearest"))
    if way is None:
        raise Refused(
            f"its interpolation is {layer.interpolation!r}",
            ", ".join(map(repr, ways)),
        )
    data_format = getattr(layer, "data_format", "channels_last")
    y = channels_first(graph, x, data_format)
    scales = np.array([1, 1, *np.atleast_1d(layer.size)], "float32")
    nothing = graph.constant(np.zeros(0, "float32"))
    y = graph.op("Resize", y, nothing, scales, **way)
    return put_back(graph, y, data_format, x.rank)


_NEAREST: dict[str, Any] = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}
_LINEAR: dict[str, Any] = {
    "mode": "linear",
    "coordinate_transformation_mode": "half_pixel",
}


def _stock_name(layer: Any) -> str:
    """The name of the class of Keras that a layer is of."""
    return next(
        base.__name__
        for base in type(layer).__mro__
        if base.__module__.startswith("keras.")
    )
