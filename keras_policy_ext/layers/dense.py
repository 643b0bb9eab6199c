"""The float8 layers `Dense` and `EinsumDense`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.contractions import bank_axis, equations
from keras_policy_ext.layers import lora
from keras_policy_ext.layers.controller import with_bias
from keras_policy_ext.layers.drop_in import drop_in
from keras_policy_ext.layers.keras_names import KerasNames
from keras_policy_ext.layers.mixin import Float8Mixin, activated
from keras_policy_ext.layers.operands import contraction_of_tensors
from keras_policy_ext.stored_kernels import Axes


class _OneEinsum(KerasNames, Float8Mixin):
    """The common base of `Dense` and `EinsumDense`."""

    float8_kernels = ("kernel",)

    @property
    def _equation(self) -> str:
        layer: Any = self
        return str(layer.equation)

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
        bias = layer.bias
        if not layer.lora_enabled:
            # The controller casts the inputs, and adds the bias.
            x = controller.contract(
                contraction, inputs, kernel, training, bias=bias
            )
            return activated(layer.activation, x)
        x = controller.contract(contraction, inputs, kernel, training)
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

    _equation = "...x,xy->...y"


@drop_in
class EinsumDense(_OneEinsum, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` that can follow a float8 policy."""

    @classmethod
    @override
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        """Return the kernel's axes, as its equation sums them."""
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
        """Return the axis that tells matrices apart, or None."""
        return bank_axis(layer.equation.replace("...", ""))
