"""TensorFlow: quantize and dequantize, gradients by `tf.custom_gradient`."""

from __future__ import annotations

import functools
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
        if context is None or context.num_replicas_in_sync == 1:
            return observation
        gathered = context.all_gather(observation[tf.newaxis], axis=0)
        return tf.reduce_max(gathered, axis=0)

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
                inputs_grad, kernel_grad, state_grad = make(plan, shapes)(
                    seen, outputs_grad, state
                )
                return [inputs_grad, kernel_grad, *state_grad]

            return outputs, gradient

        # A tf.Variable would make tf.custom_gradient ask for a second result.
        return contract(
            tf.identity(inputs),
            tf.identity(kernel),
            *(tf.identity(matrix) for matrix in state),
        )


ENGINE = TensorFlowEngine()


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
