"""PyTorch: run operations inside the transforms of `torch.func`.

A function in a transform can save only its arguments and outputs for its
gradient. So the tensors for the backward pass are among the outputs.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.function import FunctionCtx

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.interface import FrozenOperation, Operation
from keras_policy_ext.backends.torch import gradients as torch_gradients
from keras_policy_ext.backends.torch import operators
from keras_policy_ext.backends.torch.gradients import ByExample


def run(
    operation: Operation,
    bias: Tensor | None,
    inputs: Tensor,
    kernel: Tensor,
    *state: Tensor,
) -> Tensor:
    """Run an operation inside a transform of `torch.func`; add a bias."""
    # An operand is its own link: a transform keeps it anyway.
    links = tuple(x if x.requires_grad else None for x in (inputs, kernel))
    outputs, *_ = _Run.apply(operation, links, inputs, kernel, *state)
    return outputs if bias is None else outputs + bias


def run_frozen(
    operation: FrozenOperation, inputs: Tensor, *constants: Tensor
) -> Tensor:
    """Run a frozen operation inside a transform of `torch.func`."""
    return _RunFrozen.apply(operation, inputs, *constants)


class _Run(ByExample):
    """An autograd function that runs an `Operation` inside a transform."""

    @staticmethod
    def forward(
        operation: Operation,
        links: torch_gradients.Links,  # For `setup_context`.
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the outputs, then the tensors to save for the gradient."""
        trains = operation.training is not False
        with torch_gradients.no_autocast(inputs):
            outputs, residuals = operation.bound.forward(
                inputs, kernel, state, trains, slot=operation.slot
            )
            if not trains:
                # By its amax, `backward` sees if the kernel outgrew its scale.
                residuals = operation.bound.observed(residuals, inputs, kernel)
        results = outputs, *residuals.leaves()
        return tuple(operators.unshared(results, [inputs, kernel, *state]))

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor
    ) -> None:
        """Save the state and the tensors that `forward` returned."""
        ctx.operation, ctx.links, x, kernel, *state = inputs
        ctx.shapes = tuple(x.shape), tuple(kernel.shape)
        ctx.states = len(state)
        _, *leaves = output
        ctx.mark_non_differentiable(*leaves)
        ctx.save_for_backward(*state, *leaves)

    @staticmethod
    def backward(
        ctx: FunctionCtx, outputs_grad: Tensor, *_: Any
    ) -> tuple[Any, ...]:
        """Return the gradients of all arguments of `forward`."""
        needed = ctx.needs_input_grad[2:4]  # Of inputs and kernel.
        operation, slot = ctx.operation, ctx.operation.slot
        static = torch_gradients.Pass(
            operation, operation.bound, slot, ctx.shapes, needed, ctx.states
        )
        gradients = torch_gradients.differentiable_gradients(
            static, outputs_grad, ctx.links, ctx.saved_tensors
        )
        return None, None, *gradients


class _RunFrozen(ByExample):
    """An autograd function that runs a `FrozenOperation` inside a transform."""

    @staticmethod
    def forward(
        operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        """Return the outputs, which share no memory with arguments."""
        outputs = operation.forward(inputs, constants)
        (outputs,) = operators.unshared([outputs], [inputs, *constants])
        return outputs

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor
    ) -> None:
        """Save the constants and the shape of the inputs."""
        ctx.operation, x, *constants = inputs
        ctx.shape = tuple(x.shape)
        ctx.save_for_backward(*constants)

    backward = staticmethod(torch_gradients.Frozen.backward)
