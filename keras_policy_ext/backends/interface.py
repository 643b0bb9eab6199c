"""What is asked of a backend, by subject, and the operations that it runs."""

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
        shapes: Of the inputs and the kernel.
    """

    shapes: tuple[Shape, Shape]

    def leaves(self, narrow: bool = True) -> list[Tensor]:
        """The tensors, in a fixed order.

        Args:
            narrow: Whether in as few bytes as may be.
        """


class Operation(Hashable, Protocol):
    """A function of tensors that defines its own gradient; hashable data.

    Equal operations compute the same, so that what a framework has compiled
    for one serves the other.
    """

    @property
    def kernel_dtype(self) -> str:
        """Dtype of the kernel and of its gradient."""

    @property
    def training(self) -> bool | None:
        """True observes; False does not; None: where a gradient is taken."""

    @property
    def first_use(self) -> Operation:
        """One that has the same forward pass, for all that share it."""

    @property
    def another_use(self) -> Operation:
        """The same computation, whose observations are told apart."""

    def resolved(self) -> Operation:
        """This operation, when what it leaves open can be known."""

    @property
    def bound(self) -> BoundOperation:
        """This operation with the kernels for the device that is here."""


class BoundOperation(Protocol):
    """The passes of an `Operation`, on a device."""

    def forward(
        self,
        inputs: Tensor,
        kernel: Tensor,
        state: Shape,
        observe: bool,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """The outputs, with a bias added, and the residuals."""

    def residuals(
        self, leaves: Sequence[Tensor], shapes: tuple[Shape, Shape]
    ) -> Any:
        """Residuals of these tensors, as their `leaves` lists them."""

    def observed(self, residuals: Any, inputs: Tensor, kernel: Tensor) -> Any:
        """The residuals of a forward pass that did not observe, observed."""

    def caught_up(self, kernel: Tensor, state: Shape) -> Any:
        """The state, large enough for the kernel as it is.

        For a pass whose observations nobody takes.
        """

    def backward(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        state: Shape,
        needed: tuple[bool, bool] = (True, True),
    ) -> tuple[Tensor | None, Tensor | None, Shape]:
        """The gradients of inputs, kernel and state."""

    def second_derivatives(
        self,
        residuals: Any,
        outputs_grad: Tensor,
        inputs_grad_grad: Tensor | None,
        kernel_grad_grad: Tensor | None,
        needed: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, ...]:
        """The gradients of what `backward` makes its gradients of.

        Args:
            residuals: As for `backward`.
            outputs_grad: Likewise.
            inputs_grad_grad: The gradient of the gradient of the inputs; None
                for zeros.
            kernel_grad_grad: That of the gradient of the kernel, likewise.
            needed: Which results are wanted.

        Returns:
            The gradients of the gradient of the outputs, of the inputs and of
            the kernel; None for one that is not wanted, or zero.
        """


class FrozenOperation(Hashable, Protocol):
    """A function of inputs and of constants, which get no gradient."""

    @property
    def only_widens(self) -> bool:
        """True if nothing is rounded, so that a compiler may look into it."""

    def resolved(self) -> FrozenOperation:
        """This operation, when what it leaves open can be known."""

    def forward(self, inputs: Tensor, constants: tuple[Tensor, ...]) -> Tensor:
        """The outputs."""

    def inputs_grad(
        self, outputs_grad: Tensor, constants: tuple[Tensor, ...], shape: Shape
    ) -> Tensor:
        """The gradient of inputs of this shape."""


DIFFERENTIATED_AGAIN = (
    "This gradient of a layer in float8 cannot be differentiated again. "
    "Received: a third derivative, one in forward mode, or a second "
    "derivative of a part that is compiled by itself: by torch.compile, or by "
    "jax.jit, tf.function or a loop inside the gradients. Allowed: second "
    "derivatives in reverse mode. Compile around both gradients; set "
    "unroll=True in layers."
)

Settle = Callable[[Tensor, Tensor], Tensor]


@functools.cache
def saved_dtype(format_name: str) -> str:
    """A dtype of one byte for numbers of a format.

    Uint8, for codes, where no framework computes in the dtype of the format.
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
        """`product(codes, scale)`, perhaps part by part.

        Where memory for a whole kernel in floats would be taken anew in each
        call.

        Args:
            product: Of codes and their scales; each part of an axis of the
                codes is the same part of an axis of its result.
            codes: Uint8.
            scale: Of the rank of the codes, of size 1 or of their size along
                each axis.
            axis: That of the codes.
            out_axis: That of the result.
        """
        return product(codes, scale)

    def cuts(self, numbers: int) -> bool:
        """Return True if `in_parts` cuts kernels of so many numbers."""
        return False

    def known_together(self, *scalars: Tensor) -> tuple[Tensor, ...]:
        """The same scalars, which a compiler knows when it knows all of them.

        What is computed from one of them it then does not take for what was
        computed before, from the scalar itself.
        """
        return scalars

    def stored(self, x: Tensor) -> Tensor:
        """The same tensor, which a compiler writes once for all its readers.

        Where it would otherwise make it anew for each of them, from what is
        larger.
        """
        return x

    def have_normal_product(self, a: Tensor, b: Tensor) -> bool:
        """True if products of these scales are known to be normal numbers.

        False where a compiler fuses what is done about others.
        """
        return False

    def known_any(self, flags: Tensor) -> bool | None:
        """Return whether any flag is set, or None where reading would wait."""
        return None

    def on_cpu(self, x: Tensor) -> bool:
        """True if a tensor is on a CPU, as far as the framework tells."""
        raise NotImplementedError


