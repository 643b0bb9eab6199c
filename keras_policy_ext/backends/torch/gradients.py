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
    BoundOperation,
    FrozenOperation,
    Operation,
    Shape,
)
from keras_policy_ext.numerics.scale_sources import Slot

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
    """Return a context with `torch.autocast` off for the device of `x`."""
    device = x.device.type
    # The device "meta" has no autocast to disable.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _NOTHING_TO_DISABLE
    return torch.autocast(device, enabled=False)


_NOTHING_TO_DISABLE = contextlib.nullcontext()


class ReverseMode(torch.autograd.Function):
    """An autograd function that raises in forward-mode differentiation."""

    @staticmethod
    def jvp(ctx: FunctionCtx, *tangents: Any) -> Any:
        """Raise: forward-mode differentiation is not supported."""
        raise NotImplementedError(FORWARD_MODE)


class ByExample(ReverseMode):
    """An autograd function that `torch.func.vmap` calls once per example.

    So each example is quantized by its own scales, as in JAX's `vmap`, and all
    code may read the values of its tensors. `forward` has no context: outside
    of transforms such a call takes 16 µs longer (torch 2.13, CPU).
    """

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Call the function per example; return stacked outputs and axes."""
        leaves, treespec = pytree.tree_flatten(arguments)
        axes = pytree.tree_leaves(in_dims, is_leaf=lambda axis: axis is None)
        results = []
        for index in range(info.batch_size):
            # An argument whose axis is None is the same for all examples.
            example = [
                x if axis is None else x.select(axis, index)
                for x, axis in zip(leaves, axes, strict=True)
            ]
            results.append(cls.apply(*pytree.tree_unflatten(example, treespec)))
        if isinstance(results[0], torch.Tensor):  # One output, no tuple.
            return torch.stack(results), 0
        outputs = tuple(
            None if of_examples[0] is None else torch.stack(of_examples)
            for of_examples in zip(*results, strict=True)
        )
        return outputs, tuple(None if x is None else 0 for x in outputs)


Links = tuple[Tensor | None, Tensor | None]  # See `links_of`.


def links_of(inputs: Tensor, kernel: Tensor) -> Links:
    """Return links to inputs and kernel, which carry second derivatives.

    A link is a tensor that is never read; its gradient becomes the operand's.
    A parameter, which stays in memory anyway, is its own link. None without
    gradient, and for other types of tensors, which are differentiated once.
    """
    return _link_of(inputs), _link_of(kernel)


def _link_of(x: Tensor) -> Tensor | None:
    """Return the link of an operand, or None; see `links_of`."""
    if not x.requires_grad:
        return None
    if type(x) is torch.nn.Parameter:
        return x
    return _Link.apply(x) if type(x) is torch.Tensor else None


class _Link(ReverseMode):
    """An autograd function that makes a link; see `links_of`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        # With strides of 0 one number in memory is enough.
        return x.new_empty_strided(x.shape, (0,) * x.dim())

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> Tensor:
        return outputs_grad


class Pass(NamedTuple):
    """The arguments of a backward pass that are not tensors.

    Attributes:
        operation: The operation.
        bound: The operation on the device of the forward pass.
        slot: The number of this use of the kernel in the step.
        shapes: The shapes of the inputs and of the kernel.
        needed: Whether the gradients of inputs and kernel are needed.
        states: The number of states, 0 or 1, before the other saved tensors.
    """

    operation: Operation
    bound: BoundOperation
    slot: Slot
    shapes: tuple[Shape, Shape]
    needed: tuple[bool, bool]
    states: int


