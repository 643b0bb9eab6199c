"""A training step of one block of a Llama, in bfloat16 and in float8.

    KERAS_BACKEND=jax python integration/benchmarks/llama_block.py

Attention with grouped queries and a SwiGLU, of Keras's own layers: forward,
backward and SGD. The signal-to-noise ratio is that of outputs and gradients
against the same block in float32.
"""

import functools

import keras
import measuring
from steps_of_layers import (
    COMPILED,
    exact_float32,
    forward_backward,
    numpy,
    sqnr_db,
    training_step,
)
from variants import kernels_of, made
from workloads import Llama, normal

import keras_policy_ext as kpe

SIZES = ("batch", "length", "width", "wide", "heads", "groups")
ON_A_CPU = (2, 64, 256, 896, 4, 2)
ON_A_GPU = (2, 2048, 4096, 14336, 32, 8)


def quality(models, llama, x, g):
    """The signal-to-noise ratios of each model."""
    keras.utils.set_random_seed(0)
    with kpe.policy_scope("float32"), exact_float32():
        y, x_grad, _ = forward_backward(llama.model())(x, g)
    exact = {"outputs": numpy(y), "inputs_grad": numpy(x_grad)}
    found = {}
    for name, model in models.items():
        y, x_grad, _ = forward_backward(model)(x, g)
        found[name] = {
            "outputs": sqnr_db(exact["outputs"], numpy(y)),
            "inputs_grad": sqnr_db(exact["inputs_grad"], numpy(x_grad)),
        }
    return found


def rows(llama, rounds, compiled):
    """The rows of the results."""
    x, g = normal(llama.shape), normal(llama.shape, seed=1)
    models = made(llama.model)
    qualities = quality(models, llama, x, g)
    steps = {name: training_step(model) for name, model in models.items()}
    if compiled and not COMPILED:
        for name, model in models.items():
            steps[f"{name}, compiled"] = training_step(model, compiled=True)
    found = measuring.times(
        measuring.interleaved(
            {name: functools.partial(f, x, g) for name, f in steps.items()},
            rounds,
        )
    )
    for name, measured in found.items():
        same = name.removesuffix(", compiled")
        row = {"case": f"Llama block: {llama}", "variant": name}
        kind = kernels_of(models[same])
        yield {**row, **kind, **measured, "sqnr_db": qualities[same]}


def main():
    sizes = dict(zip(SIZES, zip(ON_A_CPU, ON_A_GPU, strict=True), strict=True))
    asked = measuring.arguments(
        __doc__, rounds=(15, 20), compiled=(0, 1), **sizes
    )
    llama = Llama(*(getattr(asked, name) for name in SIZES))
    found = list(rows(llama, asked.rounds, asked.compiled))
    measuring.write("llama_block", asked, found, asked.out)


if __name__ == "__main__":
    main()