class Tracing:
    """What is traced, compiled or run now."""

    def trace(self, function: Callable[..., Any], inputs: list[Any]) -> Traced:
        """Trace a function: its outputs and matmuls, without computing them.

        Args:
            function: Of tensors; it returns a structure of such.
            inputs: A `keras.KerasTensor` for each, with all sizes known.
        """
        raise NotImplementedError

    def is_compiling(self) -> bool:
        """Return True while a compiler traces that reads no context variables.

        JAX and TensorFlow trace Python as it is.
        """
        return False

    def is_traced(self, x: Tensor) -> bool:
        """True if Python runs once for many steps here, by a tensor of a step.

        Also where several threads make a step, one for each replica.
        """
        return self.is_compiling()

    def traces_for_xla(self) -> bool:
        """True if XLA compiles what is called now, if kernels ask that."""
        return False

    def step_by_step(self) -> AbstractContextManager[None]:
        """A block in which loops are run and not traced; no gradients.

        For what has to see the numbers of each step of a recurrent layer.
        """
        return nullcontext()

    def functions_step_by_step(self) -> AbstractContextManager[None]:
        """Run what a layer has compiled itself step by step, on all threads."""
        return nullcontext()

    def runs_now(self) -> bool:
        """True if what is called in such blocks is run and not traced."""
        return True

    def known_integer(self, x: Tensor) -> int | None:
        """Return an integer scalar as an int, or None while it is traced."""
        return int(x)


class Replicas:
    """Data-parallel replicas, and kernels that are sharded."""

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

    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """Whether a bool scalar is true on every data-parallel replica."""
        return flag

    def combine_replicas(self, observation: Tensor) -> Tensor:
        """Combine the observations of all data-parallel replicas.

        Args:
            observation: (rows, width), what this replica observed, or a
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
            What `gathered` takes, hashable, with a tuple `axes` of what cuts
            each axis of the kernel, empty for an axis that is whole. None
            where there is nothing to gather.
        """
        return None

    def gathered(
        self, x: Tensor, gathering: Any, axes: Sequence[Any]
    ) -> Tensor:
        """Gather a tensor so that each device has what it multiplies.

        Args:
            x: The tensor, of which each device has computed a part.
            gathering: From `gathering_of`.
            axes: What `gathering.axes` is for the kernel, for this tensor;
                None for an axis of which that is not known.
        """
        return x


