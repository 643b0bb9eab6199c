"""The kernels of layers as they go into a file: one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_policy_ext import stored_kernels
from keras_policy_ext._keras import variable_values
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.kernels import einsum
from keras_policy_ext.stored_kernels import Axes, StoredKernel

Array = np.ndarray[Any, Any]

_WITH_KERNEL = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Embedding,
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of a layer, and what becomes of the inputs of the layer.

    Attributes:
        data: Its codes and scales; its numbers, if it stays float32.
        axes: Which of its axes are summed.
        activations: None, `"dynamic"` or `"static"`.
        inputs_scale: The scale of the inputs, where it is static.
    """

    data: StoredKernel | Array
    axes: Axes
    activations: str | None = None
    inputs_scale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As the layer has it."""
        data = self.data
        return (data.codes if isinstance(data, StoredKernel) else data).shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """How kernels are stored that are not frozen.

    Attributes:
        weights: As for `stored_kernels.quantize`.
        granularity: As for `stored_kernels.quantize`.
        activations: None, or `"dynamic"`; `"static"` is refused.
        left_out: The ids of layers whose kernels stay float32.
        takes_blocks: Whether scales can be those of blocks, in frozen
            kernels too.
    """

    weights: str
    granularity: str
    activations: str | None
    left_out: frozenset[int]
    takes_blocks: bool

    def of(self, layer: Any) -> Kernel:
        """The kernel of a layer, read and quantized anew at each call.

        Raises:
            Refused: If the file cannot have it.
        """
        kernel = self._read(layer)
        granularity = getattr(kernel.data, "granularity", None)
        if granularity == "block" and not self.takes_blocks:
            raise Refused("its scales are those of blocks", "opset=21 or later")
        return kernel

    def _read(self, layer: Any) -> Kernel:
        variable = variable_of(layer)
        frozen = getattr(variable, "stored", None)
        if frozen is not None:
            return self._frozen(layer, variable, frozen)
        if not keras.backend.is_float_dtype(variable.dtype):
            raise Refused(
                f"its kernel is {variable.dtype}: Keras has quantized it",
                "kernels in a floating dtype, or frozen by this package",
            )
        axes = axes_of(layer)
        values = float32(variable) + adapters(layer)
        if id(layer) in self.left_out:
            return Kernel(values, axes)
        if self.activations == "static":
            raise Refused(
                "it is not frozen, and has no static scale of its inputs",
                "keras_policy_ext.freeze(model, activations='static') before "
                "the model is written, or activations='dynamic'",
            )
        stored = stored_kernels.quantize(
            values, axes, self.granularity, self.weights
        )
        return Kernel(stored, axes, self.activations)

    def _frozen(
        self, layer: Any, variable: Any, stored: StoredKernel
    ) -> Kernel:
        """The bytes of a frozen layer; with adapters, quantized again."""
        if getattr(layer, "lora_enabled", False):
            stored = stored_kernels.quantize(
                stored.dequantized() + adapters(layer),
                stored.axes,
                stored.granularity,
                stored.weights,
            )
        scale = variable.inputs_scale
        if scale is not None:
            scale = float(float32(scale))
        activations = layer.float8_policy.recipe.activations
        return Kernel(stored, stored.axes, activations, scale)


def float32(tensor: Any) -> Array:
    """A variable or tensor on the host."""
    wide = keras.ops.cast(tensor, "float32")
    return np.asarray(keras.ops.convert_to_numpy(wide))


def axes_of(layer: Any) -> Axes:
    """Which axes of the kernel of a layer are summed, and which are kept."""
    if hasattr(layer, "embeddings"):
        return Axes((1,), (0,))
    if hasattr(layer, "equation"):
        _, second, out = einsum.split(layer.equation.replace("...", ""))
        return Axes(
            tuple(i for i, axis in enumerate(second) if axis not in out),
            tuple(i for i, axis in enumerate(second) if axis in out),
        )
    rank = len(layer.kernel.shape)
    return Axes(tuple(range(rank - 1)), (rank - 1,))


def adapters(layer: Any) -> Array | float:
    """What LoRA adds to the kernel of a layer, in float32."""
    if not getattr(layer, "lora_enabled", False):
        return 0.0
    name = "embeddings" if hasattr(layer, "embeddings") else "kernel"
    a = float32(getattr(layer, f"lora_{name}_a"))
    b = float32(getattr(layer, f"lora_{name}_b"))
    return np.matmul(a, b) * np.float32(layer.lora_alpha / layer.lora_rank)


def has_kernel(layer: Any) -> bool:
    """Whether a layer has a kernel that can be stored and is not yet."""
    return isinstance(layer, _WITH_KERNEL) and not hasattr(
        variable_of(layer), "stored"
    )


def variable_of(layer: Any) -> keras.Variable:
    """What a layer multiplies with or looks up in, without adapters."""
    if hasattr(layer, "embeddings"):
        return variable_values.stored_embeddings(layer)
    return variable_values.stored_kernel(layer)
