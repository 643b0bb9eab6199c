"""TensorFlow: compute backward passes and second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_policy_ext._types import Tensor
from keras_policy_ext.backends.interface import (
    DIFFERENTIATED_AGAIN,
    Operation,
    Shape,
)

# TensorFlow has no public way to ask whether a tape records (TF 2.21). Where
# this one is gone, gradients are taken once.
try:
    from tensorflow.python.eager import record
except ImportError:
    record = None

Gradients = list[Tensor | None]

VECTORIZED = (
    "TensorFlow loses the gradient of a layer in float8 in a loop that it "
    "vectorizes. Received: a call of such a layer in tf.vectorized_map or "
    "keras.ops.vectorized_map while a tape records. Allowed: tf.map_fn or "
    "keras.ops.map, all examples in one call, or the same call while no tape "
    "records."
)
"""It copies what a custom gradient is written at without the gradient, so that
what computes the outputs would be differentiated (TF 2.21)."""

_BODY = "loop_body"
"""The name scope of a loop that TensorFlow vectorizes."""


class Backward:
    """The backward pass of one call of an operation.

    `shapes` are those of the inputs and the kernel, with None for a size that
    the graph does not know; `sizes` has scalar tensors in its place. `leaves`
    are the tensors that the forward pass saved.
    """

    def __init__(
        self,
        operation: Operation,
        shapes: tuple[Shape, Shape],
        sizes: tuple[Shape, Shape],
        leaves: Sequence[Tensor],
    ):
        """Keep the pass's arguments, and the key of its compiled form.

        `leaves` are the saved tensors. `operation.slot` is the number of this
        use of the kernel in the step.
        """
        self._slot, self._first_use = operation.slot, operation.first_use
        # What a compiled pass is made for, and its first arguments.
        self._key = self._first_use, shapes, tuple(x.dtype for x in leaves)
        unknown = [n for size in sizes for n in size if tf.is_tensor(n)]
        self._saved = list(leaves), unknown

    def gradients(
        self,
        outputs_grad: Tensor,
        inputs: Tensor,
        kernel: Tensor,
        state: tuple[Tensor, ...],
    ) -> Gradients:
        """Return the gradients of the inputs, the kernel and the state.

        A tape does not connect the saved tensors to the operands. If one
        records around this pass, the gradients are declared a function of the
        operands as well. Without a tape that would keep the operands in
        memory. A vectorized loop would lose the connection.
        """
        if is_recorded(outputs_grad, inputs, kernel) and not _is_vectorized():
            found = self._differentiable_gradients(
                outputs_grad, inputs, kernel, *state
            )
        else:
            results = self._run_compiled(self._slot, outputs_grad, state)
            found = list(map(_raising_if_differentiated, results))
        inputs_grad, *of_variables = found
        return [inputs_grad, *_after((kernel, *state), of_variables)]

    def _differentiable_gradients(self, *tensors: Tensor) -> Gradients:
        """Return the gradients, which can be differentiated once more.

        `tensors`: the gradient of the outputs, the inputs, kernel and state.
        """

        @tf.custom_gradient
        def gradients(
            outputs_grad: Tensor, inputs: Tensor, kernel: Tensor, *state: Tensor
        ) -> Any:
            """Return the gradients, and the function of their own."""
            slot = self._first_use.another_slot(self._slot)
            results = self._run_compiled(slot, outputs_grad, state)
            _, _, *observed_amaxes = results

            def second_derivatives(*gradients: Tensor) -> Gradients:
                """Return the gradient of each of the `tensors`."""
                inputs_grad_grad, kernel_grad_grad, *_ = gradients
                derivatives = _shared_second(*self._key)(
                    *self._saved,
                    outputs_grad,
                    inputs_grad_grad,
                    kernel_grad_grad,
                )
                found = map(_raising_if_differentiated, derivatives)
                # The "gradient" of a state is not one: it carries the amaxes
                # that were observed. So it is passed on as it is.
                return [*found, *observed_amaxes]

            return results, second_derivatives

        results: Gradients = gradients(*tensors)
        return results

    def _run_compiled(
        self, slot: int, outputs_grad: Tensor, state: tuple[Tensor, ...]
    ) -> Gradients:
        """Run the compiled backward pass; return the gradients.

        `slot` is the number of this use of the kernel in the step.
        """
        # A tensor, since a Python number would be part of the graph.
        slot_tensor = tf.constant(slot, tf.int32)
        results: Gradients = _shared_backward(*self._key)(
            *self._saved, outputs_grad, state, slot_tensor
        )
        return results


def is_recorded(*tensors: Tensor) -> bool:
    """Return True if a gradient tape records operations on these tensors.

    False in a graph that TensorFlow makes for the gradient of a function or of
    a loop's body. False in forward mode, in which no tape records.
    """
    is_recording = getattr(record, "should_record_backprop", None)
    if is_recording is None or not is_recording(list(tensors)):
        return False
    graph = tf.compat.v1.get_default_graph()
    # An eager tensor has no graph.
    return all(getattr(x, "graph", graph) is graph for x in tensors)


def refuse_vectorized(*tensors: Tensor) -> None:
    """Raise if a tape records tensors in a loop that TensorFlow vectorizes."""
    if _is_vectorized() and is_recorded(*tensors):
        raise NotImplementedError(VECTORIZED)


def _is_vectorized() -> bool:
    """Return True inside a loop that TensorFlow is vectorizing."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if _BODY in graph.get_name_scope().split("/"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _raising_if_differentiated(gradient: Tensor) -> Tensor:
    """Return the same gradient; differentiating it again raises."""
    return tf.raw_ops.PreventGradient(
        input=gradient, message=DIFFERENTIATED_AGAIN
    )


