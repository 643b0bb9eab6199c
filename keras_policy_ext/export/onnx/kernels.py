"""The kernels of layers as they go into a graph: one at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_policy_ext._keras import variable_values
from keras_policy_ext.export import kernels
from keras_policy_ext.export.kernels import Scheme
from keras_policy_ext.export.onnx.refused import Refused
from keras_policy_ext.export.report import Written
from keras_policy_ext.layers.drop_in import drop_in_of
from keras_policy_ext.stored_kernels import Axes, StoredKernel

Array = np.ndarray[Any, Any]

_NOT_FOUND = "its layer cannot be frozen"
"""Why a kernel stays float32."""


@dataclasses.dataclass(frozen=True)
class OnnxKernel:
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
        """The shape of the kernel in its layer."""
        data = self.data
        return (data.codes if isinstance(data, StoredKernel) else data).shape


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a model, and how they are stored.

    Attributes:
        found: Of the whole model, by the `id` of their variables.
        scheme: How those are stored that are not frozen, and how inputs are
            rounded.
        written: An entry for each weight that was read, by its `id`.
    """

    found: dict[int, kernels.ExportedKernel]
    scheme: Scheme
    written: dict[int, Written] = dataclasses.field(default_factory=dict)

    def of(self, layer: Any) -> OnnxKernel:
        """The kernel of a layer, read and quantized anew at each call.

        Raises:
            Refused: If the file cannot have it.
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
        self, variable: keras.Variable, reason: str = kernels.NO_KERNEL
    ) -> Array:
        """A weight that is no stored kernel, in float32."""
        wide = keras.ops.cast(variable, "float32")
        values = np.asarray(keras.ops.convert_to_numpy(wide))
        self._note(variable, "float32", reason, values.nbytes)
        return values

    def _float(
        self, layer: Any, variable: Any, found: kernels.ExportedKernel | None
    ) -> OnnxKernel:
        """A kernel that stays float32."""
        frozen = kernels.is_frozen(variable)
        if not frozen and not keras.backend.is_float_dtype(variable.dtype):
            raise Refused(
                f"its kernel is {variable.dtype}: Keras has quantized it",
                "kernels in a floating dtype, or frozen by this package",
            )
        values = kernels.float_value(layer, variable).astype("float32")
        reason = getattr(found, "left_out", None) or _NOT_FOUND
        self._note(variable, "float32", reason, values.nbytes)
        form = drop_in_of(type(layer))
        return OnnxKernel(values, form.float8_axes(layer, variable))

    def _note(self, variable: Any, dtype: str, reason: str, size: int) -> None:
        path = variable.path
        shape = tuple(variable.shape)
        self.written[id(variable)] = Written(
            path, path, shape, dtype, reason, size
        )


def _variable(layer: Any) -> keras.Variable:
    """Return the kernel or table of a layer, without adapters."""
    if hasattr(layer, "embeddings"):
        return variable_values.stored_embeddings(layer)
    if hasattr(layer, "pointwise_kernel"):
        return layer.pointwise_kernel
    return variable_values.stored_kernel(layer)