class Differentiable(ReverseMode):
    """An autograd function that runs an `Operation` and adds a bias.

    `ctx.passes` are its `straight.Passes`; None where the general path runs.
    `ctx.sums_bias` says that the backward pass of that path sums the gradient
    of the bias. For `ctx.states` see `Pass`.
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
        ctx.operation, ctx.bound, ctx.links = operation, bound, links
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.states = len(state)
        ctx.shapes = inputs.shape, kernel.shape
        ctx.passes = None
        if bound.straight is not None:
            ctx.passes = bound.straight.for_gradients(inputs, kernel)
        if ctx.passes is not None:
            matrix = state[0] if state else None
            outputs, saved = ctx.passes.forward(
                inputs, kernel, bias, matrix, observe=trains
            )
            ctx.save_for_backward(*state, *saved)
            return outputs
        outputs, residuals = bound.forward(
            inputs, kernel, state, trains, bias, slot=operation.slot
        )
        # Outside of training the state observes a kernel that outgrew its
        # scale. The amax of a parameter waits for `backward`: `_with_amax`.
        is_parameter = type(kernel) is torch.nn.Parameter
        if not trains and kernel.requires_grad and not is_parameter:
            residuals = bound.observed(residuals, inputs, kernel)
        ctx.shapes = residuals.shapes
        ctx.sums_bias = bias is not None and bound.takes_bias(
            bias, inputs, kernel
        )
        ctx.save_for_backward(*state, *residuals.leaves())
        return _no_view(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> tuple[Any, ...]:
        """Return a gradient, or None, for each argument of `forward`."""
        # Under create_graph=True, or for a batch of gradients.
        is_linked = torch.is_grad_enabled() or are_transforms_active()
        if ctx.passes is not None and not is_linked:
            return _straight_backward(ctx, outputs_grad)
        needs_bias, needs_inputs, needs_kernel = ctx.needs_input_grad[2:5]
        needed = needs_inputs, needs_kernel
        saved = ctx.saved_tensors  # PyTorch unpacks them at each access.
        if ctx.passes is not None:
            leaves = ctx.bound.straight.leaves(saved[ctx.states :])
            saved = *saved[: ctx.states], *leaves
        operation, slot = ctx.operation, ctx.operation.slot
        static = Pass(
            operation, ctx.bound, slot, ctx.shapes, needed, ctx.states
        )
        if operation.training is False and ctx.states:
            _, kernel_link = ctx.links
            saved = _with_amax(static, kernel_link, saved)
        if is_linked:
            gradients = differentiable_gradients(
                static, outputs_grad, ctx.links, saved
            )
            bias_grad = None
        else:
            sums_bias = needs_bias and ctx.sums_bias
            bias_shape = ctx.bias_shape if sums_bias else None
            *gradients, bias_grad = _gradients(
                static, outputs_grad, saved, bias_shape
            )
        if needs_bias and bias_grad is None:
            bias_grad = outputs_grad.sum_to_size(ctx.bias_shape)
        return None, None, bias_grad, *gradients


def _straight_backward(
    ctx: FunctionCtx, outputs_grad: Tensor
) -> tuple[Any, ...]:
    """Return what `Differentiable.backward` does, by its `ctx.passes`."""
    all_saved, slot = ctx.saved_tensors, ctx.operation.slot
    state, saved = all_saved[: ctx.states], all_saved[ctx.states :]
    matrix = state[0] if state else None
    needs_bias, *needed = ctx.needs_input_grad[2:5]
    # The passes sum the gradient of a bias that has one value per column.
    sums_bias = needs_bias and ctx.bias_shape == ctx.passes.columns
    needed = *needed, sums_bias
    with no_autocast(outputs_grad):
        *grads, bias_grad, state_grad = ctx.passes.backward(
            saved, outputs_grad, matrix, needed, slot
        )
    if needs_bias and not sums_bias:
        bias_grad = outputs_grad.sum_to_size(ctx.bias_shape)
    state_grads = (state_grad,) if state else ()
    return None, None, bias_grad, *grads, *state_grads


def _with_amax(
    static: Pass, kernel_link: Tensor | None, saved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Add a kernel's amax to what inference saved, if it is a parameter."""
    # A forward pass leaves it out, since it may never be differentiated.
    if type(kernel_link) is not torch.nn.Parameter:
        return saved
    state, *leaves = saved
    bound, kernel = static.bound, kernel_link  # See `links_of`.
    residuals = bound.residuals(leaves, static.shapes)
    # Of the inputs no amax is read outside of training: any tensor will do.
    with torch.no_grad():
        residuals = bound.observed(residuals, kernel, kernel)
    return state, *residuals.leaves(narrow=False)


