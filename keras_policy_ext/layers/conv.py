"""Convolution layers whose forward pass and gradients are in float8."""

from __future__ import annotations

import keras
from keras import ops

from keras_policy_ext import contractions
from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.layers import lora
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.mixin import Float8Mixin, activated
from keras_policy_ext.stored_kernels import Axes


class _Convolves(Float8Mixin):
    """The common base of all float8 convolution layers."""

    float8_kernels = ("kernel",)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Compute the convolution, add the bias, and apply the activation.

        Args:
            inputs: (batch, *spatial, channels), or channels first; floating.
            training: Whether to observe amaxes.

        Returns:
            (batch, *spatial, filters), or channels first, in the compute dtype.
        """
        if self.float8_policy is None:
            return super().call(inputs)
        x = self._convolve(self.convert_input(inputs), training)
        if self.use_bias:
            bias = self.convert_input(self.bias)
            if self.data_format != "channels_last":
                shape = (1, self.filters) + (1,) * self.rank
                bias = ops.reshape(bias, shape)
            x = ops.add(x, bias)
        return activated(self.activation, x)

    def _convolve(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Return the float8 convolution alone, without bias and activation."""
        raise NotImplementedError


class _Float8Conv(_Convolves):
    """The common base of `Conv1D`, `Conv2D` and `Conv3D`."""

    def _convolve(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Return the convolution in float8, with LoRA's share."""
        padding = self.padding
        if padding == "causal":  # Of `Conv1D` alone.
            widths = [(0, 0), (0, 0), (0, 0)]
            steps_axis = 1 if self.data_format == "channels_last" else 2
            padded = self.dilation_rate[0] * (self.kernel_size[0] - 1)
            widths[steps_axis] = (padded, 0)  # Before the first step alone.
            inputs = ops.pad(inputs, widths)
            padding = "valid"
        contraction = contractions.Conv(
            self.strides, padding, self.dilation_rate, self.data_format
        )
        kernel = variable_values.stored_kernel(self)
        contract = self.float8_controller.contract
        x = contract(contraction, inputs, kernel, training)
        if self.lora_enabled:
            arguments = contraction.arguments  # Those of `ops.conv`.
            x = ops.add(x, lora.conv_adapter(self, inputs, arguments))
        return x


class _Float8ConvTranspose(_Convolves):
    """The common base of the transposed convolutions of rank 1 to 3."""

    def _convolve(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Return the transposed convolution in float8."""
        contraction = contractions.ConvTranspose(
            self.strides,
            self.padding,
            self.dilation_rate,
            self.data_format,
            self.output_padding,
        )
        return self.float8_controller.contract(
            contraction, inputs, self.kernel, training
        )

    @classmethod
    @override
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        """Return its axes; the filters come before the channels."""
        *window, filters, channels = range(len(kernel.shape))
        return Axes(summed=(*window, channels), free=(filters,))


class _Float8SeparableConv(_Convolves):
    """The common base of `SeparableConv1D` and `SeparableConv2D`.

    Only the pointwise convolution is in float8; it sums over all channels. The
    depthwise one sums over the few elements of a window.
    """

    float8_kernels = ("pointwise_kernel",)

    def _convolve(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Convolve each channel in floats, then all in float8."""
        x = ops.depthwise_conv(
            inputs,
            self.convert_input(self.depthwise_kernel),
            strides=self.strides,
            padding=self.padding,
            data_format=self.data_format,
            dilation_rate=self.dilation_rate,
        )
        ones = (1,) * self.rank  # Strides, dilation, and size of the kernel.
        contraction = contractions.Conv(ones, "valid", ones, self.data_format)
        return self.float8_controller.contract(
            contraction, x, self.pointwise_kernel, training
        )


@drop_in
class Conv1D(_Float8Conv, keras.layers.Conv1D):
    """`keras.layers.Conv1D` that can follow a float8 policy."""


@drop_in
class Conv2D(_Float8Conv, keras.layers.Conv2D):
    """`keras.layers.Conv2D` that can follow a float8 policy."""


@drop_in
class Conv3D(_Float8Conv, keras.layers.Conv3D):
    """`keras.layers.Conv3D` that can follow a float8 policy."""


@drop_in
class Conv1DTranspose(_Float8ConvTranspose, keras.layers.Conv1DTranspose):
    """`keras.layers.Conv1DTranspose` that can follow a float8 policy."""


@drop_in
class Conv2DTranspose(_Float8ConvTranspose, keras.layers.Conv2DTranspose):
    """`keras.layers.Conv2DTranspose` that can follow a float8 policy."""


@drop_in
class Conv3DTranspose(_Float8ConvTranspose, keras.layers.Conv3DTranspose):
    """`keras.layers.Conv3DTranspose` that can follow a float8 policy."""


@drop_in
class SeparableConv1D(_Float8SeparableConv, keras.layers.SeparableConv1D):
    """`keras.layers.SeparableConv1D` that can follow a float8 policy."""


@drop_in
class SeparableConv2D(_Float8SeparableConv, keras.layers.SeparableConv2D):
    """`keras.layers.SeparableConv2D` that can follow a float8 policy."""
