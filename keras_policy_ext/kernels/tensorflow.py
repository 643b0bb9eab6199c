"""TensorFlow: quantize and dequantize, gradients by `tf.custom_gradient`."""

from __future__ import annotations

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

        @tf.custom_gradient
        def contract(inputs: Tensor, kernel: Tensor, *state: Tensor) -> Any:
            outputs, residuals = plan.forward(
                self, inputs, kernel, state, observe=plan.training is True
            )

            def gradient(outputs_grad: Tensor) -> list[Tensor]:
                seen = residuals
                if plan.training is None:
                    seen = plan.observed(residuals, inputs, kernel)
                inputs_grad, kernel_grad, state_grad = plan.backward(
                    self, seen, outputs_grad, _shapes(inputs, kernel), state
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


def _shapes(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(
        x.shape if x.shape.is_fully_defined() else tf.shape(x) for x in tensors
    )