def _after(reads: tuple[Tensor, ...], gradients: list[Tensor]) -> list[Tensor]:
    """Return the same gradients, computed after the tensors in `reads`."""
    # A forward pass that is recomputed for its gradient reads a kernel that the
    # gradient of the kernel does not need. Only a control edge puts that read
    # before the update. Grappler loses the edge: it considers it redundant
    # beside an IdentityN of all gradients, and then splits that IdentityN (TF
    # 2.21; once in some 40,000 steps the updated kernel was read).
    with tf.control_dependencies(reads):
        return [tf.identity(gradient) for gradient in gradients]


def sizes_of(x: Tensor) -> tuple[Any, ...]:
    """Return the sizes of a tensor; a scalar tensor for each unknown size."""
    return tuple(
        tf.shape(x)[axis] if size is None else size
        for axis, size in enumerate(x.shape)
    )


class CompiledPass:
    """A forward or backward pass as one graph, traced at the first call.

    Run eagerly, a pass has some thirty operations, most of them on scalars;
    the graph takes half the time (256x512x2048, 2 cores, TensorFlow 2.21). In
    another graph it is one operation, traced once for all layers of a size. It
    is a concrete function, since `tf.function` warns if it often traces one
    Python function.
    """

    def __init__(self, function: Callable[..., object]):
        self._function = tf.function(function, autograph=False)
        self._concrete: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Run the pass; the first call traces it."""
        if self._concrete is None:
            self._concrete = self._function.get_concrete_function(*arguments)
        return self._concrete(*arguments)


@functools.lru_cache(maxsize=1024)
def _shared_backward(
    operation: Operation,
    shapes: tuple[Shape, Shape],
    dtypes: tuple[tf.DType, ...],
) -> CompiledPass:
    """Return a backward pass, to gradients of inputs, kernel and state.

    It takes the saved tensors (`leaves`), the sizes that `shapes` lacks, the
    gradient of the outputs, the state, and the number of this use of the kernel
    in the step (`slot`).
    """
    # `dtypes`, those of the leaves, are only in the key of the cache, since the
    # first call traces. `unknown` are the sizes that `shapes` lacks.

    def backward(
        leaves: Sequence[Tensor],
        unknown: Sequence[Tensor],
        outputs_grad: Tensor,
        state: tuple[Tensor, ...],
        slot: Tensor,
    ) -> Gradients:
        """Return the gradients of inputs, kernel and state."""
        residuals = operation.bound.residuals(
            leaves, _with_known_sizes(shapes, unknown)
        )
        # No gradient of a bias: it is added outside of the operation.
        inputs_grad, kernel_grad, state_grad, _ = operation.bound.backward(
            residuals, outputs_grad, state, slot=slot
        )
        return [inputs_grad, kernel_grad, *state_grad]

    return CompiledPass(backward)


@functools.lru_cache(maxsize=1024)
def _shared_second(
    operation: Operation,
    shapes: tuple[Shape, Shape],
    dtypes: tuple[tf.DType, ...],
) -> CompiledPass:
    """Return second derivatives as one compiled pass.

    It takes the saved tensors (`leaves`), the sizes that `shapes` lacks, and
    the gradients of the outputs and of both results of the backward pass.
    """

    def second(
        leaves: Sequence[Tensor], unknown: Sequence[Tensor], *gradients: Tensor
    ) -> Any:
        """Return the gradients of both operands' gradients."""
        residuals = operation.bound.residuals(
            leaves, _with_known_sizes(shapes, unknown)
        )
        return operation.bound.second_derivatives(residuals, *gradients)

    return CompiledPass(second)


