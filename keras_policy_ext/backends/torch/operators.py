"""PyTorch: run operations as custom operators, opaque to the compiler.

A compiled step of a float8 model is one graph with two operators for each
contraction. If Inductor compiled their contents, a 512-2048-512 MLP would take
a third longer on a CPU, and a minute to compile (torch 2.13, 2 cores).

The compiler sees a third operator first, and takes it apart into the two, with
what autograd does between them. So no step asks autograd again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.interface import FrozenOperation, Operation
from keras_policy_ext.backends.torch.gradients import (
    ReverseMode,
    no_autocast,
    raising_if_differentiated,
)

_OPERATIONS: dict[str, Operation | FrozenOperation] = {}
"""The operations by their name in graphs, which may outlive the process."""


def run(
    operation: Operation,
    bias: Tensor | None,
    inputs: Tensor,
    kernel: Tensor,
    *state: Tensor,
) -> Tensor:
    """Run an operation as a custom operator; return the outputs plus the bias.

    The operator adds the bias if it runs straight. Elsewhere the compiler adds
    it, perhaps with what comes next.
    """
    name, matrix = _registered_name(operation), state[0] if state else None
    return _contraction(name, inputs, kernel, matrix, bias)


def _straight_of(bound: Any, for_gradients: bool) -> Any:
    """Return the passes of an operation as lists of kernels, or None.

    None if it has none, or none with gradients where these are needed.
    """
    straight = bound.straight
    if straight is None or (for_gradients and not straight.differentiates):
        return None
    return straight


def _registered_name(operation: Operation | FrozenOperation) -> str:
    """Register an operation; return its key in `_OPERATIONS`."""
    return _name_of(in_pieces(operation))


def in_pieces(value: Any) -> Any:
    """Return a dataclass as class and fields, recursively; else the value."""
    # The compiler takes classes and tuples as constants of a graph, but not
    # objects of this package. `is_dataclass` would end the graph (torch 2.11).
    if not hasattr(value, "__dataclass_fields__"):
        return value
    names = [each.name for each in dataclasses.fields(value) if each.init]
    return type(value), tuple([in_pieces(getattr(value, n)) for n in names])


def from_pieces(pieces: Any) -> Any:
    """Return the value of which `in_pieces` made these pieces."""
    kind = pieces[0] if isinstance(pieces, tuple) and pieces else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return pieces
    names = [each.name for each in dataclasses.fields(kind) if each.init]
    return kind(**dict(zip(names, map(from_pieces, pieces[1]), strict=True)))


_RESIDUALS_VERSION = 4
"""The version of the residuals; increase it if their shapes or dtypes change.

