"""The interface of a backend, by subject, and the operations that it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.tracing import Measured, MeasuredStep, Traced
from keras_policy_ext.numerics.primitives import Primitives

Shape = tuple[Any, ...]


class SavedTensors(Protocol):
    """The tensors that are saved for the backward pass.

    Attributes:
        shapes: The shapes of the inputs and of the kernel.
    """

    shapes: tuple[Shape, Shape]

    def leaves(self, narrow: bool = True) -> list[Tensor]:
        """Return the tensors in a fixed order.

        Args:
            narrow: Whether to store them in as few bytes as possible.
        """


class Operation(Hashable, Protocol):
    """A function of tensors that defines its own gradient; hashable data.

    Equal operations compute the same function and share its compiled form.
    """

    @property
    def kernel_dtype(self) -> str:
        """The dtype of the kernel and of its gradient."""

    @property
    def training(self) -> bool | None:
        """True observes amaxes, False does not, None only if differentiated."""

    @property
    def first_use(self) -> Operation:
        """The operation of the layer's first use; all uses share its passes."""

    @property
    def another_use(self) -> Operation:
        """The same computation, with an observation slot of its own."""

    def resolved(self) -> Operation:
        """Return this operation with open settings replaced by current ones."""

    @property
    def bound(self) -> BoundOperation:
        """This operation with the kernels for the current device."""


class BoundOperation(Protocol):
    """The forward and backward pass of an `Operation` on a device."""

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        state: Shape,
        observe: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Return the outputs plus the bias, and the residuals."""

    def residuals(
        self, leaves: Sequence[Tensor], shapes: tuple[Shape, Shape]
    ) -> Any:
        """Rebuild the residuals from tensors in the order of their `leaves`."""

    def observed(self, residuals: Any, inputs: Tensor, kernel: Tensor) -> Any:
        """Add amaxes to the residuals of a forward pass without observation."""

    def caught_up(self, kernel: Tensor, state: Shape) -> Any:
        """Return the state, updated to cover the current kernel.

        For a pass whose observations are discarded.
        """

    def backward(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        state: Shape,
        needed: tuple[bool, bool] = (True, True),
    ) -> tuple[Tensor | None, Tensor | None, Shape]:
        """Return the gradients of the inputs, the kernel and the state."""

    def second_derivatives(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        inputs_grad_grad: Tensor | None,
        kernel_grad_grad: Tensor | None,
        needed: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, ...]:
        """Differentiate the gradients that `backward` returns.

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
    """A function of inputs and of constants without gradient."""

    @property
    def only_widens(self) -> bool:
        """True if nothing is rounded, so that a compiler may optimize it."""

    def resolved(self) -> FrozenOperation:
        """Return this operation with open settings replaced by current ones."""

    def forward(self, inputs: Tensor, constants: tuple[Tensor, ...]) -> Tensor:
        """Return the outputs."""

    def inputs_grad(
        self, outputs_grad: Tensor, constants: tuple[Tensor, ...], shape: Shape
    ) -> Tensor:
        """Return the gradient of the inputs."""


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
    """Return a one-byte dtype in which to store values of a format.

    It is the dtype of the format for OCP's float8 formats, otherwise uint8,
    for codes.
    """
    own = formats.get(format_name).family == "ocp"
    return format_name if own else "uint8"


class Arithmetic(Primitives):
    """Arithmetic that depends on what a device or a compiler does."""

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
        """Return True if `in_parts` splits kernels with this many elements."""
        return False

    def known_together(self, *scalars: Tensor) -> tuple[Tensor, ...]:
        """Return the same scalars, tied together for a compiler.

        The compiler then cannot reuse what it computed earlier from one of the
        scalars alone.
        """
        return scalars

    def stored(self, x: Tensor) -> Tensor:
        """Return the same tensor, materialized once by a compiler.

        Without this, a compiler may recompute it for each consumer, from
        larger inputs.
        """
        return x

    def have_normal_product(self, a: Tensor, b: Tensor) -> bool:
        """Return True if the products of these scales are known to be normal.

        The caller then skips the handling of subnormal and infinite products.
        Return False if a compiler fuses that handling at no cost.
        """
        return False

    def known_any(self, flags: Tensor) -> bool | None:
        """Return whether any flag is set, or None where reading would wait."""
        return None

    def on_cpu(self, x: Tensor) -> bool:
        """Return True if a tensor is known to be on a CPU."""
        raise NotImplementedError


