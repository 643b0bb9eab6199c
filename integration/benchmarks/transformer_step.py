"""Steps of `fit` of a transformer of twelve blocks, and the first of them.

    KERAS_BACKEND=jax python integration/benchmarks/transformer_step.py

The model is compiled with Adam and trained by `train_on_batch`. The first
step traces, and compiles but on PyTorch; it is taken with a new model in each
round. `jit_compile` is True on JAX and TensorFlow, and False on PyTorch. The
signal-to-noise ratio is that of the outputs, against float32.
"""

import keras
import measuring
import numpy as np
from steps_of_layers import COMPILED, exact_float32, numpy, sqnr_db
from variants import VARIANTS, kernels_of, made
from workloads import Llama, normal

import keras_policy_ext as kpe

SIZES = ("batch", "length", "width", "wide", "heads", "groups", "blocks")
ON_A_CPU = (4, 16, 64, 192, 4, 2, 12)
ON_A_GPU = (8, 1024, 2048, 5632, 16, 4, 12)


def compiled(model):
    """The model, ready for `fit`."""
    model.compile("adam", "mse", jit_compile=COMPILED)
    return model


def fit_step(model, x, y):
    """A function that trains on a batch, and waits for it."""
    return lambda: float(model.train_on_batch(x, y))


def first_steps(llama, x, y, rounds):
    """The seconds of the first step in each round, by variant."""

    def seconds(name):
        model = compiled(made(llama.model, [name])[name])
        return measuring.seconds(fit_step(model, x, y))

    took = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for number in range(rounds):
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            took[name].append(seconds(name))
    return {name: np.array(each) for name, each in took.items()}


def quality(models, llama, x):
    """The signal-to-noise ratio of each model's outputs."""
    keras.utils.set_random_seed(0)
    with kpe.policy_scope("float32"), exact_float32():
        exact = numpy(llama.model()(x))
    return {
        name: {"outputs": sqnr_db(exact, numpy(model(x)))}
        for name, model in models.items()
    }


def rows(llama, asked):
    """The rows of the results, those of the first steps after the others."""
    x, y = (numpy(normal(llama.shape, seed=seed)) for seed in (0, 1))
    models = made(llama.model)
    qualities = quality(models, llama, x)
    functions = {
        name: fit_step(compiled(model), x, y) for name, model in models.items()
    }
    found = {
        "step": measuring.interleaved(functions, asked.rounds),
        "first step": first_steps(llama, x, y, asked.first_rounds),
    }
    for what, took in found.items():
        for name, measured in measuring.times(took).items():
            row = {"case": f"{what}: {llama}", "variant": name}
            kind = kernels_of(models[name])
            yield {**row, **kind, **measured, "sqnr_db": qualities[name]}


def main():
    sizes = dict(zip(SIZES, zip(ON_A_CPU, ON_A_GPU, strict=True), strict=True))
    asked = measuring.arguments(
        __doc__, rounds=(15, 20), first_rounds=(3, 3), **sizes
    )
    llama = Llama(*(getattr(asked, name) for name in SIZES))
    found = list(rows(llama, asked))
    measuring.write("transformer_step", asked, found, asked.out)


if __name__ == "__main__":
    main()
