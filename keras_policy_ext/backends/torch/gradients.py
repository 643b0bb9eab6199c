"""PyTorch: run operations with their first and second derivatives.

The backward pass reads quantized copies, which autograd does not connect to
the operands. Where gradients are differentiated (`create_graph=True`), they
are therefore a function of links to the operands: tensors of the same shapes,
used for their gradients only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.interface import (
    DIFFERENTIATED_AGAIN,
    FrozenOperation,
    Operation,
    Shape,
)
from keras_policy_ext.numerics.observations import Slot

FORWARD_MODE = (
    "A layer in float8 has no derivative in forward mode. Received: "
    "torch.func.jvp, jacfwd or hessian, or torch.autograd.forward_ad. Allowed: "
    "derivatives in reverse mode: torch.func.grad, vjp, jacrev, and "
    "jacrev(jacrev(f)) for a Hessian."
)


def are_transforms_active() -> bool:
    """Return True inside a `torch.func` transform; not public (2.13)."""
    return bool(torch._C._are_functorch_transforms_active())


def refuse_compiled_transforms() -> None:
    """Raise if `torch.compile` compiles a transform of `torch.func`.

    Without `fullgraph=True` the compiler then runs the caller eagerly.
    """
    if are_transforms_active():
        raise NotImplementedError(
            "torch.compile cannot compile a layer in float8 inside a "
            "transform of torch.func. Received: torch.compile around such a "
            "transform. Allowed: the transform without torch.compile, for "
            "instance under torch.compiler.disable."
        )


def no_autocast(x: Tensor) -> Any:
    """Return a context in which `torch.autocast` is off for a device."""
    device = x.device.type
    # The device "meta" has no autocast to disable.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _AS_IT_IS
    return torch.autocast(device, enabled=False)


_AS_IT_IS = contextlib.nullcontext()


class ReverseMode(torch.autograd.Function):
    """An autograd function that raises in forward-mode differentiation."""

    @staticmethod
    def jvp(ctx: FunctionCtx, *tangents: Any) -> Any:
        """Raise: forward-mode differentiation is not supported."""
        raise NotImplementedError(FORWARD_MODE)


class ByExample(ReverseMode):
    """An autograd function that `torch.func.vmap` calls once per example.

    So each example is quantized by its own scales, as in JAX's `vmap`, and all
    code may read the values of its tensors.

    A call outside of transforms takes 16 µs longer than that of a function
    whose `forward` has a context (torch 2.13, CPU).
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Call the function per example; return stacked outputs and axes."""
        leaves, treespec = pytree.tree_flatten(arguments)
        axes = pytree.tree_leaves(in_dims, is_leaf=lambda axis: axis is None)
        results = []
        for number in range(info.batch_size):
            example = [
                x if axis is None else x.select(axis, number)
                for x, axis in zip(leaves, axes, strict=True)
            ]
            results.append(cls.apply(*pytree.tree_unflatten(example, treespec)))
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        outputs = tuple(
            None if each[0] is None else torch.stack(each)
            for each in zip(*results, strict=True)
        )
        return outputs, tuple(None if x is None else 0 for x in outputs)


Links = tuple[Tensor | None, Tensor | None]  # See `links_of`.


def links_of(inputs: Tensor, kernel: Tensor) -> Links:
    """Return links to inputs and kernel, which carry second derivatives.

    A link is a tensor that is never read; its gradient becomes the operand's.
    The link of a parameter is the parameter. None for a tensor without gradient
    and for tensors of other types, which are differentiated once.
    """
    return _link_of(inputs), _link_of(kernel)


def _link_of(x: Tensor) -> Tensor | None:
    """Return a link; None without gradient, or for another type."""
    if not x.requires_grad:
        return None
    if type(x) is torch.nn.Parameter:
        return x
    return _Link.apply(x) if type(x) is torch.Tensor else None


def _is_parameter(x: Tensor) -> bool:
    return type(x) is torch.nn.Parameter


class _Link(ReverseMode):
    """A tensor of an operand's shape, never read, that passes a gradient on."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.new_empty_strided(x.shape, (0,) * x.dim())

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> Tensor:
        return outputs_grad


