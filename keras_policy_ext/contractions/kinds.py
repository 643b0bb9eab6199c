"""Contractions: einsums and convolutions, without their scaling."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Protocol

import keras
from keras import ops

from keras_policy_ext._keras import transposed_windows
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends import emulated
from keras_policy_ext.backends.matmuls import (
    Choice,
    Convolutions,
    Engine,
    MatmulKernel,
    Request,
    Shapes,
)
from keras_policy_ext.contractions import equations
from keras_policy_ext.contractions.equations import (
    EinsumForm,
    axes_alone,
    form_of,
)
from keras_policy_ext.numerics import primitives
from keras_policy_ext.numerics.quantized import Quantized
from keras_policy_ext.numerics.tiles import tile_amax
from keras_policy_ext.recipes import EACH_MATRIX, Quantization

AxisNames = Sequence[tuple[str, ...]]
"""For each axis of a tensor the mesh axes that shard it, perhaps none."""


class Contraction(Hashable, Protocol):
    """A contraction: three matmuls of inputs, kernel and outputs gradient.

    Its three matmuls take operands as `read` returns them: quantized, or
    unchanged if the recipe's quantization is None.
    """

    @property
    def reads_what_is_quantized(self) -> bool:
        """True if the matmuls read each quantized matrix as a whole."""

    @property
    def reads_one_matrix(self) -> bool:
        """True if `reads_what_is_quantized` and no operand is a batch."""

    def choose(
        self,
        engine: Engine,
        matmul: str,
        a: Quantization | None,
        b: Quantization | None,
        prefer: str | None = None,
        for_xla: bool = False,
    ) -> tuple[Any, Choice]:
        """Select the kernel for operands quantized as `a` and `b`."""

    def quantization(
        self, requested: Quantization | None
    ) -> Quantization | None:
        """Return how this contraction can do the quantization of a recipe."""

    def summed_axes(self, rank: int) -> tuple[int, ...]:
        """Return the axes of the inputs that one output depends on.

        For a convolution, whose windows overlap: all axes but the first.
        """

    def operand(
        self, name: str, x: Tensor, quantization: Quantization | None
    ) -> Tensor:
        """Return the operand of this name to quantize, perhaps as a matrix."""

    def kernel_axes(
        self, axes: AxisNames, quantization: Quantization | None
    ) -> tuple[Any, ...]:
        """Convert an entry per kernel axis to one per axis of `operand`.

        It is None for an axis whose shards are not contiguous.
        """

    def is_transposed_in_memory(self, name: str) -> bool:
        """Return True if an operand is in memory as its matrix transposed."""

    def read(self, name: str, quantized: Quantized) -> Quantized:
        """Return a quantized operand as the matrix of its first matmul."""

    def transposed(self, read: Quantized) -> Quantized:
        """Return a `read` operand as the matrix of its second matmul."""

    def product(
        self,
        matmul: str,
        kernel: Any,
        a: Quantized,
        b: Quantized,
        shapes: Shapes,
        dtype: str,
    ) -> Tensor:
        """Run a matmul; return the outputs, or the gradient of an operand."""


@dataclasses.dataclass(frozen=True)
class Einsum:
    """The contraction `outputs = einsum(equation, inputs, kernel)`.

    Attributes:
        equation: One letter per axis, no ellipsis, e.g. `"abc,cd->abd"`.
    """

    equation: str

    reads_what_is_quantized: ClassVar[bool] = True

    @functools.cached_property
    def form(self) -> EinsumForm:
        """The `EinsumForm` of the equation: its letters by role."""
        return form_of(self.equation)

    @property
    def reads_one_matrix(self) -> bool:
        """True if no axis is in both operands and the output."""
        return not self.form.batch

    def choose(
        self,
        engine: Engine,
        matmul: str,
        a: Quantization | None,
        b: Quantization | None,
        prefer: str | None = None,
        for_xla: bool = False,
    ) -> tuple[MatmulKernel, Choice]:
        """Select a matmul kernel for operands quantized as `a` and `b`."""
        if a is None or b is None:
            reason = f"{matmul} is not in float8 under this recipe"
            return engine.plain, Choice("emulated", reason)
        batched = bool(self.form.batch)
        return engine.select(Request(matmul, a, b, batched, prefer, for_xla))

    def quantization(
        self, requested: Quantization | None
    ) -> Quantization | None:
        """Return a recipe's quantization unchanged: an einsum can do any."""
        return requested

    def summed_axes(self, rank: int) -> tuple[int, ...]:
        """Return the inputs' axes that one output may depend on."""
        first, _, out = equations.split(self.equation)
        return tuple(i for i, letter in enumerate(first) if letter not in out)

    def operand(
        self, name: str, x: Tensor, quantization: Quantization | None
    ) -> Tensor:
        """Return the tensor to quantize: an operand as a matrix or as is."""
        # A tensor with one scale keeps its own axes while it is quantized, so
        # that what is moved to make a matrix of it is narrow.
        form = self.form
        if axes_alone(form, name):
            is_wide = keras.backend.standardize_dtype(x.dtype) == "float64"
            dtype = "float64" if quantization is None and is_wide else "float32"
            x = form.summed(name, x, dtype)
        in_axes = quantization is None or quantization.keeps_axes
        return x if in_axes else form.matrix(name, x)

    def kernel_axes(
        self, axes: AxisNames, quantization: Quantization | None
    ) -> tuple[Any, ...]:
        """Convert a list with an entry per kernel axis to `operand`'s axes."""
        if not in_one_scale(quantization):
            return self.form.matrix_axes("kernel", axes)
        form = self.form
        # `operand` has summed over the axes that the kernel alone has.
        entries = zip(form.second, axes, strict=True)
        return tuple(each for c, each in entries if c in form.first + form.out)

    def is_transposed_in_memory(self, name: str) -> bool:
        """Return True if an operand is in memory as its matrix transposed."""
        return self.form.is_transposed_in_memory(name)

    def read(self, name: str, quantized: Quantized) -> Quantized:
        """Return a quantized operand as the matrix of its first matmul."""
        quantization = quantized.quantization
        if quantization is not None and not quantization.keeps_axes:
            return quantized  # It was made a matrix before.
        return quantized.with_values(self.form.matrix(name, quantized.values))

    def transposed(self, read: Quantized) -> Quantized:
        """Return a `read` operand as the matrix of its second matmul."""
        return read.transposed

    def of_columns(self, bias: Tensor, shapes: Shapes) -> Tensor | None:
        """Return a bias as a vector with one value per output column, or None.

        None if the bias varies between rows, or if columns share a value.
        """
        form, sizes = self.form, self.form.sizes(*shapes)
        shape = [sizes[c] for c in form.columns]
        if list(bias.shape) != shape or not form.out.endswith(form.columns):
            return None
        return primitives.current.reshape(bias, (-1,))

    def product(
        self,
        matmul: str,
        kernel: MatmulKernel,
        a: Quantized,
        b: Quantized,
        shapes: Shapes,
        dtype: str,
    ) -> Tensor:
        """Run a matmul; return the outputs, or the gradient of an operand."""
        # Only the outputs may be summed in fewer bits than float32.
        matrix = kernel.multiply(a, b, dtype, fast=matmul == "forward")
        return self.form.result(matmul, matrix, self.form.sizes(*shapes))


