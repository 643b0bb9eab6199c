"""The time of one step of an optimizer, in float32 and in one byte.

    KERAS_BACKEND=torch python integration/benchmarks/optimizer_step.py

The step of the optimizer alone, for the weights of blocks of a transformer. It
is compiled as `fit` compiles it: on JAX with the buffers of the state donated,
on TensorFlow with XLA and as a graph; on PyTorch it is eager. What is told is
the median of the ratios of single rounds, on a CPU in the time of all
processors.
"""

import time

import keras
import measuring
import numpy as np

import keras_policy_ext as kpe

BASELINE = "float32"

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
    "SGD": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
}


CLOCK = time.perf_counter if measuring.on_gpu() else time.process_time


def shapes(width, blocks):
    """The shapes of the weights of blocks of a transformer."""
    wide = 4 * width
    matrices = [(width, width)] * 4 + [(width, wide), (wide, width)]
    vectors = [(width,)] * 9 + [(wide,)]
    return (matrices + vectors) * blocks


def stepping(optimizer, sizes, xla):
    """A function that makes one step, always with the same gradients."""
    random = np.random.default_rng(0)
    make = keras.Variable
    weights = [make(random.standard_normal(s).astype("float32")) for s in sizes]
    gradients = [
        keras.ops.convert_to_tensor(
            (1e-2 * random.standard_normal(s)).astype("float32")
        )
        for s in sizes
    ]
    optimizer.build(weights)
    if measuring.BACKEND == "jax":
        return of_jax(optimizer, weights, gradients)
    if measuring.BACKEND == "torch":
        return lambda: optimizer.apply(gradients, weights)
    import tensorflow as tf

    @tf.function(jit_compile=xla)
    def step(gradients):
        optimizer.apply(gradients, weights)

    return lambda: step(gradients)


def of_jax(optimizer, weights, gradients):
    """As Keras's trainer does, with donated buffers."""
    import jax

    state = [
        [jax.numpy.copy(v.value) for v in group]
        for group in (weights, optimizer.variables)
    ]

    def step(state, gradients):
        weights, slots = state
        return optimizer.stateless_apply(slots, gradients, weights)

    compiled = jax.jit(step, donate_argnums=0)

    def run():
        state[:] = compiled(state, gradients)
        return state

    return run


def main():
    """Measure on this machine."""
    args = measuring.arguments(
        __doc__, width=(512, 2048), blocks=(2, 4), rounds=(15, 30)
    )
    sizes = shapes(args.width, args.blocks)
    ways = {"xla": True}
    if measuring.BACKEND == "tensorflow":
        ways["graph"] = False
    rows = []
    for way, xla in ways.items():
        for name, make in OPTIMIZERS.items():
            steps = {BASELINE: stepping(make(), sizes, xla)}
            for form in ("float8", "mx"):
                optimizer = kpe.optimizers.quantize_state(make(), form)
                steps[form] = stepping(optimizer, sizes, xla)
            took = measuring.interleaved(steps, args.rounds, clock=CLOCK)
            for form, each in took.items():
                low, middle, high = np.percentile(
                    each / took[BASELINE], [25, 50, 75]
                )
                rows.append(
                    {
                        "case": f"{name}, {way}",
                        "variant": form,
                        "median_ms": measuring.rounded(1e3 * np.median(each)),
                        "times_float32": measuring.rounded(middle),
                        "quartiles": [
                            measuring.rounded(low),
                            measuring.rounded(high),
                        ],
                    }
                )
    measuring.write("optimizer_step", args, rows, args.out)


if __name__ == "__main__":
    main()
