"""Embedding layers with float8 projections or float8 storage."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.stored_kernels import Axes, tile_of


@drop_in
class ReversibleEmbedding(Float8Mixin, keras.layers.ReversibleEmbedding):
    """`keras.layers.ReversibleEmbedding` that can follow a float8 policy.

    The projection, `reverse=True`, is then in float8: forward and both
    gradients. The lookup is as in Keras.
    """

    float8_kernels = ("embeddings", "reverse_embeddings")
    float8_replaces = ("call", "embeddings", "reverse_embeddings")

    def call(
        self,
        inputs: Tensor,
        reverse: bool = False,
        training: bool | None = None,
    ) -> Tensor:
        """Look up embeddings or, with `reverse`, project inputs to logits.

        Args:
            inputs: Integers of any shape; with `reverse` floating,
                (..., output_dim).
            reverse: Whether to project instead.
            training: Whether to observe amaxes.

        Returns:
            (..., output_dim), or with `reverse` (..., input_dim). In the
            compute dtype; logits in `reverse_dtype` if that is set.
        """
        if not reverse and self.is_frozen:
            return look_up(self, inputs)
        if not reverse or self.float8_policy is None:
            return super().call(inputs, reverse=reverse)
        dtype = self.reverse_dtype or self.compute_dtype
        logits = self._float8_logits(ops.cast(inputs, dtype), training)
        if self.logit_soft_cap is None:
            return logits
        cap = self.logit_soft_cap
        return ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)

    def compute_output_spec(
        self,
        inputs: Tensor,
        reverse: bool = False,
        training: bool | None = None,
    ) -> Any:
        """Return the output spec; logits have the dtype that `call` gives."""
        spec = super().compute_output_spec(inputs, reverse=reverse)
        if not reverse or self.float8_policy is None:
            return spec
        dtype = self.reverse_dtype or self.compute_dtype
        return keras.KerasTensor(spec.shape, dtype=dtype)

    def quantized_call(
        self,
        inputs: Tensor,
        reverse: bool = False,
        training: bool | None = None,
    ) -> Tensor:
        """Call the layer for Keras, which calls this in a quantization mode."""
        if self.float8_policy is not None:
            return self.call(inputs, reverse, training)
        stock: Any = keras.layers.ReversibleEmbedding
        return stock.quantized_call(self, inputs, reverse=reverse)

    @classmethod
    @override
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        """Return the table's axes; that of the vocabulary is free."""
        if kernel.name == "reverse_embeddings":
            return Axes(summed=(0,), free=(1,))
        return Axes(summed=(1,), free=(0,))

    @classmethod
    @override
    def is_stored_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True for both tables, also if only looked up."""
        return variable.name in cls.float8_kernels

    @classmethod
    @override
    def is_float8_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True for the table that projects to logits."""
        tied = "embeddings" if layer.tie_weights else "reverse_embeddings"
        return variable.name == tied

    def _float8_logits(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Return the outputs of the reverse projection, from float8."""
        if self.tie_weights:
            kernel = variable_values.stored_embeddings(self)
            equation = "...x,yx->...y"
        else:
            kernel = self.reverse_embeddings
            equation = "...x,xy->...y"
        logits = self.float8_einsum(
            equation, inputs, kernel, training, dtype=inputs.dtype
        )
        # LoRA adapts `embeddings`, which project only if they are tied.
        if self.tie_weights and self.lora_enabled:
            logits = ops.add(logits, self._adapter(inputs))
        return logits

    def _adapter(self, inputs: Tensor) -> Tensor:
        """Return what LoRA adds to the logits, in the dtype of the inputs."""
        a = ops.cast(self.lora_embeddings_a, inputs.dtype)
        b = ops.cast(self.lora_embeddings_b, inputs.dtype)
        x = ops.matmul(ops.matmul(inputs, ops.transpose(b)), ops.transpose(a))
        return ops.multiply(x, self.lora_alpha / self.lora_rank)


@drop_in
class Embedding(Float8Mixin, keras.layers.Embedding):
    """`keras.layers.Embedding` whose embeddings can be stored in float8.

    It has no matmul, so it follows no policy in training.
    """

    float8_kernels = ()
    float8_replaces = ("call", "embeddings")
    float8_trains = False

    def call(self, inputs: Tensor) -> Tensor:
        """Return the embeddings of integer inputs.

        Args:
            inputs: Integers of any shape.

        Returns:
            (..., output_dim), in the compute dtype.
        """
        if not self.is_frozen:
            return super().call(inputs)
        return look_up(self, inputs)

    @classmethod
    @override
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        # The axis of the vocabulary is free: each word may have a scale.
        return Axes(summed=(1,), free=(0,))

    @classmethod
    @override
    def is_stored_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        return variable.name == "embeddings"


def look_up(layer: keras.Layer, inputs: Tensor) -> Tensor:
    """Return stored embeddings as (..., output_dim), with LoRA's share."""
    if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
        inputs = ops.cast(inputs, "int32")
    variable = variable_values.stored_embeddings(layer)
    codes, scale, *_ = variable.constants  # Without the scale of the inputs.
    codes = ops.take(codes, inputs, axis=0)
    numbers = backends.current.numbers(codes, format_name=variable.weights)
    x = ops.multiply(numbers, _scale_of(scale, inputs, variable))
    x = ops.cast(x, layer.compute_dtype)
    if not layer.lora_enabled:
        return x
    a = ops.cast(layer.lora_embeddings_a, layer.compute_dtype)
    b = ops.cast(layer.lora_embeddings_b, layer.compute_dtype)
    adapter = ops.matmul(ops.take(a, inputs, axis=0), b)
    share = layer.lora_alpha / layer.lora_rank
    return ops.add(x, ops.multiply(adapter, share))


def _scale_of(
    scale: Tensor, inputs: Tensor, variable: keras.Variable
) -> Tensor:
    """Return the scales of looked-up rows, to multiply (..., output_dim)."""
    if variable.granularity == "tensor":
        return ops.reshape(scale, ())
    if variable.granularity == "channel":
        return ops.take(scale, inputs, axis=0)
    # One scale for so many rows and columns of the table.
    words, columns = tile_of(variable.granularity) or (1, 1)
    places = inputs if words == 1 else ops.floor_divide(inputs, words)
    rows = ops.take(scale, places, axis=0)
    per_entry = backends.current.repeat(rows, columns, -1)
    return per_entry[..., : variable.shape[1]]