@dataclasses.dataclass(frozen=True)
class EinsumOfBank(Einsum):
    """An einsum with a bank of weights, such as the matrices of experts.

    Each matrix of its operands has a scale where a recipe has one per tensor.

    Attributes:
        states: The number of matrices with a state each; 1 for one state of
            all, or none.
    """

    states: int = 1

    def quantization(
        self, requested: Quantization | None
    ) -> Quantization | None:
        """Return a recipe's quantization, with a scale for each matrix."""
        return None if requested is None else requested.of_each_matrix

    def amaxes(
        self, name: str, x: Tensor, quantization: Quantization | None
    ) -> Tensor:
        """Return the amax of each matrix of an operand, (matrices, 1, 1)."""
        matrix = self.form.matrix(name, x) if in_one_scale(quantization) else x
        return tile_amax(matrix, EACH_MATRIX)


def with_bank(contraction: Contraction, states: int = 1) -> Contraction:
    """Return a contraction of a weight; `EinsumOfBank` if that is a bank.

    The weight is a bank of matrices if it has an axis that the inputs and the
    outputs have too, an axis of the outputs alone, and an axis that is summed.
    For `states` see `EinsumOfBank`.
    """
    # A subclass reads its kernel in a way of its own, as `rnn.Gates` does.
    if type(contraction) is not Einsum:
        return contraction
    if not _bank_axes(contraction.equation):
        return contraction
    return EinsumOfBank(contraction.equation, states)