class Tracing:
    """Tracing, compiled steps and eager runs."""

    def trace(self, function: Callable[..., Any], inputs: list[Any]) -> Traced:
        """Trace a function: return its outputs and matmuls, without computing.

        Args:
            function: Takes tensors and returns nested tensors.
            inputs: A `keras.KerasTensor` for each, with all sizes known.
        """
        raise NotImplementedError

    def is_compiling(self) -> bool:
        """Return True while a compiler traces that reads no context variables.

        JAX and TensorFlow run the Python code as it is.
        """
        return False

    def is_traced(self, x: Tensor) -> bool:
        """Return True if this Python code runs once for many steps.

        Also True if several threads run a step, one for each replica. `x` is a
        tensor of the step.
        """
        return self.is_compiling()

    def traces_for_xla(self) -> bool:
        """Return True if XLA is going to compile the current call, if known."""
        return False

    def step_by_step(self) -> AbstractContextManager[None]:
        """Return a context in which loops run eagerly, without gradients.

        For code that must read the values of each step of a recurrent layer.
        """
        return nullcontext()

    def functions_step_by_step(self) -> AbstractContextManager[None]:
        """Return a context in which layers' compiled functions run eagerly."""
        return nullcontext()

    def runs_now(self) -> bool:
        """Return True if calls in such contexts run eagerly, not traced."""
        return True

    def known_integer(self, x: Tensor) -> int | None:
        """Return an integer scalar as an int, or None while it is traced."""
        return int(x)


