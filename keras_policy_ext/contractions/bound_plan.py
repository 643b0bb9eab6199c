"""The three matmuls of a plan, with all that is decided once for a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.devices import Device
from keras_policy_ext.backends.matmuls import Engine, Shapes
from keras_policy_ext.contractions.bound_matmuls import bind_matmul
from keras_policy_ext.contractions.bound_operands import (
    BoundOperand,
    Selections,
    bind_operand,
)
from keras_policy_ext.contractions.forms import shape_of
from keras_policy_ext.contractions.residuals import Residuals, settled
from keras_policy_ext.contractions.saved_kernels import bind_saved_kernel
from keras_policy_ext.contractions.second_derivatives import gradients
from keras_policy_ext.numerics import quantized, scaling
from keras_policy_ext.numerics.observations import of_kernel_alone
from keras_policy_ext.numerics.scale_protocol import StateReading
from keras_policy_ext.recipes import MATMULS, OPERANDS


class BoundPlan:
    """A `Plan` on a device: its kernels, casts and layouts are chosen.

    Args:
        plan: A `Plan`.
        engine: The kernels of the framework.
        device: The device that they are chosen for.

    Attributes:
        plan: See above.
        engine: See above.
        device: See above.
        selections: The kernel of each matmul, and the reason for it.
        inputs: How the inputs are quantized.
        kernel: How the kernel is quantized.
        outputs_grad: How the gradient of the outputs is quantized.
        saved_kernel: How the kernel is saved for the backward pass.
    """

    def __init__(self, plan: Any, engine: Engine, device: Device):
        self.plan, self.engine, self.device = plan, engine, device
        self.selections = _select(plan, engine)
        self.inputs, self.kernel, self.outputs_grad = (
            bind_operand(plan, operand, engine, self.selections)
            for operand in OPERANDS
        )
        self.saved_kernel = bind_saved_kernel(plan, engine, self.selections)
        self._forward, self._inputs_grad, self._kernel_grad = (
            bind_matmul(plan, matmul, self.selections[matmul], self._operands)
            for matmul in MATMULS
        )
        self._framework = backends.current()
        self._source = plan.source
        self._observes_amaxes = plan.source.observes_amaxes
        self._observes_kernel_alone = plan.training is False
        self._kernel_dtype = plan.kernel_dtype

    @property
    def _operands(self) -> dict[str, BoundOperand]:
        return {
            "inputs": self.inputs,
            "kernel": self.kernel,
            "outputs_grad": self.outputs_grad,
        }

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        state: tuple[Tensor, ...],
        observe: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Residuals]:
        """Compute the outputs, and what is saved for the backward pass.

        Args:
            inputs: Of dtype `Plan.inputs_dtype`.
            kernel: Of dtype `Plan.kernel_dtype`.
            state: The state matrix of the recipe, or nothing.
            observe: Whether amaxes are needed for the state.
            bias: To be added, of dtype `Plan.inputs_dtype`; None for none.

        Returns:
            The outputs, of dtype `Plan.inputs_dtype`, and residuals.
        """
        observe = observe and bool(state) and self._observes_amaxes
        history = self._state_reading(state)
        known = settled(history, state)
        x = self.inputs.quantize(inputs, known, observe)
        w = self.kernel.quantize(kernel, known, observe)
        shapes = shape_of(inputs), shape_of(kernel)
        outputs = self._forward.add(x.first, w.first, shapes, bias)
        amaxes = (x.amax, w.amax) if observe else None
        saved = self.saved_kernel.save(kernel, w.second)
        return outputs, Residuals(
            x.second, saved, history, amaxes, shapes, self.engine
        )

    def residuals(self, leaves: Sequence[Tensor], shapes: Shapes) -> Residuals:
        """Rebuild residuals from the tensors that `Residuals.leaves` lists.

        Args:
            leaves: The tensors.
            shapes: Of the inputs and the kernel.
        """
        found = iter(leaves)
        kept = self.plan.operands.kept
        x = quantized.of_leaves(found, kept["inputs"])
        w = quantized.of_leaves(found, kept["kernel"])
        known, rest = self._source.known_of(list(found))
        amaxes = (rest[0], rest[1]) if rest else None
        return Residuals(x, w, known, amaxes, shapes, self.engine)

    def observed(
        self, residuals: Residuals, inputs: Tensor, kernel: Tensor
    ) -> Residuals:
        """Add the amaxes to residuals of a forward pass that did not observe.

        Without training the amax of the kernel stands for that of the inputs.
        """
        if not self._observes_amaxes or residuals.known is None:
            return residuals
        x = w = self.kernel.amax(kernel)
        if not self._observes_kernel_alone:
            x = self.inputs.amax(inputs)
        return dataclasses.replace(residuals, amaxes=(x, w))

    def backward(
        self,
        residuals: Residuals,
        outputs_grad: Tensor,
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool] = (True, True),
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...]]:
        """Compute the gradients of inputs, kernel and state.

        Args:
            residuals: From `forward`.
            outputs_grad: Of dtype `Plan.inputs_dtype`.
            state: As for `forward`.
            needed: Whether the gradients of inputs and kernel are wanted.

        Returns:
            The three; None for a gradient that is not needed.
        """
        known, shapes = settled(residuals.known, state), residuals.shapes
        observe = (
            residuals.amaxes is not None and not self._observes_kernel_alone
        )
        g = self.outputs_grad.quantize(outputs_grad, known, observe)
        inputs_grad = kernel_grad = None
        if needed[0]:
            first, w = self.saved_kernel.load(residuals.kernel, g.first)
            inputs_grad = self._inputs_grad(first, w, shapes)
        if needed[1]:
            kernel_grad = self._kernel_grad(residuals.inputs, g.second, shapes)
            kernel_grad = ops.cast(kernel_grad, self._kernel_dtype)
        state_grad: tuple[Tensor, ...] = ()
        if state:
            state_grad = (self._state_grad(residuals, known, g.amax, *state),)
        return inputs_grad, kernel_grad, state_grad

    def caught_up(
        self, kernel: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the states, with scales that are large enough for a kernel."""
        if not self._observes_amaxes:
            return state
        amax = scaling.amax(kernel)
        return tuple(self._source.caught_up(amax, each) for each in state)

    def second_derivatives(self, *arguments: Any) -> tuple[Any, ...]:
        """Compute the gradients of the gradients: see `gradients`."""
        return gradients(self, *arguments)

    def _state_reading(self, state: tuple[Tensor, ...]) -> StateReading | None:
        """Read the state before the step; None for a recipe without state."""
        if not state:
            return None
        states = self.engine.state_kernels_for(self._source, *state)
        if states is not None:
            return states.history_scales(self._source, *state)
        found: StateReading = self._source.history_scales(*state)
        return found

    def _state_grad(
        self,
        residuals: Residuals,
        known: StateReading | None,
        outputs_grad_amax: Tensor | None,
        state: Tensor,
    ) -> Tensor:
        """Compute the gradient of the state: the observation, or zeros."""
        amaxes = residuals.amaxes
        if self._observes_kernel_alone:
            if amaxes is None:
                return ops.zeros_like(state)
            return self._of_kernel(amaxes[1], residuals.known, state)
        if amaxes is None and self._observes_amaxes:
            return ops.zeros_like(state)
        numbers = self._source.observed(
            known, [*(amaxes or ()), outputs_grad_amax]
        )
        return self._observation(numbers, state)

    def _observation(self, numbers: list[Tensor], state: Tensor) -> Tensor:
        """Compute the gradient of the state from one number for each row."""
        states = self.engine.state_kernels_for(self._source, state)
        if states is not None:
            return states.observation(self._source, numbers, self.plan.slot)
        # A kernel may have found an amax for each part of an operand.
        numbers = [ops.max(n) if len(n.shape) else n for n in numbers]
        found: Tensor = self._source.observation(numbers, self.plan.slot)
        return found

    def _of_kernel(self, amax: Tensor, known: Any, state: Tensor) -> Tensor:
        """Compute the gradient of the state from the kernel alone."""
        outgrown = self._source.outgrown(amax, known)
        if self._framework.known_any(outgrown) is False:
            return ops.zeros_like(state)
        observation = self._observation([amax] * len(OPERANDS), state)
        return of_kernel_alone(observation, outgrown)


def _select(plan: Any, engine: Engine) -> Selections:
    """Select the kernel of each matmul of a plan, with the reason."""
    quantization = plan.operands.quantizations
    how = {"prefer": plan.prefer, "for_xla": plan.for_xla}
    return {
        matmul: plan.contraction.choose(
            engine,
            matmul,
            quantization[a, matmul],
            quantization[b, matmul],
            **how,
        )
        for matmul, (a, b) in MATMULS.items()
    }