def bank_axis(equation: str) -> int | None:
    """Return the one axis of a weight that tells matrices apart, or None."""
    axes = _bank_axes(equation)
    return axes[0] if len(axes) == 1 else None


def _bank_axes(equation: str) -> list[int]:
    """Return the axes of a weight that tell matrices of a bank apart."""
    # Not from `form_of`: torch.compile warns about its cache.
    first, second, out = equations.split(equation)
    columns = (set(second) - set(first)) & set(out)
    contracted = (set(first) & set(second)) - set(out)
    if not columns or not contracted:
        return []
    return [i for i, c in enumerate(second) if c in first and c in out]


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution of rank 1, 2 or 3, with the arguments of `ops.conv`.

    Its operands have one scale each, whatever the recipe. A window is not a
    matrix, and no hardware has finer scales for convolutions.

    Attributes:
        strides: Per spatial axis.
        padding: `"valid"` or `"same"`.
        dilation_rate: Per spatial axis.
        data_format: `"channels_last"` or `"channels_first"`.

    Raises:
        ValueError: If an attribute has another value.
    """

    strides: tuple[int, ...]
    padding: str
    dilation_rate: tuple[int, ...]
    data_format: str

    reads_what_is_quantized: ClassVar[bool] = False
    reads_one_matrix: ClassVar[bool] = False
    is_transposed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raise if an attribute has a value that is not allowed."""
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

    def of(self, x: Tensor, w: Tensor) -> Tensor:
        """Compute Keras's convolution of `x` with the kernel `w`."""
        return ops.conv(x, w, **self.arguments)

    def choose(
        self,
        engine: Engine,
        matmul: str,
        a: Quantization | None,
        b: Quantization | None,
        prefer: str | None = None,
        for_xla: bool = False,
    ) -> tuple[Convolutions, Choice]:
        """Select how to convolve operands quantized as `a` and `b`."""
        convolutions = engine.convolutions
        return convolutions, Choice("emulated", convolutions.reason)

    def quantization(
        self, requested: Quantization | None
    ) -> Quantization | None:
        """Return a recipe's quantization, with one scale per tensor."""
        return None if requested is None else requested.tensorwise

    def summed_axes(self, rank: int) -> tuple[int, ...]:
        """Return the inputs' axes that one output may depend on."""
        return tuple(range(1, rank))

    def operand(
        self, name: str, x: Tensor, quantization: Quantization | None
    ) -> Tensor:
        """Return the operand unchanged: a convolution needs its axes."""
        return x

    def kernel_axes(
        self, axes: AxisNames, quantization: Quantization | None
    ) -> tuple[Any, ...]:
        """Return `axes` as a tuple: a convolution keeps the kernel's axes."""
        return tuple(axes)

    def is_transposed_in_memory(self, name: str) -> bool:
        """Return False: a convolution reads no transposed matrix."""
        return False

    def read(self, name: str, quantized: Quantized) -> Quantized:
        """Return the quantized operand unchanged: its axes are needed."""
        return quantized

    def transposed(self, read: Quantized) -> Quantized:
        """Return the operand unchanged: convolutions transpose nothing."""
        return read

    def product(
        self,
        matmul: str,
        kernel: Convolutions,
        a: Quantized,
        b: Quantized,
        shapes: Shapes,
        dtype: str,
    ) -> Tensor:
        """Run a convolution; return the outputs, or an operand's gradient."""
        first, second = map(emulated.unscaled, (a, b))
        inputs_shape, kernel_shape = shapes
        if matmul == "forward":
            result = kernel.outputs(self, first, second)
        elif matmul == "inputs_grad":
            result = kernel.inputs_grad(self, first, second, inputs_shape)
        else:
            result = kernel.kernel_grad(self, first, second, kernel_shape)
        return emulated.scaled(result, a, b, dtype)


