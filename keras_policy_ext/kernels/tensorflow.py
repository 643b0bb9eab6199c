"""TensorFlow: casts that XLA takes in, gradients by `tf.custom_gradient`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_policy_ext.kernels.agnostic import AgnosticEngine, float32, scaled
from keras_policy_ext.kernels.contract import HOPPER_OR_ADA, Choice, Quantized
from keras_policy_ext.kernels.contractions import Einsum
from keras_policy_ext.kernels.einsum import dot_form, matmul_form
from keras_policy_ext.kernels.plan import Plan

# TensorFlow has no public way to ask whether XLA compiles, and none to say
# how exactly it multiplies (TF 2.21). Without the first everything is
# emulated; without the second gradients are accumulated fast as well.
try:
    from tensorflow.python.ops import control_flow_util
except ImportError:
    control_flow_util = None
try:
    from tensorflow.compiler.tf2xla.python import xla
except ImportError:
    xla = None

Tensor = Any

_SWITCH = threading.RLock()
"""Held while functions run eagerly: to turn that off is nobody else's."""


class TensorFlowEngine(AgnosticEngine):
    """Matmuls of float8 numbers in float32, or float8 matmuls made by XLA.

    `tf.matmul` refuses float8 operands. XLA turns a matmul whose operands are
    cast from float8 into one that reads float8, on a GPU that has it.
    """

    name = "tensorflow"

    def select(self, plan: Plan) -> Choice:
        """Native in what XLA compiles, for a GPU with float8 hardware."""
        if not isinstance(plan.contraction, Einsum):
            return Choice("emulated", "XLA has no float8 convolution")
        if matmul_form(plan.contraction.equation) is None:
            return Choice("emulated", "an axis of one operand is summed alone")
        if plan.prefer == "emulated":
            return Choice("emulated", "asked for by kernels.prefer")
        if plan.prefer != "native" and not _has_float8_gpu():
            return Choice("emulated", "no GPU here has a float8 matmul")
        if not plan.for_xla:
            return Choice(
                "emulated", "only XLA has a float8 matmul: jit_compile=True"
            )
        if plan.prefer == "native":
            return Choice("native", "casts for XLA, asked for")
        return Choice("native", "XLA takes the casts into the matmul")

    def traces_for_xla(self) -> bool:
        """See `Engine.traces_for_xla`; with `jit_compile=True`.

        Where it cannot be known the answer is no.
        """
        inside = getattr(control_flow_util, "GraphOrParentsInXlaContext", None)
        if inside is None or tf.executing_eagerly():
            return False
        return bool(inside(tf.compat.v1.get_default_graph()))

    def einsum(
        self,
        equation: str,
        a: Quantized,
        b: Quantized,
        dtype: str,
        fast: bool = False,
    ) -> Tensor:
        """See `Engine.einsum`; not fast is the highest precision to XLA."""
        emulated = a.values.dtype == tf.float32
        if emulated or fast or xla is None:
            return super().einsum(equation, a, b, dtype, fast)
        product = _exact_dot_general(equation, float32(a), float32(b))
        return scaled(product, a, b, dtype)

    def transpose(self, function: Any, shape: Any, cotangent: Tensor) -> Tensor:
        """See `AgnosticEngine.transpose`."""
        point = tf.zeros(shape, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(point)
            value = function(point)
        return tape.gradient(value, point, output_gradients=cotangent)

    def combine_replicas(self, observation: Tensor) -> Tensor:
        """See `Engine.combine_replicas`."""
        context = tf.distribute.get_replica_context()
        replicas = 1 if context is None else context.num_replicas_in_sync
        if replicas == 1:
            return observation
        # Side by side and not slot by slot: replicas call the same layer, so
        # that the first use on one may be the second on another.
        gathered = context.all_gather(observation[tf.newaxis], axis=0)
        first, *_ = values = tf.unstack(gathered, replicas)
        uses = tf.reduce_sum(gathered[:, :, :1], axis=0)
        uses = tf.where(first[:, :1] < 0.0, first[:, :1], uses)
        return tf.concat([uses, *(value[:, 1:] for value in values)], axis=1)

    @contextlib.contextmanager
    def functions_step_by_step(self) -> Iterator[None]:
        """See `Engine.functions_step_by_step`: TensorFlow has one switch."""
        with _SWITCH:
            before = tf.config.functions_run_eagerly()
            tf.config.run_functions_eagerly(True)
            try:
                yield
            finally:
                tf.config.run_functions_eagerly(before)

    def runs_now(self) -> bool:
        """See `Engine.runs_now`; loops do wherever functions do."""
        return bool(tf.executing_eagerly())

    def known_value(self, variable: Any) -> Tensor | None:
        """See `AgnosticEngine.known_value`; while a graph is made, as it is.

        A foreign optimizer assigns to the variable of TensorFlow itself.
        """
        value = variable.value
        on_cpu = "CPU" in str(getattr(value, "device", ""))
        with tf.init_scope():
            if not on_cpu or not tf.executing_eagerly():
                return None
            try:
                return value.numpy()
            except (AttributeError, tf.errors.FailedPreconditionError):
                return None  # a part of another replica, or not made yet

    def on_all_replicas(self, flag: Tensor) -> Tensor:
        """See `AgnosticEngine.on_all_replicas`."""
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return flag
        failed = tf.cast(tf.logical_not(flag), tf.float32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, failed) == 0.0

    def run_if(
        self,
        flag: Tensor,
        update: Callable[..., None],
        arguments: tuple[Any, ...],
        variables: Sequence[Any],
    ) -> None:
        """See `AgnosticEngine.run_if`.

        Replicas that run as threads meet inside `update`, which they cannot
        in a branch: there the branch goes around all of them.
        """
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            super().run_if(flag, update, arguments, variables)
            return

        def all_replicas(strategy: Any, flag: Any, *arguments: Any) -> None:
            run = strategy.extended.call_for_each_replica
            (flag, *_) = strategy.experimental_local_results(flag)
            tf.cond(flag, lambda: run(update, args=arguments), lambda: None)

        context.merge_call(all_replicas, args=(flag, *arguments))

    def known_integer(self, x: Tensor) -> int | None:
        """See `AgnosticEngine.known_integer`.

        Asked of the context: AutoGraph makes a tensor of `int(x)`.
        """
        return int(x) if tf.executing_eagerly() else None

    def run(
        self, plan: Plan, inputs: Tensor, kernel: Tensor, *state: Tensor
    ) -> Tensor:
        """See `Engine.run`."""
        eager = tf.executing_eagerly()
        shapes = _shapes(inputs, kernel)
        if eager:
            forward = _eager_forward(plan.first_use, shapes)
        else:
            forward = _forward(plan)

        @tf.custom_gradient
        def contract(inputs: Tensor, kernel: Tensor, *state: Tensor) -> Any:
            outputs, residuals = forward(inputs, kernel, state)

            def gradient(outputs_grad: Tensor) -> list[Tensor]:
                seen = residuals
                if plan.training is None:
                    seen = plan.observed(residuals, inputs, kernel)
                make = _eager_backward if eager else _backward
                inputs_grad, *assigned = _flat(
                    make(plan, shapes)(seen, outputs_grad, state)
                )
                return [inputs_grad, *_after((kernel, *state), assigned)]

            return outputs, gradient

        # A tf.Variable would make tf.custom_gradient ask for a second result.
        return contract(
            tf.identity(inputs),
            tf.identity(kernel),
            *(tf.identity(matrix) for matrix in state),
        )


ENGINE = TensorFlowEngine()


def _exact_dot_general(equation: str, a: Tensor, b: Tensor) -> Tensor:
    form = dot_form(equation)
    numbers = xla.DotDimensionNumbers(
        lhs_contracting_dimensions=form.contracted[0],
        rhs_contracting_dimensions=form.contracted[1],
        lhs_batch_dimensions=form.batch[0],
        rhs_batch_dimensions=form.batch[1],
    )
    highest = xla.PrecisionConfig.HIGHEST
    precision = xla.PrecisionConfig(operand_precision=[highest, highest])
    product = xla.dot_general(a, b, numbers, precision)
    return tf.transpose(product, form.transposed)


@functools.cache
def _has_float8_gpu() -> bool:
    details = map(
        tf.config.experimental.get_device_details,
        tf.config.list_physical_devices("GPU"),
    )
    found = [each.get("compute_capability") for each in details]
    return any(
        capability and capability >= HOPPER_OR_ADA for capability in found
    )


def _flat(gradients: Any) -> list[Tensor]:
    inputs_grad, kernel_grad, state_grad = gradients
    return [inputs_grad, kernel_grad, *state_grad]


def _after(reads: tuple[Tensor, ...], gradients: list[Tensor]) -> list[Tensor]:
    """Gradients by which variables are updated, once those were read.

    A forward pass that is done again for its gradient reads a kernel which
    the gradient of that kernel does not need. Nothing but a control edge puts
    the read before the update, and Grappler loses it: it takes the edge for
    redundant beside an IdentityN of all gradients, and then splits that one
    (TF 2.21; once in some 40,000 steps the updated kernel was read).
    """
    with tf.control_dependencies(reads):
        return [tf.identity(gradient) for gradient in gradients]


def _forward(plan: Plan) -> Any:
    observe = plan.training is True

    def forward(inputs: Tensor, kernel: Tensor, state: Any) -> Any:
        return plan.forward(ENGINE, inputs, kernel, state, observe)

    return forward


def _backward(plan: Plan, shapes: tuple[Any, ...]) -> Any:
    def backward(residuals: Any, outputs_grad: Tensor, state: Any) -> Any:
        return plan.backward(ENGINE, residuals, outputs_grad, shapes, state)

    return backward


class _Graph:
    """A pass as one graph, made at the first call.

    Eagerly a pass is some thirty operations of which most are on scalars; so
    it takes half the time (256x512x2048, 2 cores, TensorFlow 2.21). Concrete,
    since `tf.function` warns of a Python function that it traces often.
    """

    def __init__(self, function: Any):
        self._function = tf.function(function, autograph=False)
        self._concrete: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._concrete is None:
            self._concrete = self._function.get_concrete_function(*arguments)
        return self._concrete(*arguments)


@functools.lru_cache(maxsize=1024)
def _eager_forward(plan: Plan, shapes: tuple[Any, ...]) -> Any:
    return _Graph(_forward(plan))


@functools.lru_cache(maxsize=1024)
def _eager_backward(plan: Plan, shapes: tuple[Any, ...]) -> Any:
    return _Graph(_backward(plan, shapes))


def _shapes(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(
        tuple(x.shape) if x.shape.is_fully_defined() else tf.shape(x)
        for x in tensors
    )
