"""Embeddings that are stored in float8: rows are looked up as codes."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.stored_kernels import BLOCK, Axes


@drop_in
class Embedding(Float8Mixin, keras.layers.Embedding):
    """`keras.layers.Embedding` that can be frozen.

    It multiplies nothing, and so it follows no policy to train under.
    """

    float8_kernels = ()
    float8_replaces = ("call", "embeddings")
    float8_trains = False

    def call(self, inputs: Tensor) -> Tensor:
        """Look up rows.

        Args:
            inputs: Integers of any shape.

        Returns:
            (..., output_dim), in the compute dtype.
        """
        if not self.is_frozen:
            return super().call(inputs)
        return look_up(self, inputs)

    @classmethod
    def float8_axes(cls, layer: Any, kernel: Any) -> Axes:
        """See `Float8Mixin.float8_axes`; a word of the vocabulary is kept."""
        return Axes((1,), (0,))

    @classmethod
    def is_stored_kernel(cls, layer: Any, variable: keras.Variable) -> bool:
        """See `Float8Mixin.is_stored_kernel`."""
        return variable.name == "embeddings"


def look_up(layer: Any, inputs: Tensor) -> Tensor:
    """Rows of embeddings that are stored, with the share of adapters.

    Args:
        layer: An embedding layer that is frozen.
        inputs: Integers of any shape.

    Returns:
        (..., output_dim), in the compute dtype.
    """
    if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
        inputs = ops.cast(inputs, "int32")
    variable = variable_values.stored_embeddings(layer)
    codes, scale, *_ = variable.constants
    rows = ops.take(codes, inputs, axis=0)
    numbers = backends.current().numbers(rows, variable.weights)
    x = ops.multiply(numbers, _scale_of(scale, inputs, variable))
    x = ops.cast(x, layer.compute_dtype)
    if not layer.lora_enabled:
        return x
    a, b = (
        ops.cast(ops.convert_to_tensor(factor), layer.compute_dtype)
        for factor in (layer.lora_embeddings_a, layer.lora_embeddings_b)
    )
    adapter = ops.matmul(ops.take(a, inputs, axis=0), b)
    share = layer.lora_alpha / layer.lora_rank
    return ops.add(x, ops.multiply(adapter, share))


def _scale_of(scale: Tensor, inputs: Tensor, variable: Any) -> Tensor:
    """The scales of rows, to go with (..., output_dim)."""
    if variable.granularity == "tensor":
        return ops.reshape(scale, ())
    if variable.granularity == "channel":
        return ops.take(scale, inputs, axis=0)
    rows = ops.take(scale, ops.floor_divide(inputs, BLOCK), axis=0)
    whole = backends.current().repeat(rows, BLOCK, -1)
    return whole[..., : variable.shape[1]]
