"""The interface of a backend, by subject, and the operations that it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.flows import Flow
from keras_policy_ext.backends.tracing import (
    Traced,
)
from keras_policy_ext.numerics.observations import Slot
from keras_policy_ext.numerics.primitives import Primitives

Shape = tuple[Any, ...]


class Operation(Hashable, Protocol):
    """A function of tensors with a gradient of its own; hashable data.

    Equal operations compute the same function and share its compiled form.
    """

    @property
    def kernel_dtype(self) -> str:
        """The dtype of the kernel and of its gradient."""

    @property
    def training(self) -> bool | None:
        """True to record amaxes; None: only where a gradient is taken."""

    @property
    def slot(self) -> int:
        """The number of this use of the kernel in the step."""

    @property
    def first_use(self) -> Operation:
        """The same operation with slot 0, whose compiled passes all uses share.

        It is the same object for all slots.
        """

    def another_slot(self, slot: Slot) -> Slot:
        """Return the slot for the observation of a gradient's gradient."""

    def resolved(self) -> Operation:
        """Return a copy whose `prefer` setting is the current one."""

    @property
    def bound(self) -> BoundOperation:
        """This operation, bound to the kernels of the current device.

        It is the same object for all slots.
        """


class BoundOperation(Protocol):
    """The forward and backward pass of an `Operation` on a device.

    Attributes:
        straight: Both passes as lists of kernels; see `Engine`.
    """

    straight: Any

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        state: Shape,
        observe: bool,
        bias: Tensor | None = None,
        once: bool = False,
        slot: Slot = 0,
    ) -> tuple[Tensor, Any]:
        """Return the outputs plus the bias, and the saved tensors.

        If `once` no backward pass follows.
        """

    def residuals(
        self, leaves: Sequence[Tensor], shapes: tuple[Shape, Shape]
    ) -> Any:
        """Rebuild the saved tensors from a list in the order of `leaves`."""

    def observed(self, residuals: Any, inputs: Tensor, kernel: Tensor) -> Any:
        """Add the operands' amaxes to tensors saved without them."""

    def caught_up(self, kernel: Tensor, state: Shape) -> Any:
        """Return a state with a scale large enough for the current kernel.

        For a pass whose observations are discarded.
        """

    def backward(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        state: Shape,
        needed: tuple[bool, bool] = (True, True),
        bias_shape: Shape | None = None,
        slot: Slot = 0,
    ) -> tuple[Tensor | None, Tensor | None, Shape, Tensor | None]:
        """Return the gradients of the inputs, the kernel, state and bias."""

    def takes_bias(self, bias: Tensor, inputs: Tensor, kernel: Tensor) -> bool:
        """Return True if `backward` computes a bias's gradient at no cost."""

    def second_derivatives(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        inputs_grad_grad: Tensor | None,
        kernel_grad_grad: Tensor | None,
        needed: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the gradients that `backward` returns.

        Args:
            residuals: As for `backward`.
            outputs_grad: Likewise.
            inputs_grad_grad: The gradient with respect to the inputs gradient;
                None for zeros.
            kernel_grad_grad: The gradient with respect to the kernel gradient;
                None for zeros.
            needed: Which results to compute.

        Returns:
            The gradients of the gradient of the outputs, of the inputs and of
            the kernel; None for each that is not needed or zero.
        """


class FrozenOperation(Hashable, Protocol):
    """A function of inputs and constants; only the inputs have a gradient."""

    @property
    def only_widens(self) -> bool:
        """True if the operation rounds no value, only converts to wider."""

    def resolved(self) -> FrozenOperation:
        """Return a copy whose `prefer` setting is the current one."""

    def forward(self, inputs: Tensor, constants: tuple[Tensor, ...]) -> Tensor:
        """Return the outputs for these inputs and constants."""

    def inputs_grad(
        self, outputs_grad: Tensor, constants: tuple[Tensor, ...], shape: Shape
    ) -> Tensor:
        """Return the gradient of the inputs, from that of the outputs."""


DIFFERENTIATED_AGAIN = (
    "This gradient of a layer in float8 cannot be differentiated again. "
    "Received: a third derivative, a derivative in forward mode, or a second "
    "derivative through a part that is compiled separately (torch.compile, "
    "jax.jit, tf.function, or a loop inside the gradients). Allowed: second "
    "derivatives in reverse mode. Compile the whole computation of both "
    "gradients; for recurrent layers set unroll=True."
)

Settle = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def saved_dtype(format_name: str) -> str:
    """Return the one-byte dtype that stores values of a format.

    It is the dtype of the format for OCP's float8 formats, otherwise uint8,
    for codes.
    """
    own = formats.get(format_name).family == "ocp"
    return format_name if own else "uint8"


class Arithmetic(Primitives):
    """Arithmetic whose best form depends on the device or compiler."""

    def in_parts(
        self,
        product: Callable[[Tensor, Tensor], Tensor],
        codes: Tensor,
        scale: Tensor,
        axis: int,
        out_axis: int,
    ) -> Tensor:
        """Compute `product(codes, scale)`, in parts if that saves memory.

        Splitting avoids a new allocation for the whole kernel in floats at
        each call.

        Args:
            product: Function of codes and their scales. A slice of `codes`
                along `axis` gives the same slice of the result along
                `out_axis`.
            codes: Uint8.
            scale: Same rank as `codes`; each axis has size 1 or the size of
                `codes`.
            axis: The axis of `codes` to split.
            out_axis: The corresponding axis of the result.
        """
        return product(codes, scale)

    def cuts(self, numbers: int) -> bool:
        """Return True if `in_parts` splits a kernel of `numbers` elements."""
        return False

    def have_normal_product(self, a: Tensor, b: Tensor) -> bool:
        """Return True if the products `a * b` of scales are normal numbers.

        The caller then skips the handling of subnormal and infinite products.
        Return False if a compiler fuses that handling at no cost.
        """
        return False

    def known_any(self, flags: Tensor) -> bool | None:
        """Return whether any flag is True; None if reading would wait."""
        return None

    def on_cpu(self, x: Tensor) -> bool:
        """Return True if the tensor's memory is known to be on a CPU."""
        raise NotImplementedError


class Tracing:
    """Questions about tracing and compilation, and switches to eager runs."""

    def trace(
        self,
        function: Callable[..., Any],
        inputs: list[Any],
        flow: Flow | None = None,
    ) -> Traced:
        """Trace a function; return its outputs and matmuls, computing nothing.

        Args:
            function: Takes tensors and returns nested tensors.
            inputs: A `keras.KerasTensor` for each, with all sizes known.
            flow: Follows the tensors of the program, if it is given.
        """
        raise NotImplementedError

    def mark_call(
        self,
        flow: Flow,
        number: int,
        operands: list[Tensor],
        results: list[Tensor],
    ) -> list[Tensor]:
        """Mark a call in the program that is being traced; return its results.

        Args:
            flow: What `trace` was given.
            number: The number that the call has in it.
            operands: The tensors that the call is given.
            results: Tensors in place of its results.
        """
        raise NotImplementedError

    def is_compiling(self) -> bool:
        """Return True while a compiler that reads no context variables traces.

        JAX and TensorFlow run the Python code as it is.
        """
        return False

    def is_traced(self, x: Tensor) -> bool:
        """Return True if this Python code is traced, to run for many steps.

        Also True if several threads run a step, one for each replica. `x` is a
        tensor of the step.
        """
        return self.is_compiling()

    def traces_for_xla(self) -> bool:
        """Return True if the current call is known to be traced for XLA."""
        return False

    def step_by_step(self) -> AbstractContextManager[None]:
        """Return a context in which recurrent loops run eagerly.

        Loops in the context have no gradients.

        For code that must read the values of each step of a recurrent layer.
        """
        return nullcontext()

    def functions_step_by_step(self) -> AbstractContextManager[None]:
        """Return a context in which layers' compiled functions run eagerly."""
        return nullcontext()

    def runs_now(self) -> bool:
        """Return True if calls in a `step_by_step` context run eagerly."""
        return True

    def known_integer(self, x: Tensor) -> int | None:
        """Return an integer scalar as an int; None if it is being traced."""
        return int(x)


class Replicas:
    """Operations on data-parallel replicas and on sharded kernels."""

    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[Any],
    ) -> None:
        """Call `update(*arguments)` if a flag is set, also in compiled code.

        Args:
            flag: Bool scalar, the same on every replica.
            update: Called with the arguments.
            arguments: Nested tensors and variables.
            variables: All variables that `update` assigns.
        """
        ops.cond(flag, lambda: update(*arguments), lambda: None)

    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """Return whether `flag` is true on every data-parallel replica."""
        return flag

    def combine_replicas(self, observation: Tensor) -> Tensor:
        """Combine this replica's observation with those of all replicas.

        Args:
            observation: (rows, width), the observation of this replica, or a
                settled state.

        Returns:
            (rows, width or more), for `Layout.settle`; the same on every
            replica.
        """
        return observation

    def gathering_of(self, variable: Any) -> Any:
        """Return how a sharded kernel is gathered for a matmul, or None.

        Args:
            variable: The kernel.

        Returns:
            The hashable argument of `gathered`. Its tuple `axes` has the mesh
            axes that shard each axis of the kernel; an entry is empty if the
            axis is not sharded. `is_quantized` tells whether the kernel
            arrives gathered and quantized. None if there is nothing to
            gather.
        """
        return None

    def gathered(
        self, x: Tensor, gathering: Any, axes: Sequence[Any]
    ) -> Tensor:
        """Gather the shards of a tensor that each device needs for a matmul.

        Args:
            x: The tensor; each device has computed one shard of it.
            gathering: From `gathering_of`.
            axes: The sharding of this tensor, like `gathering.axes` of the
                kernel; None for an axis whose sharding is not known.
        """
        return x


