"""Float8 contractions in `keras.ops`: emulated, and always right.

The engines of the frameworks derive from this one, add the gradient
machinery that `keras.ops` lacks, and replace what they do better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from keras import ops

from keras_policy_ext.kernels.contract import Choice, Quantized
from keras_policy_ext.kernels.contractions import Conv
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.rules import Prior, rule_of
from keras_policy_ext.recipes import Recipe

Tensor = Any


class AgnosticEngine:
    """Rounds to float8 numbers held in float32, multiplies in float32."""

    name = "keras.ops"

    def select(self, plan: Any) -> Choice:
        """Always emulated."""
        return Choice("emulated", "keras.ops has no float8 matmul")

    def is_compiling(self) -> bool:
        """See `Engine.is_compiling`; JAX and TensorFlow trace Python as is."""
        return False

    def traces_for_xla(self) -> bool:
        """See `Engine.traces_for_xla`."""
        return False

    def quantize(
        self, x: Tensor, scale: Tensor, dtype: str, native: bool
    ) -> Quantized:
        """See `Engine.quantize`."""
        quantize = casting.quantize if native else casting.quantize_float32
        return Quantized(quantize(x, scale, dtype), scale)

    def einsum(
        self,
        equation: str,
        a: Quantized,
        b: Quantized,
        dtype: str,
        fast: bool = False,
    ) -> Tensor:
        """See `Engine.einsum`."""
        product = ops.einsum(equation, float32(a), float32(b))
        return scaled(product, a, b, dtype)

    def conv(
        self, conv: Conv, x: Quantized, w: Quantized, dtype: str
    ) -> Tensor:
        """See `Engine.conv`."""
        return scaled(convolve(conv, float32(x), float32(w)), x, w, dtype)

    def conv_inputs_grad(
        self, conv: Conv, g: Quantized, w: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """See `Engine.conv_inputs_grad`."""
        kernel = float32(w)
        gradient = self.transpose(
            lambda x: convolve(conv, x, kernel), shape, float32(g)
        )
        return scaled(gradient, g, w, dtype)

    def conv_kernel_grad(
        self, conv: Conv, x: Quantized, g: Quantized, shape: Any, dtype: str
    ) -> Tensor:
        """See `Engine.conv_kernel_grad`."""
        inputs = float32(x)
        gradient = self.transpose(
            lambda w: convolve(conv, inputs, w), shape, float32(g)
        )
        return scaled(gradient, x, g, dtype)

    def transpose(
        self,
        function: Callable[[Tensor], Tensor],
        shape: Any,
        cotangent: Tensor,
    ) -> Tensor:
        """Apply the transpose of a linear function of a float32 tensor.

        Args:
            function: Linear in its argument.
            shape: Of that argument.
            cotangent: Of the shape of the function's result.

        Returns:
            Float32 tensor of shape `shape`.
        """
        raise NotImplementedError(
            f"The engine {self.name!r} cannot transpose a function. Use the "
            "engine of a framework: keras_policy_ext.kernels.engine()."
        )

    def prior(self, rule: Any, *state: Tensor) -> Prior:
        """What the state says before this step.

        Args:
            rule: That of a recipe with state.
            state: What the recipe has.

        Returns:
            `rule.prior(*state)`, or less where a choice is already made.
        """
        return rule.prior(*state)

    def settle(self, recipe: Recipe, value: Tensor, previous: Tensor) -> Tensor:
        """What a state becomes when `value` is assigned to it.

        Args:
            recipe: A recipe with state.
            value: An observation, a settled state, or zeros.
            previous: The settled state before.

        Returns:
            The settled state, on every replica the same.
        """
        return rule_of(recipe).settle(self.combine_replicas(value), previous)

    def combine_replicas(self, observation: Tensor) -> Tensor:
        """What all data-parallel replicas observed, where there are any.

        Args:
            observation: (rows, width), what this replica observed, or a
                settled state.

        Returns:
            (rows, width or more), for `Layout.settle`; the same on every
            replica.
        """
        return observation

    def step_by_step(self) -> AbstractContextManager[None]:
        """A block in which loops are run and not traced; no gradients.

        For what has to see the numbers of each step of a recurrent layer.
        """
        return nullcontext()

    def functions_step_by_step(self) -> AbstractContextManager[None]:
        """See `Engine.functions_step_by_step`; none is left traced here."""
        return nullcontext()

    def runs_now(self) -> bool:
        """See `Engine.runs_now`."""
        return True

    def keep_observations(self, variable: Any, tensor: Tensor) -> None:
        """Keep the observations of a state apart from its gradients.

        Where gradients are handed out there is nothing to keep apart.

        Args:
            variable: A state variable that has just got its value.
            tensor: That value.
        """

    def assigned(self, variable: Any, value: Tensor) -> Tensor:
        """What a state variable becomes when `value` is assigned to it.

        Args:
            variable: A state variable.
            value: An observation, a settled state, or zeros.

        Returns:
            The settled state, on every replica the same.
        """
        return self.settle(variable.recipe, value, variable.value)

    def earlier_observation(self, variable: Any) -> Tensor | None:
        """What was observed in micro-batches before, beside gradients.

        Args:
            variable: A state variable.

        Returns:
            Float32 (operands, width); None if there is nothing, or where the
            optimizer has it that accumulates gradients.
        """
        return None

    def put_earlier_observation(self, variable: Any, value: Any) -> None:
        """Put back what `earlier_observation` returned.

        Args:
            variable: A state variable.
            value: Array of its shape.
        """

    def known_value(self, variable: Any) -> Tensor | None:
        """What a state variable holds, where that can be read now.

        Args:
            variable: A state variable that is about to be used.

        Returns:
            Its value; None while it is traced, and where to read it would
            keep others waiting in each step.
        """
        return None

    def settle_observed(self, variables: Sequence[Any]) -> None:
        """Make what was observed of states part of them.

        Args:
            variables: State variables.

        Raises:
            ValueError: If the framework hands gradients out, instead of
                keeping them with the variables.
        """
        raise ValueError(
            f"On {self.name} gradients are not kept with the variables. "
            "Received: none. Allowed: gradients for all of "
            "`model.trainable_variables`, as taken in your training step; "
            "pass them on."
        )

    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """Whether a flag is true on every replica, where there are any.

        Args:
            flag: Bool scalar of this replica.

        Returns:
            The same on every replica.
        """
        return flag

    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[Any],
    ) -> None:
        """Run an update of variables where a flag holds.

        Args:
            flag: Bool scalar, the same on every replica.
            update: Called with the arguments.
            arguments: Nested tensors and variables.
            variables: All that `update` assigns.
        """
        ops.cond(flag, lambda: update(*arguments), lambda: None)

    def known_integer(self, x: Tensor) -> int | None:
        """The value of a tensor, where it has one now.

        Args:
            x: Integer scalar.

        Returns:
            The number; None in a function that is being compiled.
        """
        return int(x)


def convolve(conv: Conv, x: Tensor, w: Tensor) -> Tensor:
    """The convolution of two float32 tensors."""
    return ops.conv(x, w, **conv.arguments)


def float32(operand: Quantized) -> Tensor:
    """The values of an operand, unscaled, in float32."""
    return ops.cast(operand.values, "float32")


def scaled(product: Tensor, a: Quantized, b: Quantized, dtype: str) -> Tensor:
    """Apply both scales in float32, then cast to `dtype`."""
    return ops.cast(ops.multiply(product, a.scale * b.scale), dtype)