Inductor looks up compiled graphs, in any process, by the names and shapes of
an operator's arguments. It assumes that the results are unchanged.
"""


@torch.compiler.assume_constant_result
def _name_of(pieces: Any) -> str:
    """Register an operation; return a name that is equal in any process."""
    operation = from_pieces(pieces).with_preference()
    # The name has the kernels, since a graph on a disk is for these alone.
    kernels = "; ".join([": ".join(choice) for choice in operation.choices])
    text = f"{operation!r}, by {kernels}, kept as {_RESIDUALS_VERSION}"
    return register(operation, text, _OPERATIONS)


def register(value: Any, text: str, names: dict[str, Any]) -> str:
    """Put a value into a dict of names in graphs; return its name."""
    name, number = text, 1
    while names.setdefault(name, value) != value:
        # The name is taken, by a recipe whose class is another of this name.
        number += 1
        name = f"{text} #{number}"
    return name


def _operator(name: str, key: str = "default") -> Callable[[Any], Any]:
    """Return a decorator that registers an operator for a dispatch key."""

    # `torch.library.custom_op` takes the host longer: it looks for results that
    # share memory, at each call (torch 2.11). After `register_autograd` a call
    # is dispatched in Python twice.
    def register(function: Any) -> Any:
        """Define the operator with this function; return it."""
        schema = torch.library.infer_schema(function, mutates_args=())
        tag = torch.Tag.pt2_compliant_tag
        qualified = f"keras_policy_ext::{name}"
        torch.library.define(qualified, schema, tags=(tag,))
        torch.library.impl(qualified, key)(function)
        return getattr(torch.ops.keras_policy_ext, name).default

    return register


@_operator("forward")
def _forward(
    name: str,
    inputs: torch.Tensor,
    kernel: torch.Tensor,
    state: torch.Tensor | None,
    bias: torch.Tensor | None,
    keep: bool,
) -> list[torch.Tensor]:
    """Return the outputs and, if `keep` is set, the tensors to save."""
    operation: Any = _OPERATIONS[name]
    trains = keep and operation.training is not False
    if keep and state is not None:
        operation.source.before_gradients(state, in_graph=True)
    straight = _straight_of(operation.bound, for_gradients=keep)
    passes = straight and straight.of(inputs.shape, kernel.shape, inputs.device)
    if passes:
        with no_autocast(inputs):
            outputs, saved = passes.forward(
                inputs, kernel, bias, state, observe=trains
            )
        return [outputs, *saved] if keep else [outputs]
    with no_autocast(inputs):
        outputs, residuals = operation.bound.forward(
            inputs, kernel, _listed(state), trains, bias, slot=operation.slot
        )
        if keep and not trains:
            # By its amax, `backward` sees if the kernel outgrew its scale.
            residuals = operation.bound.observed(residuals, inputs, kernel)
    results = [outputs, *residuals.leaves()] if keep else [outputs]
    return unshared(results, [inputs, kernel, *_listed(state)])


@torch.library.register_fake("keras_policy_ext::forward")
def _(
    name: str,
    inputs: Tensor,
    kernel: Tensor,
    state: Tensor | None,
    bias: Tensor | None,
    keep: bool,
) -> list[Tensor]:
    """Return empty results of a forward pass, for the compiler."""
    operation: Any = _OPERATIONS[name]
    bound = operation.bound
    straight = _straight_of(bound, for_gradients=keep)
    if straight and straight.fits(inputs.shape, kernel.shape, inputs.device):
        return straight.empty(inputs, kernel, keep)
    # With `observe=True` there is no branch on numbers, which are unknown here.
    outputs, residuals = bound.forward(
        inputs, kernel, _listed(state), observe=True, bias=bias
    )
    if not keep:
        return [torch.empty_like(outputs)]
    return [torch.empty_like(x) for x in (outputs, *residuals.leaves())]


@_operator("backward")
def _backward(
    name: str,
    leaves: Sequence[torch.Tensor],
    outputs_grad: torch.Tensor,
    state: torch.Tensor | None,
    shapes: Sequence[int],
    rank: int,
    bias_shape: Sequence[int],
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    """Return the needed gradients, and that of a state if there is one."""
    # An operator takes no nested lists: `shapes` has the sizes of the inputs,
    # `rank` of them, then those of the kernel.
    inputs_needed, kernel_needed, bias_needed = needed
    operation: Any = _OPERATIONS[name]
    bound = operation.bound
    two_shapes = tuple(shapes[:rank]), tuple(shapes[rank:])
    straight = _straight_of(bound, for_gradients=True)
    passes = straight and straight.of(*two_shapes, outputs_grad.device)
    if passes:
        with no_autocast(outputs_grad):
            gradients = passes.backward(
                leaves, outputs_grad, state, needed, operation.slot
            )
        return [x for x in gradients if x is not None]
    residuals = bound.residuals(leaves, two_shapes)
    bias_grad = None
    with no_autocast(outputs_grad):
        inputs_grad, kernel_grad, state_grads, _ = bound.backward(
            residuals,
            outputs_grad,
            _listed(state),
            (inputs_needed, kernel_needed),
            slot=operation.slot,
        )
        if bias_needed:
            bias_grad = outputs_grad.sum_to_size(tuple(bias_shape))
    gradients = [inputs_grad, kernel_grad, bias_grad, *state_grads]
    results = [x.contiguous() for x in gradients if x is not None]
    return unshared(results, [outputs_grad, *_listed(state), *leaves])


@torch.library.register_fake("keras_policy_ext::backward")
def _(
    name: str,
    leaves: Sequence[Tensor],
    outputs_grad: Tensor,
    state: Tensor | None,
    shapes: Sequence[int],
    rank: int,
    bias_shape: Sequence[int],
    needed: Sequence[bool],
) -> list[Tensor]:
    """Return empty results of a backward pass, for the compiler."""
    operation: Any = _OPERATIONS[name]
    inputs_needed, kernel_needed, bias_needed = needed
    kernel_dtype = getattr(torch, operation.kernel_dtype)
    found = []
    if inputs_needed:
        found.append(outputs_grad.new_empty(shapes[:rank]))
    if kernel_needed:
        found.append(outputs_grad.new_empty(shapes[rank:], dtype=kernel_dtype))
    if bias_needed:
        found.append(outputs_grad.new_empty(bias_shape))
    return found + [torch.empty_like(matrix) for matrix in _listed(state)]


class _Differentiable(ReverseMode):
    """An autograd function whose two passes are the operators of this file."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        name: str,
        inputs: Tensor,
        kernel: Tensor,
        state: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Return the outputs; save the state and the residuals."""
        ctx.name, ctx.states = name, len(_listed(state))
        ctx.shapes, ctx.rank = [*inputs.shape, *kernel.shape], inputs.dim()
        ctx.bias_shape = [] if bias is None else list(bias.shape)
        outputs, *saved = _forward(name, inputs, kernel, state, bias, keep=True)
        ctx.save_for_backward(*_listed(state), *saved)
        return outputs

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> Any:
        """Return the gradients of all arguments of `forward`."""
        saved = ctx.saved_tensors
        _, inputs_needed, kernel_needed, _, bias_needed = ctx.needs_input_grad
        needed = [inputs_needed, kernel_needed, bias_needed]
        gradients = _backward(
            ctx.name,
            list(saved[ctx.states :]),
            outputs_grad,
            saved[0] if ctx.states else None,
            ctx.shapes,
            ctx.rank,
            ctx.bias_shape,
            needed,
        )
        if torch.is_grad_enabled():
            gradients = raising_if_differentiated(gradients, outputs_grad)
        gradients = iter(gradients)
        inputs_grad, kernel_grad, bias_grad = (
            next(gradients) if is_needed else None for is_needed in needed
        )
        return None, inputs_grad, kernel_grad, next(gradients, None), bias_grad


@_operator("contraction", "CompositeImplicitAutograd")
def _contraction(
    name: str,
    inputs: torch.Tensor,
    kernel: torch.Tensor,
    state: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the outputs plus the bias, with their gradients.

    `name` is the key of the operation in `_OPERATIONS`, since operators take no
    objects. The bias is added by the operation if that runs as a list of
    kernels (`Straight`), which can.
    """
    operation: Any = _OPERATIONS[name]
    keep = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (inputs, kernel, *_listed(state))
    )
    straight, bias_inside = operation.bound.straight, None
    if bias is not None and straight is not None:
        # If only the bias is trained, its gradient is that of an addition.
        is_apart = torch.is_grad_enabled() and not keep
        if not is_apart and bias.shape == kernel.shape[straight.contracted :]:
            bias_inside = bias
    arguments = name, inputs, kernel, state, bias_inside
    if keep:
        outputs = _Differentiable.apply(*arguments)
    else:
        (outputs,) = _forward(*arguments, keep=False)
    return outputs if bias is bias_inside else outputs + bias


