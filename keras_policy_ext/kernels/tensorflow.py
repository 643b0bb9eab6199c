"""TensorFlow: quantize and dequantize, gradients by `tf.custom_gradient`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_policy_ext.kernels.agnostic import AgnosticEngine
from keras_policy_ext.kernels.contract import Choice
from keras_policy_ext.kernels.plan import Plan

Tensor = Any


class TensorFlowEngine(AgnosticEngine):
    """`tf.matmul` refuses float8, so that every contraction is emulated."""

    name = "tensorflow"

    def select(self, plan: Plan) -> Choice:
        """Always emulated."""
        return Choice("emulated", "TensorFlow's matmul refuses float8 operands")

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
    def step_by_step(self) -> Iterator[None]:
        """See `AgnosticEngine.step_by_step`."""
        before = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(before)

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
