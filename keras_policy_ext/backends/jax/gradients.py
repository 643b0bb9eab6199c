"""JAX: run operations with their first and second derivatives.

The backward pass reads quantized copies, which JAX does not connect to the
operands. Therefore the gradient is also a function of links to the operands:
zeros of the operands' shapes, used for their gradients only. Links exist only
where gradients are differentiated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import partial_eval

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.interface import (
    DIFFERENTIATED_AGAIN,
    FrozenOperation,
    Operation,
)

State = tuple[Tensor, ...]  # Of a recipe, or nothing.
Links = tuple[Tensor, Tensor] | None  # None: no second derivative.
Shape = tuple[int, ...]

# JAX has no public way to ask what traces (0.10.2). Without this class
# gradients are taken once.
_TracerOfProgram = getattr(partial_eval, "DynamicJaxprTracer", jax.core.Tracer)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A value that is no tensor, saved for the backward pass."""

    value: Any


@jax.tree_util.register_pytree_node_class
class _SavedTensors:
    """A JAX pytree of saved tensors, with static shapes."""

    def __init__(self, tensors: Sequence[Tensor], shapes: Any):
        self.tensors = list(tensors)
        self.shapes = shapes  # Of inputs and kernel; if frozen, of inputs.

    def tree_flatten(self) -> tuple[list[Tensor], Any]:
        return self.tensors, self.shapes

    @classmethod
    def tree_unflatten(
        cls, shapes: Any, tensors: Sequence[Tensor]
    ) -> _SavedTensors:
        return cls(tensors, shapes)


def _behind_barrier_on_cpu(x: Tensor) -> Tensor:
    """Return the same tensor; on a CPU, behind an optimization barrier."""
    # XLA moves the reshape of a matmul past the operations after it one at a
    # time, and repeats its pass over the whole program up to 25 times. It
    # removes barriers before it fuses (JAX 0.10). XLA for a GPU does not fuse
    # across barriers, so it gets none.
    barrier = lax.optimization_barrier
    return lax.platform_dependent(x, cpu=barrier, default=lambda x: x)


# Each pass is compiled as a whole, so that an eager call does not dispatch
# its operations one by one; inside a compiled function these are inlined.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    operation: Operation,
    observe: bool,
    inputs: Tensor,
    kernel: Tensor,
    state: State,
    bias: Tensor | None,
) -> tuple[Tensor, _SavedTensors]:
    """Return the outputs, and the tensors to save for the backward pass.

    `observe` says whether the amaxes of the operands are needed.
    """
    outputs, residuals = operation.bound.forward(
        inputs, kernel, state, observe, bias
    )
    if not observe:
        # The backward pass needs amaxes to see if a kernel outgrew its scale.
        residuals = operation.bound.observed(residuals, inputs, kernel)
    outputs = _behind_barrier_on_cpu(outputs)
    return outputs, _SavedTensors(residuals.leaves(), residuals.shapes)


@functools.partial(jax.jit, static_argnums=0)
def _outputs(
    operation: Operation,
    inputs: Tensor,
    kernel: Tensor,
    state: State,
    bias: Tensor | None,
) -> Tensor:
    """Return the outputs of a pass that no gradient follows."""
    outputs, _ = operation.bound.forward(
        inputs, kernel, state, observe=False, bias=bias, no_backward=True
    )
    return outputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
    operation: Operation,
    inputs: Tensor,
    kernel: Tensor,
    state: State,
    bias: Tensor | None,
) -> Tensor:
    """Run an operation with JAX, and add a bias; see `Backend.run`.

    JAX calls this function only if no gradient is taken.
    """
    return _outputs(operation.first_use, inputs, kernel, state, bias)