@dataclasses.dataclass(frozen=True)
class ConvTranspose(Conv):
    """A transposed convolution, with the arguments of `ops.conv_transpose`.

    Attributes:
        output_padding: Per spatial axis; None to let Keras choose the size.
    """

    output_padding: tuple[int, ...] | None = None

    is_transposed: ClassVar[bool] = True

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `ops.conv_transpose`."""
        return {**super().arguments, "output_padding": self.output_padding}

    def of(self, x: Tensor, w: Tensor) -> Tensor:
        """Compute Keras's transposed convolution of `x` with the kernel `w`."""
        return ops.conv_transpose(x, w, **self.arguments)

    def around(self, kernel_size: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the zeros to add before and after the outputs, per axis.

        A negative number is a crop. It applies to the unpadded outputs, of size
        `(inputs - 1) * stride + (kernel - 1) * dilation + 1`. If "same" pads an
        odd number of zeros, the extra one is before, as in
        `jax.lax.conv_transpose`, up to the reach of the kernel.

        Args:
            kernel_size: Per spatial axis.
        """
        paddings = self.output_padding or (None,) * len(self.strides)
        axes = zip(
            kernel_size, self.strides, self.dilation_rate, paddings, strict=True
        )
        return [self._around_axis(*of_axis) for of_axis in axes]

    def _around_axis(
        self, kernel: int, stride: int, dilation: int, more: int | None
    ) -> tuple[int, int]:
        """Return what `around` has for an axis; `more` is output padding."""
        if transposed_windows.are_own():  # Keras before 3.15, on PyTorch.
            return transposed_windows.around_axis(
                kernel, stride, dilation, self.padding, more
            )
        reach = (kernel - 1) * dilation
        if self.padding == "valid":
            return 0, max(stride - reach - 1, 0) if more is None else more
        # Keras's outputs have the size `inputs * stride`, with output padding
        # `(inputs - 1) * stride + odd + more`. JAX pads the inputs by `zeros`
        # for it. By `reach` on both sides the outputs would be unpadded.
        odd = (reach + 1) % 2
        zeros = reach + (stride - 1 if more is None else odd - 1 + more)
        before = min((zeros + 1) // 2, reach)
        return before - reach, zeros - before - reach


def in_one_scale(quantization: Quantization | None) -> bool:
    """Return True if one scale, or none, lets an operand keep its axes."""
    return quantization is None or quantization.keeps_axes


_WORDS = {
    "padding": ("valid", "same"),
    "data_format": ("channels_last", "channels_first"),
}


def _is_per_axis(value: object) -> bool:
    """Return True for a tuple of one to three positive sizes."""
    return (
        isinstance(value, tuple)
        and 1 <= len(value) <= 3
        and all(isinstance(size, int) and size >= 1 for size in value)
    )


def _wrong(conv: Conv, name: str, allowed: str) -> str:
    """Return the message for an attribute that is not allowed."""
    return (
        f"`{name}` of this convolution is not valid. Received: {conv!r}. "
        f"Allowed: {name} {allowed}. For causal padding, pad the inputs first."
    )
