"""Write the float8 kernels of layers into a graph, and quantize inputs.

One kernel at a time is in memory. The nodes are chosen so that onnxruntime
gives the same results at every level of optimization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_policy_ext import formats
from keras_policy_ext._keras import variable_values
from keras_policy_ext.ext.export import exported_kernels
from keras_policy_ext.ext.export.exported_kernels import Scheme
from keras_policy_ext.ext.export.report import Written
from keras_policy_ext.ext.onnx.graph import OnnxGraph, Refused, Value, onnx_type
from keras_policy_ext.layers.drop_in import drop_in_of
from keras_policy_ext.stored_kernels import (
    BLOCK,
    Axes,
    StoredKernel,
    as_matrix,
    tile_of,
)

Array = np.ndarray[Any, Any]

INPUTS = "float8_e4m3fn"
"""The format that inputs are quantized to."""

_NOT_FOUND = "its layer cannot be frozen"
"""The reason for a kernel in float32."""


@dataclasses.dataclass(frozen=True)
class OnnxKernel:
    """A layer's kernel to be written, and how to quantize its inputs.

    Attributes:
        data: Its codes and scales; or its values, if it stays float32.
        axes: The summed and the kept axes.
        activations: None, `"dynamic"` or `"static"`.
        inputs_scale: The scale of the inputs, if it is static.
    """

    data: StoredKernel | Array
    axes: Axes
    activations: str | None = None
    inputs_scale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel in the Keras layer."""
        data = self.data
        return (data.codes if isinstance(data, StoredKernel) else data).shape


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a model, quantized when a layer is written.

    Attributes:
        found: All kernels of the model, by the `id` of their variables.
        scheme: How kernels that are not frozen are stored, and how inputs are
            quantized.
        written: An entry for each weight that was read, by its `id`.
    """

    found: dict[int, exported_kernels.ExportedKernel]
    scheme: Scheme
    written: dict[int, Written] = dataclasses.field(default_factory=dict)

    def of(self, layer: keras.Layer) -> OnnxKernel:
        """Return the kernel of a layer in float8, quantized unless frozen.

        Raises:
            Refused: If the kernel cannot be written.
        """
        variable = _variable(layer)
        found = self.found.get(id(variable))
        if found is None or found.left_out is not None:
            return self._float(layer, variable, found)
        stored = found.stored(self.scheme)
        activations = self.scheme.activations
        scale = found.input_scale() if activations == "static" else None
        looked_up = isinstance(layer, keras.layers.Embedding)
        if activations == "static" and scale is None and not looked_up:
            raise Refused(
                "it has no static scale of its inputs",
                "keras_policy_ext.freeze(model, activations='static') before "
                "the model is written, or activations='dynamic'",
            )
        self._note(variable, stored.weights, "", stored.nbytes)
        return OnnxKernel(stored, stored.axes, activations, scale)

    def weight(
        self, variable: keras.Variable, reason: str = exported_kernels.NO_KERNEL
    ) -> Array:
        """Return a weight as a float32 array, and record it as written."""
        wide = keras.ops.cast(variable, "float32")
        values = np.asarray(keras.ops.convert_to_numpy(wide))
        self._note(variable, "float32", reason, values.nbytes)
        return values

    def _float(
        self,
        layer: keras.Layer,
        variable: keras.Variable,
        found: exported_kernels.ExportedKernel | None,
    ) -> OnnxKernel:
        """Return a kernel that stays in float32, and record the reason."""
        frozen = exported_kernels.is_frozen(variable)
        if not frozen and not keras.backend.is_float_dtype(variable.dtype):
            raise Refused(
                f"its kernel is {variable.dtype}: Keras has quantized it",
                "kernels in a floating dtype, or frozen by this package",
            )
        values = exported_kernels.float_value(layer, variable).astype("float32")
        reason = getattr(found, "left_out", None) or _NOT_FOUND
        self._note(variable, "float32", reason, values.nbytes)
        form = drop_in_of(type(layer))
        return OnnxKernel(values, form.float8_axes(layer, variable))

    def _note(
        self, variable: keras.Variable, dtype: str, reason: str, size: int
    ) -> None:
        path = variable.path
        shape = tuple(variable.shape)
        self.written[id(variable)] = Written(
            path, path, shape, dtype, reason, size
        )


def matrix(graph: OnnxGraph, kernel: OnnxKernel) -> Value:
    """Add nodes for a kernel in float32, with the summed axes first."""
    # The file has a matrix of summed by kept axes, so that there is one axis
    # for the scales, however many axes the kernel has.
    stored = kernel.data
    order = kernel.axes.summed + kernel.axes.free
    if not isinstance(stored, StoredKernel):
        return graph.constant(stored.transpose(order), "kernel")
    codes = graph.codes(stored.matrix.T, stored.weights, "kernel")
    dequantized = _dequantized(codes, stored, kept=1)
    if len(kernel.axes.summed) == len(kernel.axes.free) == 1:
        return dequantized
    return dequantized.reshape(*(kernel.shape[axis] for axis in order))


def convolution_kernel(graph: OnnxGraph, kernel: OnnxKernel) -> Value:
    """Add nodes for a convolution kernel in float32: (out, in, *window).

    In Keras it is (*window, in, out). That of a transposed convolution has
    `out` and `in` exchanged, in both.
    """
    stored = kernel.data
    rank = len(kernel.shape)
    order = (rank - 1, rank - 2, *range(rank - 2))
    if not isinstance(stored, StoredKernel):
        return graph.constant(stored.transpose(order), "kernel")
    (free,) = kernel.axes.free
    kept = order.index(free)
    if tile_of(stored.granularity) is None:
        turned = stored.codes.transpose(order)
        codes = graph.codes(turned, stored.weights, "kernel")
        return _dequantized(codes, stored, kept)
    # Tiles count along window and input channels as Keras has them.
    codes = graph.codes(stored.matrix, stored.weights, "kernel")
    rows = _dequantized(codes, stored, kept=0)
    sizes = (kernel.shape[axis] for axis in (free, *kernel.axes.summed))
    ends = (rank - 1, 0) if kept else (0, rank - 1)
    return rows.reshape(*sizes).transpose(*ends, *range(1, rank - 1))


def rows_of_table(kernel: OnnxKernel, indices: Value) -> Value:
    """Add nodes that look up rows of an embedding table, in float32.

    `Gather` takes no float8, and dequantizing a whole table for a few rows
    would be slow. So codes are looked up first, and then the value of each
    code.
    """
    graph, stored = indices.graph, kernel.data
    if not isinstance(stored, StoredKernel):
        table = graph.constant(stored, "embeddings")
        return table.op("Gather", indices, axis=0)
    codes = graph.constant(stored.codes, "embeddings")
    found = codes.op("Gather", indices, axis=0)
    every = np.arange(256, dtype="uint8").view(
        formats.get(stored.weights).dtype
    )
    numbers = graph.constant(every.astype("float32"), "numbers")
    rows = numbers.op("Gather", found.cast("int32"), axis=0)
    return rows * _row_scales(stored, indices)


def rounded(x: Value, kernel: OnnxKernel, axes: Sequence[int]) -> Value:
    """Add nodes that quantize and dequantize a layer's inputs.

    `QuantizeLinear` is not used: onnxruntime moves and fuses the nodes around
    it, and drops a `Relu` before it.

    Args:
        x: Inputs in float32.
        kernel: The kernel, which says how inputs are quantized.
        axes: The axes of the inputs that share a scale, if it is dynamic.
    """
    if kernel.activations is None:
        return x
    stored: Any = kernel.data
    if formats.get(stored.weights).is_integer:
        most = formats.get("int8").max
        scale = _dynamic_scale(x, axes, most)
        return (x / scale).op("Clip", -most, most).op("Round") * scale
    most = formats.get(INPUTS).max
    if kernel.activations == "static":
        seen = np.float32(kernel.inputs_scale)
        scale = x.graph.constant(seen, "inputs_scale")
    else:
        scale = _dynamic_scale(x, axes, most)
    # A cast that saturates does so too, but not in every reader.
    clipped = (x / scale).op("Clip", -most, most)
    codes = clipped.op("Cast", to=onnx_type(INPUTS), dtype=INPUTS, saturate=1)
    return codes.cast("float32") * scale


def _variable(layer: keras.Layer) -> keras.Variable:
    """Return a layer's kernel or embedding table, without LoRA adapters."""
    if hasattr(layer, "embeddings"):
        return variable_values.stored_embeddings(layer)
    if hasattr(layer, "pointwise_kernel"):
        return layer.pointwise_kernel
    return variable_values.stored_kernel(layer)


