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

    Raises:
        ValueError: If one of them is something else.
    """

    strides: tuple[int, ...]
    padding: str
    dilation_rate: tuple[int, ...]
    data_format: str

    def __post_init__(self) -> None:
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    _wrong(self, name, " or ".join(map(repr, allowed)))
                )
        for name in ("strides", "dilation_rate"):
            if not _is_per_axis(getattr(self, name)):
                raise ValueError(
                    _wrong(self, name, "a tuple of one to three integers >= 1")
                )
        if len(self.strides) != len(self.dilation_rate):
            raise ValueError(
                _wrong(self, "dilation_rate", "as many entries as in strides")
            )

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


_WORDS = {
    "padding": ("valid", "same"),
    "data_format": ("channels_last", "channels_first"),
}


def _is_per_axis(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and 1 <= len(value) <= 3
        and all(isinstance(size, int) and size >= 1 for size in value)
    )


def _wrong(conv: Conv, name: str, allowed: str) -> str:
    return (
        f"There is no such convolution. Received: {conv!r}. Allowed for "
        f"{name}: {allowed}. Causal padding is done to the inputs first."
    )


def _broadcast(gradient: Tensor, axes: tuple[int, ...], shape: Any) -> Tensor:
    for axis in axes:
        gradient = ops.expand_dims(gradient, axis)
    return ops.broadcast_to(gradient, shape) if axes else gradient