def _gradients(
    static: Pass,
    outputs_grad: Tensor,
    saved: tuple[Tensor, ...],
    bias_shape: Shape | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of inputs, kernel, a state if any, and the bias.

    `saved` is the state, if there is one, and then what the forward pass saved.
    The last gradient is None without `bias_shape`.
    """
    bound, states = static.bound, static.states
    with torch.no_grad(), no_autocast(outputs_grad):
        inputs_grad, kernel_grad, state_grads, bias_grad = bound.backward(
            bound.residuals(saved[states:], static.shapes),
            outputs_grad,
            saved[:states],
            static.needed,
            bias_shape,
            static.slot,
        )
    return inputs_grad, kernel_grad, *state_grads, bias_grad


def differentiable_gradients(
    static: Pass, outputs_grad: Tensor, links: Links, saved: tuple[Tensor, ...]
) -> Any:
    """Return gradients of inputs, kernel and state that have a gradient too.

    Their gradients, the second derivatives, flow to `links`: one tensor for
    each operand, None for one that needs none. `saved` is the state, if there
    is one, and then what the forward pass saved.
    """
    pairs = zip(static.needed, links, strict=True)
    if any(needed and link is None for needed, link in pairs):
        # An operand without a link: differentiating these gradients raises.
        inputs_grad, kernel_grad, *state_grads, _ = _gradients(
            static, outputs_grad, saved
        )
        gradients = inputs_grad, kernel_grad
        raising = raising_if_differentiated(gradients, outputs_grad)
        return *raising, *state_grads
    # What is observed here goes into another slot than in a first derivative.
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
        """Return the gradients; `saved` has the state, then residuals."""
        inputs_grad, kernel_grad, *state_grads, _ = _gradients(
            static, outputs_grad, saved
        )
        gradients = inputs_grad, kernel_grad
        new = [x if x is None else _no_view(x) for x in gradients]
        return *new, *state_grads

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor
    ) -> None:
        """Save what the second derivatives are computed from."""
        ctx.static, outputs_grad, *ctx.links = inputs[:4]
        # A state's gradient is an observation: `backward` returns it as it is.
        _, _, *ctx.state_grads = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*ctx.state_grads)
        ctx.save_for_backward(outputs_grad, *inputs[4:])

    @staticmethod
    def backward(
        ctx: FunctionCtx, inputs_grad_grad: Any, kernel_grad_grad: Any, *_: Any
    ) -> tuple[Any, ...]:
        """Return the second derivatives, and those of the state."""
        # The last arguments are of the gradient of a state, which has none.
        outputs_grad, *saved = ctx.saved_tensors
        bound = ctx.static.bound
        leaves = saved[ctx.static.states :]
        with torch.no_grad(), no_autocast(outputs_grad):
            second = bound.second_derivatives(
                bound.residuals(leaves, ctx.static.shapes),
                outputs_grad,
                inputs_grad_grad,
                kernel_grad_grad,
                ctx.needs_input_grad[1:4],
            )
        if torch.is_grad_enabled():
            sources = *ctx.links, inputs_grad_grad, kernel_grad_grad
            second = raising_if_differentiated(second, outputs_grad, *sources)
        return None, *second, *ctx.state_grads, *(None for _ in leaves)


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

    `sources` are the tensors that they were computed from. Even if none of
    these requires a gradient, the results do.
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
    """Return a tensor; one that is a view, as a new tensor on its memory."""
    # Autograd refuses to change a view in place if a custom function made it:
    # `y += 1` on the outputs, or Keras 3.12's softmax, which adds its mask.
    return x.new_empty(0).set_(x) if x._is_view() else x


_PACKING_FACTOR = 0x0102040810204080
"""A factor that packs eight bytes of 0 or 1 into the highest byte.

The eight bytes are read as one int64; byte i becomes bit i. Source: Warren,
"Hacker's Delight", 7-2.
"""


class Relu(torch.autograd.Function):
    """`torch.relu` that saves a mask for the gradient, not the outputs."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """Return `relu(x)`; save the mask of positive outputs."""
        outputs = torch.relu(x)
        # The order of the axes in memory: that of the mask in memory too.
        ctx.axes = sorted(range(x.dim()), key=outputs.stride, reverse=True)
        ctx.save_for_backward(_packed_mask(outputs.permute(ctx.axes)))
        return outputs

    @staticmethod
    def backward(ctx: FunctionCtx, outputs_grad: Tensor) -> Tensor:
        """Return the gradient of `x`: `outputs_grad` where the mask is True."""
        (packed,) = ctx.saved_tensors
        mask = _unpacked_mask(packed, outputs_grad.permute(ctx.axes).shape)
        # The gradient gets the order in memory of its mask, here that of the
        # outputs: sums over the gradient depend on the order.
        order = [ctx.axes.index(axis) for axis in range(mask.dim())]
        mask = mask.permute(order).to(outputs_grad.dtype)
        return torch.ops.aten.threshold_backward(outputs_grad, mask, 0)


def _packed_mask(outputs: Tensor) -> Tensor:
    """Return the mask of nonzero outputs; on a CPU uint8, 8 bits in each."""
    mask = outputs.bool()
    # On other devices, where memory is fast and each operation is one more
    # kernel, a byte for each element. So too if the elements fill no bytes.
    if mask.device.type != "cpu" or mask.numel() % 8:
        return mask
    eights = mask.flatten().view(torch.int64)
    bits = eights.mul(_PACKING_FACTOR).bitwise_right_shift_(56)
    return bits.to(torch.uint8)


def _unpacked_mask(packed: Tensor, shape: Shape) -> Tensor:
    """Return the bool mask, in this shape, of which `packed` was made."""
    if packed.dtype == torch.bool:
        return packed
    eights = _BITS_OF_BYTES.index_select(0, packed.int())
    return eights.view(torch.bool).view(shape)


# This module may be loaded while a step is being compiled.
@torch.compiler.disable
def _bits_of_bytes() -> Tensor:
    """Return a table: for each byte, its 8 bits as 8 bytes in an int64."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return bits.bool().view(torch.int64).flatten()


_BITS_OF_BYTES = _bits_of_bytes()