def _with_known_sizes(
    shapes: tuple[Shape, Shape], unknown: Sequence[Tensor]
) -> tuple[Any, Any]:
    """Return the shapes of inputs and kernel, with unknown sizes filled in."""
    sizes = iter(unknown)
    inputs, kernel = (
        tuple(next(sizes) if n is None else n for n in shape)
        for shape in shapes
    )
    return inputs, kernel


# Not public. Without it XLA may keep what it could make again.
try:
    from tensorflow.compiler.tf2xla.python.xla import optimization_barrier
except ImportError:
    optimization_barrier = None

_BITS = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.uint8)  # Of one byte.


def relu(x: Tensor, for_xla: bool) -> Tensor:
    """Compute `tf.nn.relu(x)`; save a mask for the gradient, no outputs.

    If XLA compiles the function (`for_xla`), the mask has one bit per element.
    """

    @tf.custom_gradient
    def relu_with_gradient(x: Tensor) -> Any:
        """Return the ReLU, and the function of its gradient."""
        outputs = tf.nn.relu(x)
        mask = _pack_mask(outputs > 0, for_xla)

        def gradient(outputs_grad: Tensor) -> Tensor:
            """Pass the gradient where the mask is set."""
            # `ReluGrad` only tests whether features are > 0, as a mask is.
            passes = tf.cast(_unpack_mask(mask), outputs_grad.dtype)
            passes = tf.reshape(passes, tf.shape(outputs_grad))
            return tf.raw_ops.ReluGrad(gradients=outputs_grad, features=passes)

        return outputs, gradient

    return relu_with_gradient(tf.identity(x))


def recomputed(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute `activation(x)`; XLA computes it again for the gradient."""

    @tf.custom_gradient
    def activation_with_gradient(x: Tensor) -> Any:
        """Return the activation, and the function of its gradient."""

        def gradient(outputs_grad: Tensor) -> Tensor:
            """Compute the activation again; return the gradient."""
            point, cotangent = x, outputs_grad
            # Behind a barrier XLA does not save what it computes again. But a
            # barrier has no gradient, for which another tape would ask.
            if not is_recorded(x, outputs_grad):
                point, cotangent = behind_barrier(x, outputs_grad)
            with tf.GradientTape() as tape:
                tape.watch(point)
                outputs = activation(point)
            return tape.gradient(outputs, point, cotangent)

        return activation(x), gradient

    return activation_with_gradient(tf.identity(x))


def _pack_mask(mask: Tensor, for_xla: bool) -> Tensor:
    """Pack a mask into 8 elements per byte if XLA compiles the function."""
    # Without XLA, packing needs several passes over memory.
    last_size = mask.shape[-1] if mask.shape.rank else None
    if not for_xla or not last_size or last_size % 8:
        return mask
    shape = tf.concat([tf.shape(mask)[:-1], [last_size // 8, 8]], 0)
    bytes_of_bits = tf.cast(tf.reshape(mask, shape), tf.uint8) * _BITS
    packed = tf.reduce_sum(bytes_of_bits, -1)
    return behind_barrier(packed)[0]  # So that XLA saves the packed bits.


def behind_barrier(*tensors: Tensor) -> list[Tensor]:
    """Return the same tensors behind one optimization barrier of XLA."""
    if optimization_barrier is None:
        return list(tensors)
    return list(optimization_barrier(*tensors))


def _unpack_mask(packed: Tensor) -> Tensor:
    """Unpack a mask to (..., n / 8, 8): nonzero where it is True."""
    if packed.dtype == tf.bool:
        return packed
    return tf.bitwise.bitwise_and(packed[..., tf.newaxis], _BITS)