class Gradients:
    """Operations that define their own gradient."""

    def may_take_gradients(self) -> bool:
        """Return True if the current call may have a backward pass."""
        return True

    def kept_dtype(self, x: Tensor, format_name: str) -> str:
        """Return the one-byte dtype that saves a format for the backward pass.

        It has one byte: uint8, for codes, if no framework computes in the
        dtype of the format.
        """
        return saved_dtype(format_name)

    def relu(self, x: Tensor) -> Tensor:
        """Compute `ops.relu(x)`; save one bit per element for the gradient.

        Keras's function saves the outputs, which the next layer already saves
        as codes. The gradient is equal to the bit.
        """
        raise NotImplementedError

    def recomputed(
        self, activation: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Compute `activation(x)`; save no more than `x` for the gradient.

        The gradient is equal to the bit. If a compiler would round a
        recomputation differently, the choice of what to save is left to the
        compiler.

        Args:
            activation: An elementwise function of Keras without state.
            x: Of any shape.
        """
        return activation(x)

    def run(
        self,
        operation: Operation,
        bias: Tensor | None,
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
    ) -> Tensor:
        """Run `operation.forward`; the gradient is `operation.backward`.

        Args:
            operation: The operation.
            bias: Added to the outputs; None for none.
            inputs: See `BoundOperation.forward`.
            kernel: See `BoundOperation.forward`.
            *state: See `BoundOperation.forward`; at most one tensor.
        """
        raise NotImplementedError

    def run_frozen(
        self, operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        """Run `operation.forward`; the gradient is `operation.inputs_grad`.

        Only the constants are saved for the gradient.
        """
        raise NotImplementedError

    def unchanged_random_state(self) -> AbstractContextManager[Any]:
        """On exit of the block, restore the random state of the framework.

        Keras draws from it on PyTorch alone, for layers without a seed.
        """
        return nullcontext()

    def random_state(self) -> list[np.ndarray]:
        """Copy the random state of the framework, where Keras draws from it.

        Returns:
            uint8 arrays, one for each generator; none where Keras's own seeds
            are all the random state that there is.
        """
        return []

    def restore_random_state(self, states: Sequence[np.ndarray]) -> None:
        """Restore what `random_state` returned, on as many devices or more."""

    def transpose(
        self,
        function: Callable[[Tensor], Tensor],
        shape: Shape,
        cotangent: Tensor,
    ) -> Tensor:
        """Apply the transpose of a linear function to a float32 cotangent.

        Args:
            function: A function that is linear in its argument.
            shape: The shape of that argument.
            cotangent: A tensor with the shape of the function's result.

        Returns:
            Float32 tensor of shape `shape`.
        """
        raise NotImplementedError


class States(Replicas):
    """State variables, whose "gradients" are observations of amaxes."""

    name: str

    def seen_lately(self, state: Tensor) -> bool:
        """Return True if a GPU reported that all operands were observed."""
        return False

    def settle(self, settle: Settle, value: Tensor, previous: Tensor) -> Tensor:
        """Compute a state's new value, equal on every replica.

        Args:
            settle: Function of the assigned value and the state before.
            value: An observation, a settled state, or zeros.
            previous: The settled state before.
        """
        return self.settle_here(settle, self.combine_replicas(value), previous)

    def settle_here(
        self, settle: Settle, value: Tensor, previous: Tensor
    ) -> Tensor:
        """Return `settle(value, previous)`, without combining replicas."""
        return settle(value, previous)

    def version(self, x: Tensor) -> int | None:
        """Return the count of in-place changes of a tensor; None if unknown."""
        return None

    def as_value_of(self, variable: Any, value: Any) -> Tensor:
        """Return a value as a tensor that can be assigned to a variable."""
        return ops.convert_to_tensor(value, dtype=variable.dtype)

    def assigned(self, variable: Any, value: Tensor) -> Tensor | None:
        """Return the new state of `variable` after `value` is assigned.

        None if that is stored already.
        """
        return self.settle(variable.settling, value, variable.value)

    def keep_observations(self, variable: Any, tensor: Tensor) -> None:
        """Store a state's observations in the variable, not in `.grad`.

        Does nothing on a framework that returns gradients to the caller.

        Args:
            variable: A state variable that was just initialized.
            tensor: Its value.
        """

    def let_go(self, variables: Sequence[Any]) -> None:
        """Free the memory of variables as soon as nothing refers to them.

        Args:
            variables: Variables of a model that no longer uses them.
        """

    def is_compiled(self, function: Any) -> bool:
        """Return True if `function` is compiled and may reuse an old trace.

        Args:
            function: Any object.

        Returns:
            False also if the framework checks what has changed since.
        """
        return False

    def forget_traces(self, function: Any, owner: Any) -> None:
        """Discard the traces of a compiled function before its next call.

        Args:
            function: A function that `is_compiled`.
            owner: The object whose method it is; None for none.
        """

    def earlier_observation(self, variable: Any) -> Tensor | None:
        """Return the observations of micro-batches since the last update.

        Returns:
            Float32 (operands, width); None if there are none, or if the
            optimizer accumulates them with the gradients.
        """
        return None

    def put_earlier_observation(self, variable: Any, value: Tensor) -> None:
        """Restore into a state what `earlier_observation` returned for it."""

    def known_value(self, variable: Any) -> Tensor | None:
        """Return a state variable's value; None if it cannot be read now.

        Returns:
            Its value; None while it is traced, or if reading it would stall
            each step.
        """
        return None


class Backend(Arithmetic, Tracing, Gradients, States):
    """The base class of backends, in `keras.ops` where possible."""

    name = "keras.ops"

    keeps_values_apart = False
    """Whether compiled steps are functions of the values of variables."""

    keeps_variables_in_graphs = False
    """Whether compiled steps read variables without calling this package."""

    def device_name(self) -> str:
        """Return the device's name, such as `"cpu"` or `"NVIDIA H200"`."""
        return "cpu"