class Pass(NamedTuple):
    """The arguments of a backward pass that are not tensors.

    Attributes:
        operation: The operation.
        slot: The number of this use of the kernel in the step.
        shapes: The shapes of the inputs and of the kernel.
        needed: Whether the gradients of inputs and kernel are needed.
        uses_state: Whether the first saved tensor is a state.
    """

    operation: Operation
    slot: Slot
    shapes: tuple[Shape, Shape]
    needed: tuple[bool, bool]
    uses_state: bool


class Differentiable(ReverseMode):
    """An autograd function that runs an `Operation` and adds a bias.

    `ctx.passes` are its `straight.Passes`; None where the general path runs.
    `ctx.sums` says that the backward pass of that path sums the gradient
    of the bias. `ctx.uses_state`, 0 or 1 as a number, counts the saved states.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        operation: Operation,
        links: Links,
        bias: Tensor | None,
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
    ) -> Tensor:
        """Return the outputs plus the bias; save tensors for the gradient."""
        trains = operation.training is not False
        bound = operation.bound
        ctx.operation, ctx.links = operation, links
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.uses_state = bool(state)
        ctx.shapes = inputs.shape, kernel.shape
        ctx.passes = None
        if bound.straight is not None:
            ctx.passes = bound.straight.for_gradients(inputs, kernel)
        if ctx.passes is not None:
            matrix = state[0] if state else None
            outputs, saved = ctx.passes.forward(
                inputs, kernel, bias, matrix, trains
            )
            ctx.save_for_backward(*state, *saved)
            return outputs
        outputs, residuals = bound.forward(
            inputs, kernel, state, trains, bias, slot=operation.slot
        )
        # Outside of training the state observes a kernel that outgrew its
        # scale. The amax of a parameter waits for `backward`: `_with_amax`.
        if not trains and kernel.requires_grad and not _is_parameter(kernel):
            residuals = operation.bound.observed(residuals, inputs, kernel)
        ctx.shapes = residuals.shapes
        ctx.sums = bias is not None and bound.takes_bias(bias, inputs, kernel)
        ctx.save_for_backward(*state, *residuals.leaves())
        return _no_view(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> tuple[Any, ...]:
        """Return a gradient, or None, for each argument of `forward`."""
        saved = ctx.saved_tensors  # to be asked for once only
        needed = ctx.needs_input_grad[3:5]
        # Under create_graph=True, or for a batch of gradients.
        is_linked = torch.is_grad_enabled() or are_transforms_active()
        if ctx.passes is not None:
            state, saved = saved[: ctx.uses_state], saved[ctx.uses_state :]
            if not is_linked:
                # A bias of another shape is no bias of the matmul.
                needs_bias = ctx.needs_input_grad[2]
                summed = needs_bias and ctx.bias_shape == ctx.passes.columns
                matrix = state[0] if state else None
                with no_autocast(outputs_grad):
                    *grads, bias_grad, state_grad = ctx.passes.backward(
                        saved,
                        outputs_grad,
                        matrix,
                        (*needed, summed),
                        ctx.operation.slot,
                    )
                if needs_bias and not summed:
                    bias_grad = outputs_grad.sum_to_size(ctx.bias_shape)
                state_grads = (state_grad,) if state else ()
                return None, None, bias_grad, *grads, *state_grads
            saved = *state, *ctx.passes.leaves(saved)
        slot = ctx.operation.slot
        static = Pass(ctx.operation, slot, ctx.shapes, needed, ctx.uses_state)
        if ctx.operation.training is False and ctx.uses_state:
            saved = _with_amax(static, ctx.links[1], saved)
        bias_shape = ctx.bias_shape if ctx.needs_input_grad[2] else None
        bias_grad = None
        if is_linked:
            gradients = linked(static, outputs_grad, ctx.links, saved)
        elif bias_shape is not None and ctx.sums:
            *gradients, bias_grad = _all_gradients(
                static, outputs_grad, saved, bias_shape
            )
        else:
            gradients = _gradients(static, outputs_grad, saved)
        if bias_shape is not None and bias_grad is None:
            bias_grad = outputs_grad.sum_to_size(bias_shape)
        return None, None, bias_grad, *gradients


def _with_amax(
    static: Pass, kernel: Tensor | None, saved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Add the amax of a kernel, if a parameter, to what inference has saved."""
    if kernel is None or not _is_parameter(kernel):
        return saved
    # Not in the forward pass, which may never be differentiated.
    bound = static.operation.bound
    residuals = bound.residuals(saved[1:], static.shapes)
    # Of the inputs no amax is read outside of training: any tensor will do.
    with torch.no_grad():
        residuals = bound.observed(residuals, kernel, kernel)
    return *saved[:1], *residuals.leaves(narrow=False)