def _run_forward(
    operation: Operation,
    inputs: Tensor,
    kernel: Tensor,
    state: State,
    bias: Tensor | None,
) -> tuple[Tensor, tuple[_SavedTensors, State, Links, _Static]]:
    """Return the outputs, and what is saved for the backward pass.

    Saved are the residuals (tensors of the forward pass), the state of the
    recipe, the links (see this module; None if there is no second derivative)
    and the shape of a bias. A state, if there is one, is trained by a
    "gradient" in which the backward pass returns the amaxes that it saw.
    """
    # JAX passes each tensor as a `CustomVJPPrimal`: its `value`, and whether it
    # is `perturbed`, which is that a gradient of it is taken.
    kernel_learns = kernel.perturbed
    state_learns = any(x.perturbed for x in state)
    inputs, kernel = inputs.value, kernel.value
    state = tuple(x.value for x in state)
    bias_shape = None
    if bias is not None:
        bias, bias_shape = bias.value, bias.value.shape
    if kernel_learns and not state_learns:
        # The amaxes that this pass observes are a gradient of the state, and
        # discarded. So a scale too small for the kernel is raised here.
        state = operation.bound.caught_up(kernel, state)
    # A gradient is taken, so `training=None` counts as True.
    observe = operation.training is not False
    # One compiled program for all uses of the kernel in a step (`slot` is the
    # number of a use).
    forward = functools.partial(_forward, operation.first_use, observe)
    tensors = inputs, kernel, state
    if not _are_differentiated_twice(*tensors):
        outputs, saved = forward(*tensors, bias)
        return outputs, (saved, state, None, _Static(bias_shape))
    # The residuals are constants: second derivatives go through the links. JAX
    # differentiates the addition of the bias.
    outputs, saved = forward(*lax.stop_gradient(tensors), None)
    links = _link(inputs), _link(kernel)
    outputs = _with_linked_gradients(operation, outputs, saved, state, links)
    outputs = outputs if bias is None else outputs + bias
    return outputs, (saved, state, links, _Static(bias_shape))


def _run_backward(
    operation: Operation,
    residuals: tuple[_SavedTensors, State, Links, _Static],
    outputs_grad: Tensor,
) -> tuple[Tensor | None, Tensor | None, State, Tensor | None]:
    """Return the gradients of inputs, kernel, state and, if any, bias."""
    if isinstance(outputs_grad, SymbolicZero):
        outputs_grad = jnp.zeros(outputs_grad.shape, outputs_grad.dtype)
    saved, state, links, static = residuals
    bias_shape, tensors = static.value, (saved, state, links, outputs_grad)
    if bias_shape is None or links is None:
        return _backward_of(operation, bias_shape, *tensors)
    # With links the gradient of the bias may be differentiated again, which a
    # kernel that sums it could not be: JAX sums it.
    inputs_grad, kernel_grad, state_grad, _ = _backward_of(
        operation, None, *tensors
    )
    row_axes = tuple(range(outputs_grad.ndim - len(bias_shape)))
    bias_grad = jnp.sum(outputs_grad, row_axes).reshape(bias_shape)
    return inputs_grad, kernel_grad, state_grad, bias_grad


run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


def _are_differentiated_twice(*tensors: Any) -> bool:
    """Return True if JAX takes a second derivative of these tensors."""
    # JAX then passes tracers. Tracers of programs, such as the body of a loop,
    # do not count, since links would become part of the program.
    return any(
        isinstance(leaf, jax.core.Tracer)
        and not isinstance(leaf, _TracerOfProgram)
        for leaf in jax.tree_util.tree_leaves(tensors)
    )


@jax.custom_vjp
def _link(x: Tensor) -> Tensor:
    """Return zeros like `x`; the gradient of the zeros is passed to `x`."""
    return jnp.zeros(x.shape, x.dtype)


