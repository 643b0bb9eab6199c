"""Counts what a training step does on a GPU that is not there.

python count.py H200 dense bfloat16,delayed,current,stock [--kernels]

traces the step of a model of `models.py` with JAX, compiles it for the GPU,
and prints a line of JSON for each way to compute, with `KERAS_BACKEND=jax`.
`--folder F` reads the programs that `trace_tensorflow.py F` wrote instead.
"""

import argparse
import json
import math
import pathlib

import gpus  # isort: skip  # Before JAX.
import jax
import models

import keras_policy_ext as kpe
from keras_policy_ext.backends import devices


def traced_step(model, shape):
    """A step of SGD, as `fit` has it: outputs, gradients, new variables."""
    variables = model.trainable_variables
    others = [each.value for each in model.non_trainable_variables]

    def step(weights, inputs, outputs_grad):
        def outputs(weights, inputs):
            return model.stateless_call(weights, others, inputs, training=True)[
                0
            ]

        with kpe.kernels.prefer("native"):
            y, backward = jax.vjp(outputs, weights, inputs)
        # What comes between is not here: a loss would be fused into it.
        y, outputs_grad = jax.lax.optimization_barrier((y, outputs_grad))
        gradients, inputs_grad = backward(outputs_grad)
        triples = zip(variables, weights, gradients, strict=True)
        return y, inputs_grad, [models.updated(*each) for each in triples]

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    inputs = jax.ShapeDtypeStruct(shape, "bfloat16")
    weights = [like(each.value) for each in variables]
    y = jax.eval_shape(
        lambda w, x: model.stateless_call(w, others, x, training=True)[0],
        weights,
        inputs,
    )
    return gpus.traced_by_jax(step, weights, inputs, like(y))


def elements(model, shape):
    """How many numbers there are in the matrices of a model's Dense layers."""
    rows = math.prod(shape[:-1])
    return sum(
        rows * sum(kernel.shape) + math.prod(kernel.shape)
        for kernel in model.trainable_variables
        if kernel.name == "kernel" and len(kernel.shape) == 2
    )


def counted(gpu, step, way, folder=None):
    """The summary of one step.

    Float8 is compiled as by default. With nothing to time, XLA writes all
    matmuls of bfloat16 in Triton, untuned; on a GPU it takes cuBLASLt where
    that is faster. What float8 is compared with is the better of the two.
    """
    model, shape = models.make(step, way)
    triton = way != "bfloat16"
    if folder is None:
        module = traced_step(model, shape)
        found = gpus.summary(gpu.compiled(module, triton), gpu)
    else:
        file = pathlib.Path(folder, f"{step}-{way}.pb")
        with gpus.make_ir_context():
            module = gpus.traced_by_tensorflow(file.read_bytes())
            found = gpus.summary(gpu.compiled(module, triton), gpu)
    found["GiB"] = found["bytes"] / 2**30
    found["bytes an element"] = found["bytes"] / elements(model, shape)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gpu", choices=gpus.GPUS)
    parser.add_argument("steps", help="keys of models.STEPS, by commas")
    parser.add_argument("ways", help="keys of models.POLICIES, by commas")
    parser.add_argument("--folder", help="of TensorFlow's programs")
    parser.add_argument("--kernels", action="store_true")
    asked = parser.parse_args()
    gpu = gpus.GPUS[asked.gpu]
    for step in asked.steps.split(","):
        for way in asked.ways.split(","):
            with devices.pretend(asked.gpu.lower()):
                found = counted(gpu, step, way, asked.folder)
            kernels = found.pop("kernels")
            if asked.kernels:
                print(*kernels, sep="\n")
            line = {"gpu": asked.gpu, "step": step, "way": way, **found}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
