"""Convolutions in float8: forward and both gradients quantized."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext import kernels
from keras_policy_ext._keras import variable_values
from keras_policy_ext.layers import lora
from keras_policy_ext.layers.activated import activated
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.public_weights import KernelInFloats

Tensor = Any


class _Float8Conv(KernelInFloats, Float8Mixin):
    """What the convolutions of every rank share."""

    float8_kernels = ("kernel",)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """`activation(conv(inputs, kernel) + bias)`.

        Args:
            inputs: (batch, *spatial, channels), or channels first; floating.
            training: Whether amaxes are observed.

        Returns:
            (batch, *spatial, filters), or channels first, in the compute
            dtype.
        """
        if self.float8_policy is None:
            return super().call(inputs)
        inputs = self.convert_input(inputs)
        padding = self.padding
        if padding == "causal":
            widths = [(0, 0), (0, 0), (0, 0)]
            axis = 1 if self.data_format == "channels_last" else 2
            before = self.dilation_rate[0] * (self.kernel_size[0] - 1)
            widths[axis] = (before, 0)
            inputs = ops.pad(inputs, widths)
            padding = "valid"
        contraction = kernels.Conv(
            self.strides, padding, self.dilation_rate, self.data_format
        )
        kernel = variable_values.stored_kernel(self)
        x = self._contract(contraction, inputs, kernel, training)
        if self.lora_enabled:
            arguments = contraction.arguments
            x = ops.add(x, lora.conv_adapter(self, inputs, arguments))
        if self.use_bias:
            x = ops.add(x, self._aligned_bias())
        return activated(self.activation, x)

    def _aligned_bias(self) -> Tensor:
        bias = self.convert_input(ops.convert_to_tensor(self.bias))
        if self.data_format == "channels_last":
            return bias
        return ops.reshape(bias, (1, self.filters) + (1,) * self.rank)


@drop_in
class Conv1D(_Float8Conv, keras.layers.Conv1D):
    """`keras.layers.Conv1D` that can follow a float8 policy."""


@drop_in
class Conv2D(_Float8Conv, keras.layers.Conv2D):
    """`keras.layers.Conv2D` that can follow a float8 policy."""


@drop_in
class Conv3D(_Float8Conv, keras.layers.Conv3D):
    """`keras.layers.Conv3D` that can follow a float8 policy."""