def run_frozen(
    operation: FrozenOperation, inputs: Tensor, *constants: Tensor
) -> Tensor:
    """Run a frozen operation as a custom operator; return the outputs."""
    return _frozen(_registered_name(operation), inputs, list(constants))


@torch.library.custom_op("keras_policy_ext::frozen", mutates_args=())
def _frozen(
    name: str, inputs: torch.Tensor, constants: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the outputs of the frozen operation of this name."""
    operation: Any = _OPERATIONS[name]
    outputs = operation.forward(inputs, tuple(constants))
    (outputs,) = unshared([outputs.contiguous()], [inputs, *constants])
    return outputs


@_frozen.register_fake
def _(name: str, inputs: Tensor, constants: Sequence[Tensor]) -> Tensor:
    """Return the empty result of a frozen operation, for the compiler."""
    operation: Any = _OPERATIONS[name]
    outputs = operation.forward(inputs, tuple(constants))
    return torch.empty_like(outputs.contiguous())


@torch.library.custom_op("keras_policy_ext::frozen_grad", mutates_args=())
def _frozen_grad(
    name: str,
    outputs_grad: torch.Tensor,
    constants: Sequence[torch.Tensor],
    shape: Sequence[int],
) -> torch.Tensor:
    """Return the gradient of a frozen operation's inputs, of this shape."""
    operation: Any = _OPERATIONS[name]
    result = operation.inputs_grad(outputs_grad, tuple(constants), tuple(shape))
    (result,) = unshared([result.contiguous()], [outputs_grad, *constants])
    return result


@_frozen_grad.register_fake
def _(
    name: str,
    outputs_grad: Tensor,
    constants: Sequence[Tensor],
    shape: Sequence[int],
) -> Tensor:
    return outputs_grad.new_empty(shape)


def _save_frozen(
    ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor
) -> None:
    """Save what the gradient of a frozen contraction needs."""
    ctx.name, x, constants = inputs
    ctx.shape = list(x.shape)
    ctx.save_for_backward(*constants)


def _frozen_gradients(ctx: FunctionCtx, outputs_grad: Tensor) -> Any:
    """Return the gradients of the arguments of `_frozen`."""
    constants = list(ctx.saved_tensors)
    gradient = _frozen_grad(ctx.name, outputs_grad, constants, ctx.shape)
    return None, gradient, [None] * len(constants)


_frozen.register_autograd(_frozen_gradients, setup_context=_save_frozen)


def _listed(state: Tensor | None) -> tuple[Tensor, ...]:
    return () if state is None else (state,)


def unshared(
    results: Iterable[Tensor], arguments: Sequence[Tensor]
) -> list[Tensor]:
    """Return results, cloned if they share memory with an argument or a result.

    An operator may not return such tensors.
    """
    tensors = [*arguments]
    for result in results:
        memory = result.untyped_storage()
        is_shared = any(memory is x.untyped_storage() for x in tensors)
        tensors.append(result.clone() if is_shared else result)
    return tensors[len(arguments) :]