def _dynamic_scale(x: Value, axes: Sequence[int], most: float) -> Value:
    """Add nodes that compute the scale `amax / most`, which is never 0."""
    magnitude = x.op("Abs")
    amax = magnitude.reduce("Max", axes) if len(axes) else magnitude
    scale = amax / most
    # A scale of 0 would cause a division of 0 by 0.
    least = float(np.finfo("float32").smallest_normal)
    return (scale < least).where(least, scale)


def _dequantized(codes: Value, stored: StoredKernel, kept: int) -> Value:
    """Add a `DequantizeLinear` node; `kept` is the axis not summed over."""
    scale, options = _scales(stored, kept)
    given = codes.graph.constant(scale, "kernel_scale")
    return codes.op("DequantizeLinear", given, dtype="float32", **options)


def _scales(stored: StoredKernel, kept: int) -> tuple[Array, dict[str, int]]:
    """Return scales, and attributes of the `DequantizeLinear` node for them."""
    if stored.granularity == "tensor":
        return stored.scale.reshape(()), {}
    if stored.granularity == "channel":
        return stored.matrix_scale.reshape(-1), {"axis": kept}
    rows = as_matrix(stored.codes, stored.axes).shape[0]
    of_rows, of_columns = tile_of(stored.granularity) or (BLOCK, BLOCK)
    spread = np.repeat(stored.scale, of_rows, axis=0)[:rows]
    scale = spread if kept == 0 else np.ascontiguousarray(spread.T)
    return scale, {"axis": 1 - kept, "block_size": of_columns}


def _row_scales(stored: StoredKernel, indices: Value) -> Value:
    """Add nodes for the scales of the looked-up rows of a table."""
    constant = indices.graph.constant
    if stored.granularity == "tensor":
        return constant(stored.scale.reshape(()), "embeddings_scale")
    if stored.granularity == "channel":
        scale = constant(stored.scale, "embeddings_scale")
        if stored.scale.shape[0] == 1:
            return scale.reshape(-1)
        return scale.op("Gather", indices, axis=0)
    columns = stored.codes.shape[1]
    words, of_columns = tile_of(stored.granularity) or (BLOCK, BLOCK)
    spread = np.repeat(stored.scale, of_columns, axis=1)[:, :columns]
    scale = constant(spread, "embeddings_scale")
    if words > 1:
        indices = indices / np.asarray(words, indices.dtype)
    return scale.op("Gather", indices, axis=0)