def _gradients(
    static: Pass, outputs_grad: Tensor, saved: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs, the kernel and the state."""
    return _all_gradients(static, outputs_grad, saved, None)[:-1]


def _all_gradients(
    static: Pass,
    outputs_grad: Tensor,
    saved: tuple[Tensor, ...],
    bias_shape: Shape | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `_gradients`, and that of a bias of a shape."""
    # `uses_state` as a number is how many states, 0 or 1, were saved first.
    bound, states = static.operation.bound, static.uses_state
    with torch.no_grad(), no_autocast(outputs_grad):
        inputs_grad, kernel_grad, state_grad, bias_grad = bound.backward(
            bound.residuals(saved[states:], static.shapes),
            outputs_grad,
            saved[:states],
            static.needed,
            bias_shape,
            static.slot,
        )
    return inputs_grad, kernel_grad, *state_grad, bias_grad


def linked(
    static: Pass, outputs_grad: Tensor, links: Links, saved: tuple[Tensor, ...]
) -> Any:
    """Return the gradients of `_gradients`; they can be differentiated once.

    `saved` is the state, if there is one, and the leaves of the residuals.
    """
    pairs = zip(static.needed, links, strict=True)
    if any(needed and link is None for needed, link in pairs):
        # Of operands of a type that has no links.
        gradients = _gradients(static, outputs_grad, saved)
        once = raising_if_differentiated(gradients[:2], outputs_grad)
        return *once, *gradients[2:]
    # What gradients of gradients observe goes into a slot of its own.
    static = static._replace(slot=static.operation.another_slot(static.slot))
    return _Gradients.apply(static, outputs_grad, *links, *saved)


class _Gradients(ByExample):
    """`_gradients` as an autograd function of links to the operands."""

    @staticmethod
    def forward(
        static: Pass,
        outputs_grad: Tensor,
        inputs_link: Tensor | None,
        kernel_link: Tensor | None,
        *saved: Tensor,
    ) -> tuple[Tensor | None, ...]:
        gradients = _gradients(static, outputs_grad, saved)
        return *(
            x if x is None else _no_view(x) for x in gradients[:2]
        ), *gradients[2:]

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor
    ) -> None:
        ctx.static, outputs_grad, *ctx.links = inputs[:4]
        # The gradient of the state: an observation, passed on unchanged.
        ctx.observed = output[2:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*ctx.observed)
        ctx.save_for_backward(outputs_grad, *inputs[4:])

    @staticmethod
    def backward(
        ctx: FunctionCtx, inputs_grad_grad: Any, kernel_grad_grad: Any, *_: Any
    ) -> tuple[Any, ...]:
        outputs_grad, *saved = ctx.saved_tensors
        bound = ctx.static.operation.bound
        leaves = saved[ctx.static.uses_state :]
        with torch.no_grad(), no_autocast(outputs_grad):
            second = bound.second_derivatives(
                bound.residuals(leaves, ctx.static.shapes),
                outputs_grad,
                inputs_grad_grad,
                kernel_grad_grad,
                ctx.needs_input_grad[1:4],
            )
        if torch.is_grad_enabled():
            of_gradients = inputs_grad_grad, kernel_grad_grad
            second = raising_if_differentiated(
                second, outputs_grad, *ctx.links, *of_gradients
            )
        return None, *second, *ctx.observed, *(None for _ in leaves)