class Replicas:
    """Data-parallel replicas, and sharded kernels."""

    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[Any],
    ) -> None:
        """Update variables if a flag is set.

        Args:
            flag: Bool scalar, the same on every replica.
            update: Called with the arguments.
            arguments: Nested tensors and variables.
            variables: All variables that `update` assigns.
        """
        ops.cond(flag, lambda: update(*arguments), lambda: None)

    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """Return whether a bool scalar is true on all replicas."""
        return flag

    def combine_replicas(self, observation: Tensor) -> Tensor:
        """Combine the observations of all data-parallel replicas.

        Args:
            observation: (rows, width), the observation of this replica, or a
                settled state.

        Returns:
            (rows, width or more), for `Layout.settle`; the same on every
            replica.
        """
        return observation

    def gathering_of(self, variable: Any) -> Any:
        """Return how a kernel is gathered before it is multiplied, or None.

        Args:
            variable: The kernel.

        Returns:
            The hashable argument of `gathered`. Its tuple `axes` has the mesh
            axes that shard each axis of the kernel; an entry is empty if the
            axis is not sharded. None if there is nothing to gather.
        """
        return None

    def gathered(
        self, x: Tensor, gathering: Any, axes: Sequence[Any]
    ) -> Tensor:
        """Gather a tensor so that each device has the part that it multiplies.

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
        """Return True if a gradient of the current call may be taken."""
        return True

    def kept_dtype(self, x: Tensor, format_name: str) -> str:
        """Return the dtype in which a format is saved for the backward pass.

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
        """Compute `activation(x)`; save at most `x` for the gradient.

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
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
    ) -> Tensor:
        """Run `operation.forward`, differentiable by `operation.backward`."""
        raise NotImplementedError

    def run_and_add(
        self, bias: Tensor, operation: Operation, *tensors: Tensor
    ) -> Tensor:
        """Run an operation and add a bias to its outputs."""
        return ops.add(self.run(operation, *tensors), bias)

    def run_frozen(
        self, operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        """Run `operation.forward`, with the gradient `operation.inputs_grad`.

        Only the constants are saved for the gradient.
        """
        raise NotImplementedError

    def transpose(
        self,
        function: Callable[[Tensor], Tensor],
        shape: Shape,
        cotangent: Tensor,
    ) -> Tensor:
        """Apply the transpose of a linear function of a float32 tensor.

        Args:
            function: A function that is linear in its argument.
            shape: The shape of that argument.
            cotangent: A tensor with the shape of the function's result.

        Returns:
            Float32 tensor of shape `shape`.
        """
        raise NotImplementedError


class Memory:
    """The memory of a training step."""

    name: str

    def kept(self, step: MeasuredStep) -> Measured:
        """Measure the tensors that are saved for the backward pass.

        The step is not run if the framework can measure it without.
        """
        raise NotImplementedError

    def planned_bytes(self, step: MeasuredStep) -> int:
        """Return the bytes that a compiler plans for both passes.

        Raises:
            ValueError: If no compiler plans the memory of a whole step.
        """
        raise ValueError(
            f"On {self.name} no compiler plans the memory of a whole step. "
            "Received: compile=True. Allowed: False, or another backend: set "
            "KERAS_BACKEND=jax."
        )


class States(Replicas):
    """State variables; their gradients carry the observations."""

    name: str

    def seen_lately(self, state: Tensor) -> bool:
        """Return whether a device reported that all operands were observed."""
        return False

    def settle(self, settle: Settle, value: Tensor, previous: Tensor) -> Tensor:
        """Compute the new state, the same on every replica.

        Args:
            settle: Function of the assigned value and the state before.
            value: An observation, a settled state, or zeros.
            previous: The settled state before.
        """
        return self.settle_here(settle, self.combine_replicas(value), previous)

    def settle_here(
        self, settle: Settle, value: Tensor, previous: Tensor
    ) -> Tensor:
        """Call `settle` without combining values over replicas."""
        return settle(value, previous)

    def version(self, x: Tensor) -> int | None:
        """Return how often a tensor was changed in place; None if unknown."""
        return None

    def assigned(self, variable: Any, value: Tensor) -> Tensor:
        """Return the new value of a state variable that is assigned `value`."""
        return self.settle(variable.settling, value, variable.value)

    def keep_observations(self, variable: Any, tensor: Tensor) -> None:
        """Store the observations of a state apart from its gradient.

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
        """Return True if a compiled function reuses its trace.

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
        """Return the observations of earlier micro-batches.

        Returns:
            Float32 (operands, width); None if there are none, or if the
            optimizer accumulates them with the gradients.
        """
        return None

    def put_earlier_observation(self, variable: Any, value: Tensor) -> None:
        """Restore what `earlier_observation` returned."""

    def known_value(self, variable: Any) -> Tensor | None:
        """Return the value of a state variable if it can be read now.

        Returns:
            Its value; None while it is traced, or if reading it would stall
            each step.
        """
        return None

    def follow_shards(
        self, variables: Sequence[Any], modules: Sequence[Any]
    ) -> None:
        """Make variables read their parameters where `fully_shard` puts them.

        Args:
            variables: The variables of one model.
            modules: Its layers.

        Raises:
            ValueError: If `fully_shard` has sharded no parameter, or one in a
                way that cannot be trained.
        """
        raise ValueError(
            "`fully_shard` works only on PyTorch. Received: the backend "
            f"{self.name!r}. Allowed: 'torch'. Do not call `follow_shards` "
            "here; on JAX use keras.distribution.ModelParallel."
        )

    def settle_observed(self, variables: Sequence[Any]) -> None:
        """Enter the observations of states into the states.

        Args:
            variables: State variables.

        Raises:
            ValueError: If the framework returns gradients instead of storing
                them in the variables.
        """
        raise ValueError(
            f"On {self.name} gradients are not stored in the variables. "
            "Received: no gradients. Allowed: gradients for all of "
            "`model.trainable_variables`, from your training step. Pass them "
            "as the second argument."
        )


class Backend(Arithmetic, Tracing, Gradients, Memory, States):
    """The interface of a backend, implemented in `keras.ops` where possible."""

    name = "keras.ops"

    keeps_values_apart = False
    """Whether compiled steps are functions of the values of variables."""

    keeps_variables_in_graphs = False
    """Whether compiled steps read variables without calling this package."""

    def device_name(self) -> str:
        """Return the device's name, such as `"cpu"` or `"NVIDIA H200"`."""
        return "cpu"
