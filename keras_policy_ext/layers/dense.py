"""The float8 layers `Dense` and `EinsumDense`."""

from __future__ import annotations

import keras
from keras import ops

from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.contractions import bank_axis, equations
from keras_policy_ext.layers import lora
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.mixin import Float8Mixin, activated
from keras_policy_ext.layers.stock_attributes import StockAttributes
from keras_policy_ext.stored_kernels import Axes


@drop_in
class Dense(StockAttributes, Float8Mixin, keras.layers.Dense):
    """`keras.layers.Dense` that can follow a float8 policy.

    Examples:
        >>> layer = kpe.layers.Dense(8, dtype="float8_from_mixed_bfloat16")
        >>> outputs = layer(np.ones((4, 16), "float32"))
        >>> layer.quantization_mode, layer.compute_dtype
        ('float8', 'bfloat16')
    """

    float8_kernels = ("kernel",)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Compute `activation(inputs @ kernel + bias)`.

        Args:
            inputs: (..., in), floating.
            training: Whether to observe amaxes.

        Returns:
            (..., units), in the compute dtype.
        """
        if self.float8_policy is None:
            return super().call(inputs, training=training)
        return _einsum_call(self, "...x,xy->...y", inputs, training)


@drop_in
class EinsumDense(StockAttributes, Float8Mixin, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` that can follow a float8 policy."""

    float8_kernels = ("kernel",)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Compute `activation(einsum(equation, inputs, kernel) + bias)`.

        Args:
            inputs: Floating, with the axes of the equation.
            training: Whether to observe amaxes.

        Returns:
            The outputs, in the compute dtype.
        """
        if self.float8_policy is None:
            return super().call(inputs, training=training)
        return _einsum_call(self, self.equation, inputs, training)

    @classmethod
    @override
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        # The equation says what is summed.
        first, second, out = equations.split(layer.equation.replace("...", ""))
        summed = [letter for letter in first if letter in second]
        summed += [letter for letter in second if letter not in first + out]
        summed = [letter for letter in summed if letter not in out]
        free = [letter for letter in out if letter in second]
        return Axes(
            tuple(map(second.index, summed)), tuple(map(second.index, free))
        )

    @classmethod
    @override
    def float8_bank_axis(
        cls, layer: keras.Layer, kernel: keras.Variable
    ) -> int | None:
        return bank_axis(layer.equation.replace("...", ""))


def _einsum_call(
    layer: keras.Layer, equation: str, inputs: Tensor, training: bool | None
) -> Tensor:
    """Compute a layer's einsum in float8; add LoRA, bias and activation."""
    inputs = layer.convert_input(inputs)
    kernel = variable_values.stored_kernel(layer)
    bias = layer.bias
    if bias is not None:
        bias = layer.convert_input(ops.convert_to_tensor(bias))
    if not layer.lora_enabled:
        x = layer.float8_einsum(equation, inputs, kernel, training, bias=bias)
        return activated(layer.activation, x)
    inputs = ops.convert_to_tensor(inputs, sparse=False)
    x = layer.float8_einsum(equation, inputs, kernel, training)
    x = ops.add(x, lora.einsum_adapter(layer, equation, inputs))
    x = x if bias is None else ops.add(x, bias)
    return activated(layer.activation, x)
