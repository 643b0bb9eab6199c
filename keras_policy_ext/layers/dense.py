"""The float8 layers `Dense` and `EinsumDense`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext import bases
from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.contractions import bank_axis, equations
from keras_policy_ext.layers import lora
from keras_policy_ext.layers.controller import with_bias
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.mixin import Float8Mixin, activated
from keras_policy_ext.layers.operands import contraction_of_tensors
from keras_policy_ext.stored_kernels import Axes


class _View:
    """An attribute that shows a scale or history under Keras's name.

    It has no setter. A layer that Keras quantizes to int8 has a variable of
    the same name, which Python finds first.
    """

    def __init__(self, operand: str, kind: str):
        self.operand = operand
        self.kind = kind  # "scale" or "amax_history".

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:  # As for a property that is read from the class.
            return self
        state = getattr(layer, "float8_state", None)
        variables = [] if state is None else state.matrices
        has_amaxes = bool(variables) and variables[0].observes_amaxes
        if layer.float8_policy is None or not has_amaxes:
            raise AttributeError(
                f"Layer {layer.name!r} has no {self.name!r}: its recipe keeps "
                f"no amaxes. Received: the policy {layer.dtype_policy!r}. "
                "Allowed: a float8 policy with delayed scaling."
            )
        variable = variables[0]  # Such a layer has one kernel.
        layout, rows = variable.rows_layout, variable.rows_of(self.operand)
        # Without a bank the operand has one row: no axis of matrices then.
        index: Any = rows if variable.matrix_count > 1 else rows.start
        matrix = variable_values.value_without_autocast(variable)
        matrix = ops.stop_gradient(matrix)
        if self.kind == "amax_history":
            return layout.history(matrix)[index]
        scale = layout.scale(matrix)[index]
        return ops.where(ops.greater(scale, 0.0), scale, 1.0)


class StockAttributes(bases.MixedInto):
    """A mixin that shows scales and histories under Keras's names.

    They are tensors to read. A scale is float32 (), the last one used or 1. An
    amax history is float32 (length,), newest at index 0. A bank of matrices has
    one more axis in front, of its matrices.
    """

    inputs_scale = _View("inputs", "scale")
    inputs_amax_history = _View("inputs", "amax_history")
    kernel_scale = _View("kernel", "scale")
    kernel_amax_history = _View("kernel", "amax_history")
    outputs_grad_scale = _View("outputs_grad", "scale")
    outputs_grad_amax_history = _View("outputs_grad", "amax_history")


class _OneEinsum(StockAttributes, Float8Mixin):
    """The common base of `Dense` and `EinsumDense`."""

    float8_kernels = ("kernel",)

    @property
    def _equation(self) -> str:  # Of `Dense`.
        return "...x,xy->...y"

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        """Compute `activation(einsum(inputs, kernel) + bias)`.

        Args:
            inputs: Floating; for `Dense` (..., in), for `EinsumDense` with the
                axes of its equation.
            training: Whether to observe amaxes.

        Returns:
            The outputs, in the compute dtype; for `Dense` (..., units).
        """
        layer: Any = self
        controller = self.float8_controller
        if controller.current_policy is None:
            stock: Any = super()
            return stock.call(inputs, training=training)
        kernel = variable_values.stored_kernel(layer)
        inputs = ops.convert_to_tensor(inputs, sparse=False)
        contraction = contraction_of_tensors(self._equation, inputs, kernel)
        # The controller casts the inputs, and adds the bias.
        operands = contraction, inputs, kernel
        bias, dtype = layer.bias, layer.compute_dtype
        if not layer.lora_enabled:
            x = controller.contract(*operands, training, dtype, bias)
            return activated(layer.activation, x)
        x = controller.contract(*operands, training, dtype)
        inputs = self.convert_input(inputs)
        x = ops.add(x, lora.einsum_adapter(layer, self._equation, inputs))
        return activated(layer.activation, with_bias(x, bias))


@drop_in
class Dense(_OneEinsum, keras.layers.Dense):
    """`keras.layers.Dense` that can follow a float8 policy.

    Examples:
        >>> layer = kpe.layers.Dense(8, dtype="float8_from_mixed_bfloat16")
        >>> outputs = layer(np.ones((4, 16), "float32"))
        >>> layer.quantization_mode, layer.compute_dtype
        ('float8', 'bfloat16')
    """


@drop_in
class EinsumDense(_OneEinsum, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` that can follow a float8 policy."""

    @property
    def _equation(self) -> str:
        return str(self.equation)

    @classmethod
    @override
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        # Summed are the axes of both terms, and those of the kernel alone.
        first, second, out = equations.split(layer.equation.replace("...", ""))
        summed = [x for x in first if x in second and x not in out]
        summed += [x for x in second if x not in first + out]
        free = [letter for letter in out if letter in second]
        return Axes(
            summed=tuple(map(second.index, summed)),
            free=tuple(map(second.index, free)),
        )

    @classmethod
    @override
    def float8_bank_axis(
        cls, layer: keras.Layer, kernel: keras.Variable
    ) -> int | None:
        return bank_axis(layer.equation.replace("...", ""))