class Frozen(ReverseMode):
    """An autograd function that runs a `FrozenOperation`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        operation: FrozenOperation,
        inputs: Tensor,
        *constants: Tensor,
    ) -> Tensor:
        """Return the outputs; save the constants for the gradient."""
        ctx.operation, ctx.shape = operation, tuple(inputs.shape)
        ctx.save_for_backward(*constants)
        return _no_view(operation.forward(inputs, constants))

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient of the inputs, and None for each constant."""
        constants = ctx.saved_tensors
        inputs_grad = ctx.operation.inputs_grad(
            outputs_grad, constants, ctx.shape
        )
        return None, inputs_grad, *(None for _ in constants)


class _Raising(ByExample):
    """An identity whose gradient raises: no third derivatives."""

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor
    ) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> Any:
        raise NotImplementedError(DIFFERENTIATED_AGAIN)


def raising_if_differentiated(
    gradients: Iterable[Tensor | None], *sources: Tensor | None
) -> list[Tensor | None]:
    """Return the same gradients; differentiating them again raises.

    `sources` are the tensors that they were computed from. If none of these
    requires a gradient, as without a link, the result does, so that it raises.
    """
    return [
        x if x is None else _Raising.apply(_requiring_gradient(x), *sources)
        for x in gradients
    ]


def _requiring_gradient(gradient: Tensor) -> Tensor:
    """Return the same gradient as a tensor that requires a gradient."""
    gradient = gradient.detach()
    # In a transform of `torch.func` no tensor can begin to require a gradient.
    return gradient if are_transforms_active() else gradient.requires_grad_()


def _no_view(x: Tensor) -> Tensor:
    """Return the same tensor, as a new one if it is a view."""
    # Autograd refuses to change a view in place if a custom function made it:
    # `y += 1` on the outputs, or Keras 3.12's softmax, which adds its mask.
    return x.new_empty(0).set_(x) if x._is_view() else x


_FIRST_BITS = 0x0102040810204080
"""A factor that packs eight bytes of 0 or 1 into the highest byte.

The eight bytes are read as one int64; byte i becomes bit i. Source: Warren,
"Hacker's Delight", 7-2.
"""


class Relu(torch.autograd.Function):
    """`torch.relu` that saves a mask for the gradient, not the outputs.

    PyTorch's own gradient saves the outputs.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """Return `relu(x)`; save the mask of positive outputs."""
        outputs = torch.relu(x)
        # From the largest stride to the smallest.
        ctx.axes = sorted(range(x.dim()), key=outputs.stride, reverse=True)
        ctx.save_for_backward(_kept(outputs.permute(ctx.axes)))
        return outputs

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> Tensor:
        """Return the gradient of `x`: `outputs_grad` where the mask is True."""
        (saved,) = ctx.saved_tensors
        mask = _mask(saved, outputs_grad.permute(ctx.axes).shape)
        # Back to the order in memory of the outputs: the gradient gets the
        # order of the mask, and sums over it depend on the order.
        back = [ctx.axes.index(axis) for axis in range(mask.dim())]
        passes = mask.permute(back).to(outputs_grad.dtype)
        return torch.ops.aten.threshold_backward(outputs_grad, passes, 0)


def _kept(outputs: Tensor) -> Tensor:
    """Return the mask of nonzero outputs, on a CPU as bits."""
    mask = outputs.bool()
    # A byte per element on other devices, where memory is fast and each
    # operation is one more kernel, and if the elements do not fill bytes.
    if mask.device.type != "cpu" or mask.numel() % 8:
        return mask
    eights = mask.flatten().view(torch.int64)
    bits = eights.mul(_FIRST_BITS).bitwise_right_shift_(56)
    return bits.to(torch.uint8)


def _mask(saved: Tensor, shape: Shape) -> Tensor:
    """Return as bool, in this shape, the mask that `_kept` returned."""
    if saved.dtype == torch.bool:
        return saved
    eights = _EIGHTS.index_select(0, saved.int())
    return eights.view(torch.bool).view(shape)


# This module may be loaded while a step is being compiled.
@torch.compiler.disable
def _eights() -> Tensor:
    """Return a table: for each byte, its 8 bits as 8 bytes in an int64."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return bits.bool().view(torch.int64).flatten()


_EIGHTS = _eights()
