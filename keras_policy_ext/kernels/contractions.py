"""Contractions: what is multiplied, apart from how it is scaled."""

from __future__ import annotations

import dataclasses
from typing import Any

from keras import ops

from keras_policy_ext.kernels import einsum
from keras_policy_ext.kernels.contract import Engine, Quantized

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Einsum:
    """`outputs = einsum(equation, inputs, kernel)`.

    Attributes:
        equation: One letter per axis, no ellipsis, e.g. `"abc,cd->abd"`.
    """

    equation: str

    def forward(
        self, engine: Engine, x: Quantized, w: Quantized, dtype: str
    ) -> Tensor:
        """The outputs, in `dtype`."""
        return engine.einsum(self.equation, x, w, dtype, fast=True)

    def inputs_grad(
        self, engine: Engine, g: Quantized, w: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """The gradient of inputs of this shape, in `dtype`."""
        equation, axes = einsum.inputs_grad(self.equation)
        return _broadcast(engine.einsum(equation, g, w, dtype), axes, shape)

    def kernel_grad(
        self, engine: Engine, x: Quantized, g: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """The gradient of a kernel of this shape, in `dtype`."""
        equation, axes = einsum.kernel_grad(self.equation)
        return _broadcast(engine.einsum(equation, x, g, dtype), axes, shape)


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution of rank 1, 2 or 3, with the arguments of `ops.conv`.

    Attributes:
        strides: Per spatial axis.
        padding: `"valid"` or `"same"`.
        dilation_rate: Per spatial axis.
        data_format: `"channels_last"` or `"channels_first"`.
    """

    strides: tuple[int, ...]
    padding: str
    dilation_rate: tuple[int, ...]
    data_format: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `ops.conv`."""
        return {
            "strides": list(self.strides),
            "padding": self.padding,
            "dilation_rate": self.dilation_rate,
            "data_format": self.data_format,
        }

    def forward(
        self, engine: Engine, x: Quantized, w: Quantized, dtype: str
    ) -> Tensor:
        """The outputs, in `dtype`."""
        return engine.conv(self, x, w, dtype)

    def inputs_grad(
        self, engine: Engine, g: Quantized, w: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """The gradient of inputs of this shape, in `dtype`."""
        return engine.conv_inputs_grad(self, g, w, shape, dtype)

    def kernel_grad(
        self, engine: Engine, x: Quantized, g: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """The gradient of a kernel of this shape, in `dtype`."""
        return engine.conv_kernel_grad(self, x, g, shape, dtype)


def _broadcast(gradient: Tensor, axes: tuple[int, ...], shape: Any) -> Tensor:
    for axis in axes:
        gradient = ops.expand_dims(gradient, axis)
    return ops.broadcast_to(gradient, shape) if axes else gradient