class Gradients:
    """Operations that define their own gradient."""

    def may_take_gradients(self) -> bool:
        """Return True if a gradient may be taken of what is called now."""
        return True

    def kept_dtype(self, x: Tensor, format_name: str) -> str:
        """Return the dtype in which a format is saved for the backward pass.

        A byte each: uint8, for codes, where no framework computes in the
        dtype of the format.
        """
        return saved_dtype(format_name)

    def relu(self, x: Tensor) -> Tensor:
        """`ops.relu(x)`, of which a bit a number is kept for the gradient.

        What Keras calls keeps the outputs, which the layer after this one
        keeps as codes already. The gradient has the same bits.
        """
        raise NotImplementedError

    def recomputed(
        self, activation: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """`activation(x)`, of which `x` is kept for the gradient at most.

        The gradient has the same bits, so where a compiler rounds otherwise
        what it computes again, what it keeps is left to it.

        Args:
            activation: An elementwise function of Keras, without a state.
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
        """`operation.forward`, differentiable by `operation.backward`."""
        raise NotImplementedError

    def run_and_add(
        self, bias: Tensor, operation: Operation, *tensors: Tensor
    ) -> Tensor:
        """Add a bias to what `run` returns."""
        return ops.add(self.run(operation, *tensors), bias)

    def run_frozen(
        self, operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        """`operation.forward`, with the gradient `operation.inputs_grad`.

        Nothing but the constants is kept for that.
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
            function: Linear in its argument.
            shape: Of that argument.
            cotangent: Of the shape of the function's result.

        Returns:
            Float32 tensor of shape `shape`.
        """
        raise NotImplementedError


class Memory:
    """The memory of a training step."""

    name: str

    def kept(self, step: MeasuredStep) -> Measured:
        """Measure the tensors that are saved for the backward pass.

        Nothing is run where that is possible.
        """
        raise NotImplementedError

    def planned_bytes(self, step: MeasuredStep) -> int:
        """Return the bytes that a compiler plans for both passes.

        Raises:
            ValueError: If none plans the memory of a whole step.
        """
        raise ValueError(
            f"On {self.name} no compiler plans the memory of a whole step. "
            "Received: compile=True. Allowed: False, or another backend: set "
            "KERAS_BACKEND=jax."
        )


class States(Replicas):
    """State variables, which are written by their gradient."""

    name: str

    def seen_lately(self, state: Tensor) -> bool:
        """See `HistoryScales`: what a device has told, of this state."""
        return False

    def settle(self, settle: Settle, value: Tensor, previous: Tensor) -> Tensor:
        """Compute the new state, the same on every replica.

        Args:
            settle: Of the value that is assigned and the state before.
            value: An observation, a settled state, or zeros.
            previous: The settled state before.
        """
        return self.settle_here(settle, self.combine_replicas(value), previous)

    def settle_here(
        self, settle: Settle, value: Tensor, previous: Tensor
    ) -> Tensor:
        """`settle` of what needs not be combined over replicas."""
        return settle(value, previous)

    def version(self, x: Tensor) -> int | None:
        """Return how often a tensor was changed in place; None if unknown."""
        return None

    def assigned(self, variable: Any, value: Tensor) -> Tensor:
        """Return the new value of a state variable that is assigned `value`."""
        return self.settle(variable.settling, value, variable.value)

    def keep_observations(self, variable: Any, tensor: Tensor) -> None:
        """Keep the observations of a state apart from its gradients.

        Where gradients are handed out there is nothing to keep apart.

        Args:
            variable: A state variable that has just got its value.
            tensor: That value.
        """

    def let_go(self, variables: Sequence[Any]) -> None:
        """Free what variables hold, as soon as nobody has them any more.

        Args:
            variables: Those that a model had.
        """

    def is_compiled(self, function: Any) -> bool:
        """Return True if a function was compiled, and goes on as it was traced.

        Args:
            function: Any object.

        Returns:
            False also where the framework looks at what has changed.
        """
        return False

    def forget_traces(self, function: Any, owner: Any) -> None:
        """Have a compiled function traced anew at its next call.

        Args:
            function: A function that `is_compiled`.
            owner: The object whose method it is; None for none.
        """

    def earlier_observation(self, variable: Any) -> Tensor | None:
        """What was observed in micro-batches before, beside gradients.

        Returns:
            Float32 (operands, width); None if there is nothing, or where the
            optimizer has it that accumulates gradients.
        """
        return None

    def put_earlier_observation(self, variable: Any, value: Tensor) -> None:
        """Put back what `earlier_observation` returned."""

    def known_value(self, variable: Any) -> Tensor | None:
        """Return the value of a state variable where it can be read now.

        Returns:
            Its value; None while it is traced, and where to read it would
            keep others waiting in each step.
        """
        return None

    def follow_shards(
        self, variables: Sequence[Any], modules: Sequence[Any]
    ) -> None:
        """Let variables be read where `fully_shard` puts their parameters.

        Args:
            variables: Of one model.
            modules: Its layers.

        Raises:
            ValueError: If nothing of the model is cut in that way, or
                something in another way than can be trained.
        """
        raise ValueError(
            f"On {self.name} fully_shard shards nothing. Received: a model. "
            "Allowed: a model on PyTorch. On JAX use "
            "keras.distribution.ModelParallel."
        )

    def settle_observed(self, variables: Sequence[Any]) -> None:
        """Make what was observed of states part of them.

        Args:
            variables: State variables.

        Raises:
            ValueError: If the framework hands gradients out, instead of
                keeping them with the variables.
        """
        raise ValueError(
            f"On {self.name} gradients are not stored in the variables. "
            "Received: no gradients. Allowed: gradients for all of "
            "`model.trainable_variables`, from your training step. Pass them "
            "as the second argument."
        )


class Backend(Arithmetic, Tracing, Gradients, Memory, States):
    """What is asked of a backend, in `keras.ops` where that is enough."""

    name = "keras.ops"

    keeps_values_apart = False
    """Whether compiled steps are functions of the values of variables."""

    keeps_variables_in_graphs = False
    """Whether compiled steps read variables themselves, out of our sight."""

    def device_name(self) -> str:
        """Name the device: `"cpu"`, or for instance `"NVIDIA H200"`."""
        return "cpu"
