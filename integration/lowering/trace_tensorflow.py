"""Writes training steps as TensorFlow hands them to XLA.

python trace_tensorflow.py FOLDER dense bfloat16,delayed,current,stock
"""

import pathlib
import sys

import models
import tensorflow as tf

from keras_policy_ext import backends
from keras_policy_ext.backends import devices

# Trace as on a machine with such a GPU.
pretending = devices.pretend("h200")
pretending.__enter__()
backends.current.on_cpu = lambda x: False


def traced_step(model, shape):
    """A step of SGD with `jit_compile=True`, serialized."""
    variables = model.trainable_variables

    @tf.function(jit_compile=True)
    def step(inputs, outputs_grad):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = model(inputs, training=True)
        inputs_grad, *gradients = tape.gradient(
            y,
            [inputs, *(each.value for each in variables)],
            output_gradients=outputs_grad,
        )
        pairs = zip(variables, gradients, strict=True)
        return (
            y,
            inputs_grad,
            [
                models.updated(each, each.value, gradient)
                for each, gradient in pairs
            ],
        )

    inputs = tf.TensorSpec(shape, tf.bfloat16)
    outputs = tf.TensorSpec(
        (*shape[:-1], *model.output_shape[len(shape) - 1 :]), tf.bfloat16
    )
    traced = step.experimental_get_compiler_ir(inputs, outputs)
    return traced(stage="hlo_serialized")


def main():
    folder, steps, ways = sys.argv[1:]
    for step in steps.split(","):
        for way in ways.split(","):
            program = traced_step(*models.make(step, way))
            file = pathlib.Path(folder, f"{step}-{way}.pb")
            file.write_bytes(program)


if __name__ == "__main__":
    main()
