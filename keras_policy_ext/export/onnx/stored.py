"""Kernels in float8 in a graph, and inputs that are rounded to it.

Only forms that onnxruntime computes alike at every level of optimization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_policy_ext import formats
from keras_policy_ext.export.onnx.graph import OnnxGraph, Value, onnx_type
from keras_policy_ext.export.onnx.kernels import OnnxKernel
from keras_policy_ext.stored_kernels import (
    BLOCK,
    StoredKernel,
    as_matrix,
)

Array = np.ndarray[Any, Any]

INPUTS = "float8_e4m3fn"
"""The format that inputs are rounded to."""


def matrix(graph: OnnxGraph, kernel: OnnxKernel) -> Value:
    """A kernel in float32, its summed axes first, then the others.

    It lies in the file as a matrix of summed by kept axes: there is one axis
    for the scales, however many axes the kernel has.
    """
    stored = kernel.data
    order = kernel.axes.summed + kernel.axes.free
    sizes = tuple(kernel.shape[axis] for axis in order)
    if not isinstance(stored, StoredKernel):
        return graph.constant(stored.transpose(order), "kernel")
    codes = np.ascontiguousarray(stored.matrix.T)
    value = graph.codes(codes, stored.weights, "kernel")
    dequantized = _dequantized(graph, value, stored, kept=1)
    is_matrix = len(kernel.axes.summed) == len(kernel.axes.free) == 1
    return dequantized if is_matrix else graph.reshape(dequantized, sizes)


def convolution_kernel(graph: OnnxGraph, kernel: OnnxKernel) -> Value:
    """A kernel (*window, in, out) in float32, as (out, in, *window).

    One of a transposed convolution, (*window, out, in), as (in, out, *window).
    """
    stored = kernel.data
    rank = len(kernel.shape)
    order = (rank - 1, rank - 2, *range(rank - 2))
    if not isinstance(stored, StoredKernel):
        return graph.constant(stored.transpose(order), "kernel")
    (free,) = kernel.axes.free
    kept = order.index(free)
    if stored.granularity != "block":
        codes = np.ascontiguousarray(stored.codes.transpose(order))
        value = graph.codes(codes, stored.weights, "kernel")
        return _dequantized(graph, value, stored, kept)
    # Blocks count along window and input channels as Keras has them.
    value = graph.codes(stored.matrix, stored.weights, "kernel")
    rows = _dequantized(graph, value, stored, kept=0)
    sizes = [kernel.shape[axis] for axis in (free, *kernel.axes.summed)]
    whole = graph.reshape(rows, tuple(sizes))
    ends = (rank - 1, 0) if kept else (0, rank - 1)
    return graph.transpose(whole, (*ends, *range(1, rank - 1)))


def rows_of_table(
    graph: OnnxGraph, kernel: OnnxKernel, indices: Value
) -> Value:
    """The rows of embeddings (rows, columns) that integers name, float32.

    `Gather` takes no float8, and to dequantize a table for a few of its rows
    would take long: codes are looked up, then the number of each code.
    """
    stored = kernel.data
    if not isinstance(stored, StoredKernel):
        table = graph.constant(stored, "embeddings")
        return graph.op("Gather", table, indices, axis=0, dtype="float32")
    codes = graph.constant(stored.codes, "embeddings")
    found = graph.op("Gather", codes, indices, axis=0)
    every = np.arange(256, dtype="uint8").view(
        formats.get(stored.weights).dtype
    )
    numbers = graph.constant(every.astype("float32"), "numbers")
    rows = graph.op("Gather", numbers, graph.cast(found, "int32"), axis=0)
    return graph.op("Mul", rows, _row_scales(graph, stored, indices))


def rounded(
    graph: OnnxGraph, x: Value, kernel: OnnxKernel, axes: Sequence[int]
) -> Value:
    """Inputs, rounded to float8 as the layer of this kernel does it.

    Not by `QuantizeLinear`: onnxruntime then moves and fuses what stands
    around it, and drops a `Relu` before it.

    Args:
        graph: Takes the nodes.
        x: Inputs in float32.
        kernel: Says how they are rounded.
        axes: The axes of the inputs that share a scale, if it is dynamic.
    """
    if kernel.activations is None:
        return x
    if kernel.activations == "static":
        scale = graph.constant(np.float32(kernel.inputs_scale), "inputs_scale")
    else:
        scale = _dynamic_scale(graph, x, axes)
    divided = graph.op("Div", x, scale)
    # A cast that saturates does so too, but not in every reader.
    most = formats.get(INPUTS).max
    clipped = graph.op("Clip", divided, -most, most)
    codes = graph.op(
        "Cast", clipped, to=onnx_type(INPUTS), dtype=INPUTS, saturate=1
    )
    return graph.op("Mul", graph.cast(codes, "float32"), scale)


def _dynamic_scale(graph: OnnxGraph, x: Value, axes: Sequence[int]) -> Value:
    """`amax / 448`, at least the smallest normal number: 0 divides nothing."""
    over = np.asarray(axes, "int64")
    magnitude = graph.op("Abs", x)
    amax = magnitude
    if len(over):
        amax = graph.op("ReduceMax", magnitude, over, keepdims=1)
    scale = graph.op("Div", amax, formats.get(INPUTS).max)
    least = float(np.finfo("float32").smallest_normal)
    too_small = graph.op("Less", scale, least, dtype="bool")
    return graph.op("Where", too_small, least, scale, dtype="float32")


def _dequantized(
    graph: OnnxGraph, codes: Value, stored: StoredKernel, kept: int
) -> Value:
    """Codes times their scales; `kept` is the axis that is not summed."""
    scale, axes = _scales(stored, kept)
    given = graph.constant(scale, "kernel_scale")
    return graph.op("DequantizeLinear", codes, given, dtype="float32", **axes)


def _scales(stored: StoredKernel, kept: int) -> tuple[Array, dict[str, int]]:
    """Scales in the shape that `DequantizeLinear` takes, and its attributes."""
    if stored.granularity == "tensor":
        return stored.scale.reshape(()), {}
    if stored.granularity == "channel":
        return stored.matrix_scale.reshape(-1), {"axis": kept}
    rows = as_matrix(stored.codes, stored.axes).shape[0]
    spread = np.repeat(stored.scale, BLOCK, axis=0)[:rows]
    scale = spread if kept == 0 else np.ascontiguousarray(spread.T)
    return scale, {"axis": 1 - kept, "block_size": BLOCK}


def _row_scales(
    graph: OnnxGraph, stored: StoredKernel, indices: Value
) -> Value:
    """The scales of looked-up rows, or that of the table."""
    if stored.granularity == "tensor":
        return graph.constant(stored.scale.reshape(()), "embeddings_scale")
    if stored.granularity == "channel":
        scale = graph.constant(stored.scale, "embeddings_scale")
        if stored.scale.shape[0] == 1:
            return graph.reshape(scale, (-1,))
        return graph.op("Gather", scale, indices, axis=0)
    columns = stored.codes.shape[1]
    spread = np.repeat(stored.scale, BLOCK, axis=1)[:, :columns]
    scale = graph.constant(spread, "embeddings_scale")
    block = np.asarray(BLOCK, indices.dtype)
    return graph.op("Gather", scale, graph.op("Div", indices, block), axis=0)
