"""TensorFlow: gradients by `tf.custom_gradient`, replicas by strategies."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_policy_ext._keras import saving_hooks
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.backends.interface import (
    Backend,
    FrozenOperation,
    Operation,
    Shape,
)
from keras_policy_ext.backends.parts import LARGE, StoredMatrix
from keras_policy_ext.backends.tensorflow import (
    gradients,
    stored_products,
    traced_programs,
)
from keras_policy_ext.backends.tensorflow.gradients import (
    Backward,
    CompiledPass,
    refuse_vectorized,
    sizes_of,
)
from keras_policy_ext.backends.traced_programs import (
    TracedProgram,
    scope_name,
)


def _free_memory(handle: Any, dtype: tf.DType) -> None:
    """Assign an empty tensor to a variable, by its handle."""
    with tf.init_scope():
        tf.raw_ops.AssignVariableOp(
            resource=handle, value=tf.zeros((0,), dtype), validate_shape=False
        )


# TensorFlow has no public way to ask whether XLA compiles (TF 2.21). Without
# this module nothing is taken to be compiled by XLA.
try:
    from tensorflow.python.ops import control_flow_util
except ImportError:
    control_flow_util = None

# Nor to ask whether a loop is traced, where XLA alone can stack float8. Without
# this module any graph that XLA does not compile is taken for a loop.
try:
    from tensorflow.python.ops import control_flow_v2_func_graphs as bodies
except ImportError:
    bodies = None

_SWITCH = threading.RLock()
"""Held while functions run eagerly, so that only one thread changes that."""


class TensorFlowBackend(Backend):
    """The backend for TensorFlow."""

    name = "tensorflow"

    @override
    def trace(
        self, function: Callable[..., Any], inputs: list[Any]
    ) -> TracedProgram:
        # Functions that the user compiles are then part of this graph. They
        # would keep one of their own, in which layers may be replaced.
        with self.functions_step_by_step():
            return traced_programs.trace(function, inputs)

    steps = staticmethod(traced_programs.steps)

    @override
    def in_scope(self, number: int) -> AbstractContextManager[object]:
        # `traced_programs` reads the number from the name of the scope.
        return tf.name_scope(scope_name(number))

    @override
    def traces_for_xla(self) -> bool:
        """Return True inside a function with `jit_compile=True`."""
        inside = getattr(control_flow_util, "GraphOrParentsInXlaContext", None)
        if inside is None or tf.executing_eagerly():
            return False
        return bool(inside(tf.compat.v1.get_default_graph()))

    @override
    def on_cpu(self, x: Tensor) -> bool:
        # A tensor in a graph has no device: it may be on any that there is.
        return not _has_accelerator()

    @override
    def kept_dtype(self, x: Tensor, format_name: str) -> str:
        """Return the dtype that saves values like `x` at least cost."""
        if self.on_cpu(x):
            # Codes only where XLA makes them: else they take too many passes.
            has_xla = self.traces_for_xla() or compiles_parts(x)
            return "uint8" if has_xla else "float32"
        # A loop stacks what it saves, and only XLA stacks float8.
        in_xla_or_eager = self.traces_for_xla() or tf.executing_eagerly()
        if not in_xla_or_eager and _in_a_loop():
            return "uint8"
        return super().kept_dtype(x, format_name)

    @override
    def broadcast_guard(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return `scale` in a form that XLA does not see as a scalar."""
        if self.on_cpu(x) or not self.traces_for_xla():
            return super().broadcast_guard(x, scale)
        # The scale, clipped to itself: XLA no longer sees a scalar, by whose
        # reciprocal it would multiply.
        return tf.maximum(tf.minimum(x, scale), scale)

    @override
    def before_widening(self, x: Tensor) -> Tensor:
        """Return float8 values behind a barrier if XLA is on a GPU."""
        # XLA for a GPU drops casts from float32 to float8 and back (TF 2.21).
        if not self.traces_for_xla() or self.on_cpu(x):
            return x
        return gradients.behind_barrier(x)[0]

    @override
    def as_dtype(self, x: Tensor, dtype: str) -> Tensor:
        # Only XLA has the casts that are asked for here, of fnuz formats.
        return _cast_by_xla(tf.convert_to_tensor(x), tf.as_dtype(dtype))

    @contextlib.contextmanager
    @override
    def functions_step_by_step(self) -> Iterator[None]:
        """Run compiled functions eagerly in the block."""
        # One switch of TensorFlow makes loops and functions run eagerly.
        with _SWITCH:
            before = tf.config.functions_run_eagerly()
            tf.config.run_functions_eagerly(True)
            try:
                yield
            finally:
                tf.config.run_functions_eagerly(before)

    @override
    def is_compiled(self, function: object) -> bool:
        # What `tf.function` returns.
        return isinstance(function, tf.types.experimental.PolymorphicFunction)

    @override
    def forget_traces(self, function: Any, owner: Any) -> None:
        """Make a `tf.function` trace anew at its next call."""
        # TensorFlow has no public way to forget them. The function becomes
        # what a copy with the same options is (`_clone`, TF 2.16 to 2.21);
        # where that is gone, it stays as it was.
        if owner is not None:  # A method has traces of its own for each owner.
            function = function.__get__(owner, type(owner))
        clone = getattr(function, "_clone", None)
        if clone is not None:
            vars(function).update(vars(clone(None)))

    @override
    def runs_now(self) -> bool:
        # Where functions run eagerly, so do loops.
        return bool(tf.executing_eagerly())

    @override
    def is_traced(self, x: Tensor) -> bool:
        # Not by `x`: everything is traced in a graph. The replicas of a
        # strategy run one step in several threads, which counts as traced.
        return not tf.executing_eagerly() or tf.distribute.has_strategy()

    @override
    def known_integer(self, x: Tensor) -> int | None:
        # Asked of the context: AutoGraph makes a tensor of `int(x)`.
        return int(x) if tf.executing_eagerly() else None

    @override
    def abs_or_inf(self, x: Tensor) -> Tensor:
        """Return absolute values, and infinity for NaN."""
        # XLA as TensorFlow configures it on a CPU drops NaN from a maximum (TF
        # 2.21 with jit_compile=True).
        magnitude = tf.abs(x)
        if not magnitude.dtype.is_floating:
            return magnitude
        infinite = tf.constant(float("inf"), magnitude.dtype)
        return tf.where(tf.math.is_nan(magnitude), infinite, magnitude)

    @override
    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """Return whether a flag is true on every replica."""
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return flag
        failed = tf.cast(tf.logical_not(flag), tf.float32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, failed) == 0.0

    @override
    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[keras.Variable],
    ) -> None:
        """Call `update(*arguments)` if a flag is set, on all replicas."""
        # Replicas that run as threads meet inside `update`, which they cannot
        # in a branch: there the branch goes around all of them.
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            super().run_if(flag, update, arguments, variables)
            return

        def all_replicas(strategy: Any, flag: Any, *arguments: Any) -> None:
            """Branch once around the update of all replicas."""
            run = strategy.extended.call_for_each_replica
            flag, *_ = strategy.experimental_local_results(flag)  # All equal.
            tf.cond(flag, lambda: run(update, args=arguments), lambda: None)

        context.merge_call(all_replicas, args=(flag, *arguments))

    @override
    def let_go(self, variables: Sequence[keras.Variable]) -> None:
        """Free each variable's memory once nothing refers to it."""
        # TensorFlow keeps every graph in which a custom gradient was traced,
        # such as the sum over replicas in each training step of Keras. The
        # graph keeps the weights that it read (TF 2.21, `gradient_registry`).
        # So a weight's memory would outlive its variable.
        for variable in variables:
            value = getattr(variable, "value", None)
            # `values`: the variables of all replicas.
            for each in getattr(value, "values", None) or (value,):
                if isinstance(each, tf.Variable) and tf.executing_eagerly():
                    freeing = weakref.finalize(
                        each, _free_memory, each.handle, each.dtype
                    )
                    freeing.atexit = False

    @override
    def transpose(
        self,
        function: Callable[[Tensor], Tensor],
        shape: Shape,
        cotangent: Tensor,
    ) -> Tensor:
        """Apply a linear function's transpose, which is its gradient."""
        point = tf.zeros(shape, tf.float32)  # Any: the function is linear.
        with tf.GradientTape() as tape:
            tape.watch(point)
            value = function(point)
        return tape.gradient(value, point, output_gradients=cotangent)

    @override
    def relu(self, x: Tensor) -> Tensor:
        return gradients.relu(x, for_xla=self.traces_for_xla())

    @override
    def recomputed(
        self, activation: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Compute `activation(x)`; XLA computes it again if it can."""
        # Under XLA alone, and there on a CPU only a GELU in 16 bits: 12 blocks
        # take 202 MiB in place of 297, and 1.00 to 1.03 of the time; without
        # XLA it would be 1.07 to 1.10. Other functions, and a GELU in float32,
        # are rounded otherwise if recomputed: last bits change (TF 2.21).
        if not self.traces_for_xla():
            return activation(x)
        is_gelu = activation is keras.activations.gelu
        if self.on_cpu(x) and not (is_gelu and x.dtype.size == 2):
            return activation(x)
        return gradients.recomputed(activation, x)

    @override
    def run(
        self,
        operation: Operation,
        bias: Tensor | None,
        inputs: Tensor,
        kernel: Tensor,
        *state: Tensor,
    ) -> Tensor:
        """Run an operation with a gradient of its own; add a bias."""
        shapes = (tuple(inputs.shape), tuple(kernel.shape))
        forward = _shared_forward(operation.first_use, shapes, _in_a_loop())

        @tf.custom_gradient
        def outputs_with_gradient(
            inputs: Tensor, kernel: Tensor, *state: Tensor
        ) -> Any:
            """Return the outputs, and the function of their gradient."""
            outputs, *saved = forward(inputs, kernel, state)
            # Sizes are read here, not in the graph of `forward`: XLA would
            # compile it again for each value of a size.
            sizes = sizes_of(inputs), sizes_of(kernel)

            def gradient(outputs_grad: Tensor) -> list[Tensor]:
                """Return the gradients of inputs, kernel and state."""
                tensors = saved
                if operation.training is not True:
                    # `forward` found no amaxes. A state that is trained needs
                    # them, also to notice that a kernel outgrew its scale.
                    residuals = operation.bound.residuals(saved, sizes)
                    residuals = operation.bound.observed(
                        residuals, inputs, kernel
                    )
                    tensors = residuals.leaves(narrow=False)
                backward = Backward(operation, shapes, sizes, tensors)
                return backward.gradients(outputs_grad, inputs, kernel, state)

            return outputs, gradient

        # A tf.Variable would make tf.custom_gradient ask for a second result.
        operands = [tf.identity(x) for x in (inputs, kernel, *state)]
        refuse_vectorized(*operands[:2])
        outputs = outputs_with_gradient(*operands)
        return outputs if bias is None else keras.ops.add(outputs, bias)

    @override
    def run_frozen(
        self, operation: FrozenOperation, inputs: Tensor, *constants: Tensor
    ) -> Tensor:
        """Run a frozen operation; only the inputs have a gradient."""

        @tf.custom_gradient
        def outputs_with_gradient(inputs: Tensor, *constants: Tensor) -> Any:
            """Return the outputs, and the function of their gradient."""
            # Else a tape would save what the forward pass computes.
            detached = tf.stop_gradient(inputs)
            outputs = operation.forward(detached, constants)
            sizes = sizes_of(inputs)

            def gradient(outputs_grad: Tensor) -> list[Tensor | None]:
                """Return the inputs' gradient; None for constants."""
                inputs_grad = operation.inputs_grad(
                    outputs_grad, constants, sizes
                )
                return [inputs_grad, *(None for _ in constants)]

            return outputs, gradient

        # A tf.Variable would make tf.custom_gradient ask for a second result.
        operands = [tf.identity(x) for x in (inputs, *constants)]
        refuse_vectorized(operands[0])
        return outputs_with_gradient(*operands)

    @override
    def cuts(self, numbers: int) -> bool:
        return numbers > LARGE and not _has_accelerator()

    @override
    def product_by_parts(
        self, x: Tensor, kernel: StoredMatrix, dtype: str
    ) -> Tensor | None:
        """Multiply rows by a stored kernel; None to decode it first."""
        in_xla = self.traces_for_xla()
        # A file has TensorFlow's own operations, and nothing for XLA. What is
        # differentiated again is decoded at once.
        in_file = saving_hooks.is_exporting() and not in_xla
        if in_file or gradients.is_recorded(x):
            return None
        return stored_products.product_by_parts(x, kernel, in_xla)


BACKEND = TensorFlowBackend()


_LARGE = 1 << 16
_UNKNOWN = 256
"""The size assumed for an axis of unknown size."""


def compiles_parts(x: Tensor) -> bool:
    """Return True if XLA compiles the elementwise operations on a tensor.

    It does for large tensors on a CPU, outside of functions it compiles whole.
    """
    sizes = [_UNKNOWN if size is None else size for size in x.shape]
    large = math.prod(sizes) >= _LARGE
    return large and not (_has_accelerator() or BACKEND.traces_for_xla())


@functools.cache
def _has_accelerator() -> bool:
    devices = tf.config.list_physical_devices()
    return any(device.device_type != "CPU" for device in devices)


def _in_a_loop() -> bool:
    """Return True if the graph being made is, or may be, in a loop's body."""
    loop_graph = getattr(bodies, "WhileBodyFuncGraph", object)
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and not isinstance(graph, loop_graph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


@functools.lru_cache(maxsize=1024)
def _shared_forward(
    operation: Operation, shapes: tuple[Shape, Shape], in_a_loop: bool
) -> CompiledPass:
    """Return a compiled pass, from tensors to `[outputs, *saved tensors]`."""
    # It is traced once. So there is one for each of `shapes` and `in_a_loop`,
    # which are only in the key of the cache.
    observe = operation.training is True

    def forward(
        inputs: Tensor, kernel: Tensor, state: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """Return the outputs and the tensors to save for the gradient."""
        outputs, saved = operation.bound.forward(inputs, kernel, state, observe)
        narrow = _saves_few_bytes(operation, inputs, kernel)
        return [outputs, *saved.leaves(narrow)]

    return CompiledPass(forward)


def _saves_few_bytes(operation: Operation, *operands: Tensor) -> bool:
    """Return True if an operation saves tensors in as few bytes as it can."""
    # If nothing is trained, gradients are rare. If that is not known, an export
    # would include parts that XLA compiles.
    if operation.training is None:
        return not any(map(compiles_parts, operands))
    return operation.training


@tf.function(jit_compile=True, autograph=False)
def _cast_by_xla(x: Tensor, dtype: tf.DType) -> Tensor:
    return tf.cast(x, dtype)