_link.defvjp(lambda x: (_link(x), None), lambda _, gradient: (gradient,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_linked_gradients(
    operation: Operation,
    outputs: Tensor,
    saved: _SavedTensors,
    state: State,
    links: Links,
) -> Tensor:
    """Return `outputs` unchanged; the gradients go to `links` and `state`.

    `links` are zeros in place of the operands, which get their gradients.
    """
    return outputs


def _with_linked_gradients_forward(
    operation: Operation, outputs: Tensor, *residuals: Any
) -> tuple[Tensor, Any]:
    return _with_linked_gradients(operation, outputs, *residuals), residuals


def _with_linked_gradients_backward(
    operation: Operation, residuals: Any, outputs_grad: Tensor
) -> tuple[None, None, State, Any]:
    """Return the gradients of all arguments of `_with_linked_gradients`.

    Those of `outputs` and `saved` are None.
    """
    gradients = _backward_of(operation, None, *residuals, outputs_grad)
    of_inputs, of_kernel, of_state, _ = gradients
    return None, None, of_state, (of_inputs, of_kernel)


_with_linked_gradients.defvjp(
    _with_linked_gradients_forward, _with_linked_gradients_backward
)


_LARGE = 1 << 16
"""Tensors with fewer elements may be saved in any dtype."""


def _decoded_after(grad: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
    """Return saved tensors that XLA decodes only in the backward pass.

    On a CPU float8 codes are made to depend on `grad`, the outputs gradient.
    """
    codes = {
        place: tensor
        for place, tensor in enumerate(saved)
        if tensor.dtype == jnp.uint8
        # The size is symbolic in an export with open sizes.
        and isinstance(tensor.size, int)
        and tensor.size >= _LARGE
    }
    off_cpu = jax.default_backend() != "cpu"
    if off_cpu or not codes or 0 in grad.shape:
        return list(saved)
    # In one program XLA for a CPU would decode codes where they are made, and
    # save float32: it removes barriers before it fuses. So codes pass through a
    # loop that XLA cannot see through and that changes nothing: it runs zero
    # times or, if the gradient starts with NaN, inverts all bits twice.
    times = 2 * jnp.isnan(grad.ravel()[0]).astype(jnp.int32)
    codes, _ = lax.while_loop(
        lambda carry: carry[1] > 0,
        lambda carry: (jax.tree.map(jnp.invert, carry[0]), carry[1] - 1),
        (codes, times),
    )
    return [codes.get(place, tensor) for place, tensor in enumerate(saved)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    static: tuple[Operation, Shape | None],
    saved: _SavedTensors,
    state: State,
    links: Links,
    outputs_grad: Tensor,
    slot: Tensor,
) -> tuple[Tensor | None, Tensor | None, State, Tensor | None]:
    """Return the gradients of the inputs, the kernel, state and bias.

    `static` is the operation, and the shape of a bias that is added, or None.
    `saved` are the tensors of the forward pass. `slot` is the number of this
    use of the kernel in the step. `links` are only read by the gradient of this
    function.
    """
    # The second part of `static` is the shape of a bias that is added, or None.
    operation, bias_shape = static
    tensors = _decoded_after(outputs_grad, saved.tensors)
    residuals = operation.bound.residuals(tensors, saved.shapes)
    inputs_grad, kernel_grad, state_grad, bias_grad = operation.bound.backward(
        residuals, outputs_grad, state, bias_shape=bias_shape, slot=slot
    )
    inputs_grad = _behind_barrier_on_cpu(inputs_grad)
    kernel_grad = _behind_barrier_on_cpu(kernel_grad)
    return inputs_grad, kernel_grad, state_grad, bias_grad


def _gradients_forward(
    static: tuple[Operation, None], *tensors: Any
) -> tuple[Any, Any]:
    """Return the gradients, and what their own gradients are made of.

    `static` is the operation, and None for no bias. `tensors` are the other
    arguments of `_gradients`.
    """
    operation, _ = static
    saved, state, links, outputs_grad, slot = tensors
    other_slot = operation.another_slot(slot)
    gradients = _gradients(
        static, saved, state, links, outputs_grad, other_slot
    )
    _, _, observed_amaxes, _ = gradients
    return gradients, (saved, observed_amaxes, links, outputs_grad)


def _gradients_backward(
    static: tuple[Operation, None], residuals: Any, gradients: Any
) -> tuple[Any, ...]:
    """Differentiate `_gradients`; return a gradient per argument.

    `static` is the operation, and None for no bias. `gradients` are those of
    the results of `_gradients`.
    """
    operation, _ = static
    saved, observed_amaxes, links, outputs_grad = residuals
    inputs_grad_grad, kernel_grad_grad, *_ = gradients
    if links is None:
        raise NotImplementedError(DIFFERENTIATED_AGAIN)
    of_outputs_grad, *of_operands = _second_derivatives(
        operation, saved, outputs_grad, inputs_grad_grad, kernel_grad_grad
    )
    # The "gradient" of a state is not one: it carries the amaxes that were
    # observed. So it is passed on as it is.
    return None, observed_amaxes, tuple(of_operands), of_outputs_grad, None


_gradients.defvjp(_gradients_forward, _gradients_backward)
_backward = jax.jit(_gradients, static_argnums=0)


def _backward_of(
    operation: Operation, bias_shape: Shape | None, *tensors: Any
) -> tuple[Tensor | None, Tensor | None, State, Tensor | None]:
    """Compute the gradients for one use of a kernel in a step.

    All uses share one compiled pass, which takes the number of the use.
    """
    static = operation.first_use, bias_shape
    gradients: Any = _backward(static, *tensors, np.int32(operation.slot))
    return gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _second_derivatives_once(
    operation: Operation,
    saved: _SavedTensors,
    outputs_grad: Tensor,
    inputs_grad_grad: Tensor,
    kernel_grad_grad: Tensor,
) -> tuple[Tensor, ...]:
    """Return the second derivatives; a third derivative raises."""
    residuals = operation.bound.residuals(saved.tensors, saved.shapes)
    return operation.bound.second_derivatives(
        residuals, outputs_grad, inputs_grad_grad, kernel_grad_grad
    )


def _once_forward(operation: Operation, *arguments: Any) -> tuple[Any, None]:
    return _second_derivatives_once(operation, *arguments), None


def _refuse_third(operation: Operation, residuals: None, gradients: Any) -> Any:
    """Raise: the backward rule of the second derivatives."""
    raise NotImplementedError(DIFFERENTIATED_AGAIN)


_second_derivatives_once.defvjp(_once_forward, _refuse_third)
_second_derivatives = jax.jit(_second_derivatives_once, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _frozen_outputs(
    operation: FrozenOperation, inputs: Tensor, constants: State
) -> Tensor:
    return operation.forward(inputs, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_frozen(
    operation: FrozenOperation, inputs: Tensor, constants: State
) -> Tensor:
    """Run a frozen operation with JAX; see `Backend.run_frozen`."""
    return _frozen_outputs(operation, inputs, constants)


def _run_frozen_forward(
    operation: FrozenOperation, inputs: Tensor, constants: State
) -> tuple[Tensor, _SavedTensors]:
    outputs = _frozen_outputs(operation, inputs, constants)
    return outputs, _SavedTensors(constants, inputs.shape)


def _run_frozen_backward(
    operation: FrozenOperation, saved: _SavedTensors, outputs_grad: Tensor
) -> tuple[Tensor, State]:
    """Return the gradient of the inputs, and zeros for the constants."""
    constants = tuple(saved.tensors)
    inputs_grad = operation.inputs_grad(outputs_grad, constants, saved.shapes)
    return inputs_grad, tuple(map(_no_gradient, constants))


run_frozen.defvjp(_run_frozen_forward, _run_frozen_backward)


def _no_gradient(constant: Tensor) -> Any:
    """Return zeros as JAX expects them for a constant's gradient."""
    if jnp.issubdtype(constant.dtype, jnp.floating):
        return jnp.zeros_like(constant)
    # JAX's dtype for a gradient of integers.
    return np.zeros(constant.shape, jax.dtypes.float0)
