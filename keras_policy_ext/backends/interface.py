"""The interface of a backend, by subject, and the operations that it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.parts import StoredMatrix
from keras_policy_ext.backends.traced_programs import Step, TracedProgram
from keras_policy_ext.numerics.primitives import Primitives
from keras_policy_ext.numerics.scale_sources import ScaleSource, Slot

Shape = tuple[Any, ...]

Residuals = Any
"""What a forward pass saves: tensors, listed by `leaves`, and `shapes`."""


class Operation(Hashable, Protocol):
    """A function of tensors with a gradient of its own; hashable data.

    Equal operations compute the same function and share its compiled form.
    """

    @property
    def kernel_dtype(self) -> str:
        """The dtype of the kernel and of its gradient."""

    @property
    def training(self) -> bool | None:
        """True to record amaxes, None to do so only if a gradient is taken."""

    @property
    def slot(self) -> int:
        """The number of this use of the kernel in the step."""

    @property
    def source(self) -> ScaleSource:
        """The object that computes scales, perhaps by a state."""

    @property
    def first_use(self) -> Operation:
        """The same operation for the first use of the kernel in a step.

        All uses share its compiled passes; a slot is the number of a use.
        """

    def another_slot(self, slot: Slot) -> Slot:
        """Return another slot, for gradients that are differentiated again.

        A slot is the number of a use of the kernel in the step.
        """

    def with_preference(self) -> Operation:
        """Return a copy with the current setting of `kernels.prefer`."""

    @property
    def bound(self) -> BoundOperation:
        """This operation on the current device; one object for all its uses."""


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
        state: tuple[Tensor, ...],
        observe: bool,
        bias: Tensor | None = None,
        no_backward: bool = False,
        slot: Slot = 0,
    ) -> tuple[Tensor, Residuals]:
        """Return the outputs plus the bias, and the saved tensors.

        Args:
            inputs: In the compute dtype.
            kernel: Of dtype `kernel_dtype`.
            state: The state of a recipe, or nothing.
            observe: Whether amaxes are needed for the state.
            bias: In the compute dtype; None for no bias.
            no_backward: Whether no backward pass follows.
            slot: The number of this use of the kernel in the step.
        """

    def residuals(
        self, leaves: Sequence[Tensor], shapes: tuple[Shape, Shape]
    ) -> Residuals:
        """Rebuild residuals from the tensors that their `leaves()` listed.

        `shapes` are those of inputs and kernel.
        """

    def observed(
        self, residuals: Residuals, inputs: Tensor, kernel: Tensor
    ) -> Residuals:
        """Return the residuals with both operands' amaxes, found if lacking."""

    def caught_up(
        self, kernel: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return a state whose scale is large enough for the current kernel.

        For a pass whose observations are discarded.
        """

    def backward(
        self,
        residuals: Residuals,
        outputs_grad: Tensor,
        state: tuple[Tensor, ...],
        needed: tuple[bool, bool] = (True, True),
        bias_shape: Shape | None = None,
        slot: Slot = 0,
    ) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, ...], Tensor | None]:
        """Return the gradients of the inputs, the kernel, state and bias.

        Args:
            residuals: What `forward` saved.
            outputs_grad: In the compute dtype.
            state: The state of a recipe, or nothing.
            needed: Whether to compute the gradients of inputs and kernel.
            bias_shape: The shape of the bias that `forward` added, if its
                gradient is computed here; see `takes_bias`.
            slot: The number of this use of the kernel in the step.

        Returns:
            The four gradients; None for one that is not needed.
        """

    def takes_bias(self, bias: Tensor, inputs: Tensor, kernel: Tensor) -> bool:
        """Return True if `backward` can sum a bias's gradient as it casts."""

    def second_derivatives(
        self,
        residuals: Residuals,
        outputs_grad: Tensor,
        inputs_grad_grad: Tensor | None,
        kernel_grad_grad: Tensor | None,
        needed: tuple[bool, bool, bool] = (True, True, True),
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the gradients that `backward` returns.

        None stands for a gradient of zeros in the arguments, and for a result
        that is not needed or zero. The results are the gradients of
        `outputs_grad`, of the inputs and of the kernel.
        """


class FrozenOperation(Hashable, Protocol):
    """A function of inputs and constants; only the inputs have a gradient."""

    @property
    def only_widens(self) -> bool:
        """True if it rounds no value, but converts to a wider dtype."""

    def with_preference(self) -> FrozenOperation:
        """Return a copy with the current setting of `kernels.prefer`."""

    def forward(self, inputs: Tensor, constants: tuple[Tensor, ...]) -> Tensor:
        """Return the outputs for these inputs and constants."""

    def inputs_grad(
        self, outputs_grad: Tensor, constants: tuple[Tensor, ...], shape: Shape
    ) -> Tensor:
        """Return the gradient of the inputs, which have this shape."""


DIFFERENTIATED_AGAIN = (
    "This gradient of a layer in float8 cannot be differentiated again. "
    "Received: a third derivative, a derivative in forward mode, or a second "
    "derivative through a part that is compiled separately (torch.compile, "
    "jax.jit, tf.function, or a loop inside the gradients). Allowed: second "
    "derivatives in reverse mode. Compile the whole computation of both "
    "gradients; for recurrent layers set unroll=True."
)


@functools.cache
def saved_dtype(format_name: str) -> str:
    """Return the dtype that saves a format: its own for OCP's, else uint8."""
    is_of_ocp = formats.get(format_name).family == "ocp"
    return format_name if is_of_ocp else "uint8"


class Arithmetic(Primitives):
    """Arithmetic whose best form depends on the device or compiler."""

    def cuts(self, numbers: int) -> bool:
        """Return True if products read so many codes part by part."""
        return False

    def gains_from_float16(self, numbers: int) -> bool:
        """Return True if `kpe.widen` speeds up a kernel of so many elements."""
        # XLA for a CPU decodes codes in less time than it widens float16.
        return not self.cuts(numbers)

    def product_by_parts(
        self, x: Tensor, kernel: StoredMatrix, dtype: str
    ) -> Tensor | None:
        """Multiply rows by a stored kernel, a part of it at a time.

        Args:
            x: Float32, (matrices, rows, summed); or (1, rows, summed) for
                all matrices.
            kernel: The stored kernel.
            dtype: The dtype to multiply in if the kernel is decoded at once.

        Returns:
            Float32, (matrices, rows, outputs), not scaled but by blocks. None
            if the whole kernel should be decoded at once.
        """
        return None

    def pack(self, codes: Tensor) -> bool:
        """Pack a stored matrix for faster products; False if it cannot."""
        return False

    def have_normal_product(self, a: Tensor, b: Tensor) -> bool:
        """Return True if the products `a * b` of scales are normal numbers.

        The caller then skips the handling of subnormal and infinite products.
        False if a compiler fuses that handling at no cost.
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
        self, function: Callable[..., Any], inputs: list[Any]
    ) -> TracedProgram:
        """Trace a function; return its outputs and program, computing nothing.

        Args:
            function: Takes tensors and returns nested tensors.
            inputs: A `keras.KerasTensor` for each, with all sizes known.
        """
        raise NotImplementedError

    def steps(self, program: Any) -> Iterable[Step]:
        """Return the operations of a traced program, in order.

        Those of a program in it, such as the body of a loop, are among them.
        """
        raise NotImplementedError

    def in_scope(self, number: int) -> AbstractContextManager[object]:
        """Return a block whose traced operations have this number in `steps`.

        The number of the innermost block counts.
        """
        raise NotImplementedError

    def is_compiling(self) -> bool:
        """Return True while a compiler that reads no context variables traces.

        JAX and TensorFlow run the Python code as it is.
        """
        return False

    def is_traced(self, x: Tensor) -> bool:
        """Return True if the step of `x` is traced, to run for many steps.

        Also if several threads run a step, one for each replica.
        """
        return self.is_compiling()

    def traces_for_xla(self) -> bool:
        """Return True if the current call is known to be traced for XLA."""
        return False

    def step_by_step(self) -> AbstractContextManager[None]:
        """Return a context in which recurrent loops run eagerly.

        For code that reads each step's values. Loops in it have no gradients.
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
        variables: Sequence[keras.Variable],
    ) -> None:
        """Call `update(*arguments)` if a flag is set, also in compiled code.

        The flag, a bool scalar, is the same on every replica. The arguments may
        be nested. `variables` are all that `update` assigns.
        """
        ops.cond(flag, lambda: update(*arguments), lambda: None)

    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """Return whether `flag` is true on every data-parallel replica."""
        return flag

    def look_for_other_parameter(self, variable: Any) -> None:
        """Warn once if PyTorch was given a tensor that Keras does not read."""

    def gathering_of(self, variable: keras.Variable) -> Any:
        """Return how a sharded kernel is gathered for a matmul, or None.

        It is hashable. Its tuple `axes` has the mesh axes that shard each axis
        of the kernel; an entry is empty if the axis is not sharded.
        `is_quantized` tells whether the kernel arrives gathered and quantized.
        """
        return None

    def gathered(
        self, x: Tensor, gathering: Any, axes: Sequence[Any]
    ) -> Tensor:
        """Gather the shards of a tensor that each device needs for a matmul.

        Each device has computed one shard. `axes` is the sharding of this
        tensor, like `gathering.axes` of the kernel; None where it is unknown.
        """
        return x


class Gradients:
    """Operations that define their own gradient."""

    def may_take_gradients(self) -> bool:
        """Return True if the current call may have a backward pass."""
        return True

    def kept_dtype(self, x: Tensor, format_name: str) -> str:
        """Return the dtype that saves values like `x`; uint8 means codes."""
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
        recomputation differently, the choice of what to save is left to it.
        `activation` is an elementwise function of Keras without state.
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
        """Run `operation.forward`, then add a bias; see `BoundOperation`.

        The gradient is `operation.backward`. The bias has its own argument,
        since some frameworks add it with what follows; `state` is optional.
        """
        raise NotImplementedError

    def run_frozen(
        self, operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        """Run a frozen operation; save only the constants for the gradient."""
        raise NotImplementedError

    def unchanged_random_state(self) -> AbstractContextManager[Any]:
        """Return a context that restores the framework's random state."""
        # Keras draws from it on PyTorch alone, for layers without a seed.
        return nullcontext()

    def random_state(self) -> list[np.ndarray]:
        """Copy the random state of the framework, where Keras draws from it.

        One uint8 array for each generator; none where Keras's own seeds are all
        the random state that there is.
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

        `shape` is that of the function's argument and of the result.
        """
        raise NotImplementedError


class Traces(Replicas):
    """What compiled functions and graphs keep of a model that changes."""

    name: str

    def let_go(self, variables: Sequence[keras.Variable]) -> None:
        """Free the memory of variables as soon as nothing refers to them."""

    def is_compiled(self, function: object) -> bool:
        """Return True if `function` is compiled and may reuse an old trace.

        False also if the framework checks what has changed since.
        """
        return False

    def forget_traces(self, function: Any, owner: Any) -> None:
        """Discard a function's traces; `owner` is the `self` of a method."""


class Backend(Arithmetic, Tracing, Gradients, Traces):
    """The base class of backends, in `keras.ops` where possible."""

    name = "keras.ops"
