"""What a frozen model costs: predictions by rows, a step of LoRA, and bytes.

    KERAS_BACKEND=jax python integration/benchmarks/frozen.py [--eager]

Three Dense layers of one size, compiled where the backend compiles, beside
the same layers in float32, called in turn. Weights are arguments of what is
compiled: of constants XLA would make float kernels once and for all.
"""

import argparse
import functools
import json

import keras
import measuring
import numpy as np
from workloads import normal

import keras_policy_ext as kpe

FLOAT, FROZEN = "float32", "frozen"


def layers(size, count=3):
    """The model, with the same weights each time."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(size, "relu") for _ in range(count)]
    return keras.Sequential([keras.Input((size,)), *hidden])


def pair(size, granularity, activations):
    """The model in float32, and frozen."""
    frozen = layers(size)
    kpe.freeze(frozen, granularity=granularity, activations=activations)
    return {FLOAT: layers(size), FROZEN: frozen}


def predictor(model, compiled):
    """A function of the inputs alone, which returns when all is computed."""
    if measuring.BACKEND == "jax":
        import jax

        weights = [
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
            )
        ]

        def forward(weights, x):
            return model.stateless_call(*weights, x)[0]

        forward = jax.jit(forward) if compiled else forward
        return lambda x: jax.block_until_ready(forward(weights, x))
    if measuring.BACKEND == "torch":
        import torch

        run = torch.compile(model) if compiled else model
        return torch.no_grad()(lambda x: run(x))
    import tensorflow as tf

    return tf.function(lambda x: model(x), jit_compile=compiled)


def predictions(asked):
    """For each number of rows: milliseconds, and the median of the ratios."""
    models = pair(asked.size, asked.granularity, asked.activations)
    compiled = not asked.eager
    run = {name: predictor(m, compiled) for name, m in models.items()}
    for rows in asked.rows:
        x = keras.ops.convert_to_tensor(normal((rows, asked.size)))
        functions = {name: functools.partial(f, x) for name, f in run.items()}
        took = measuring.interleaved(functions, asked.rounds)
        yield {"rows": rows, "eager": asked.eager, **_compared(took)}


def lora_steps(asked):
    """A training step with adapters of rank 8, and its losses."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, asked.batch, asked.size), "float32")
    models = pair(asked.size, asked.granularity, asked.activations)
    losses = {}
    for name, model in models.items():
        keras.utils.set_random_seed(1)
        for layer in model.layers:
            layer.enable_lora(8)
        model.compile(keras.optimizers.Adam(1e-3), "mse")
        steps = [model.train_on_batch(x, y) for _ in range(50)]
        losses[name] = np.array(steps, "float64")
    functions = {
        name: functools.partial(model.train_on_batch, x, y)
        for name, model in models.items()
    }
    took = measuring.interleaved(functions, asked.rounds)
    apart = np.max(np.abs(losses[FROZEN] / losses[FLOAT] - 1))
    return {
        "lora step, rows": asked.batch,
        **_compared(took),
        "losses apart": measuring.rounded(apart, 2),
        "bytes of weights": {
            name: _bytes(model.variables) for name, model in models.items()
        },
    }


def _compared(took):
    ratio = np.median(took[FROZEN] / took[FLOAT])
    found = {
        f"{name} ms": measuring.rounded(1e3 * np.median(each))
        for name, each in took.items()
    }
    return {**found, "ratio": measuring.rounded(ratio, 3)}


def _bytes(variables):
    return sum(
        int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables
    )


def main():
    """Print a line of JSON for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 128, 512, 1024, 2048]
    )
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--granularity", default="channel")
    parser.add_argument("--activations", default=None)
    parser.add_argument("--eager", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(measuring.environment()))
    for row in predictions(asked):
        print(json.dumps(row), flush=True)
    print(json.dumps(lora_steps(asked)))


if __name__ == "__main__":
    main()
