"""Our float8 against stock Keras float8, interleaved in one process.

    KERAS_BACKEND=jax python integration/benchmarks/float8_against_stock.py

A 512 -> 2048 -> 512 MLP, batch 256, delayed scaling with a history of 1024.
Each round times one call of either model; the table gives the median of the
per-round ratios, so that a machine that slows down slows both. Ratios below 1
are in our favour.
"""

import argparse
import statistics
import time

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_policy_ext as kpe

WIDTHS = (512, 2048, 512)
BATCH = 256
BACKEND = keras.backend.backend()


def stock_policy(source):
    return keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", source)


def network(layers, policy):
    model = keras.Sequential([keras.Input((WIDTHS[0],))])
    model.add(layers.Dense(WIDTHS[1], "relu", dtype=policy))
    model.add(layers.Dense(WIDTHS[2], dtype=policy))
    return model


def finish(value):
    """Wait until a result is there."""
    if BACKEND == "jax":
        import jax

        jax.block_until_ready(value)


def fit_step(model, jit):
    """One step of `fit`: the compiled train function on a batch."""
    model.compile("sgd", "mse", jit_compile=jit)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, WIDTHS[0])).astype("float32")
    y = rng.normal(size=(BATCH, WIDTHS[-1])).astype("float32")
    return lambda: model.train_on_batch(x, y)


def layer_call(layers, policy, training):
    """One eager call of one layer."""
    layer = layers.Dense(WIDTHS[1], dtype=policy)
    layer.build((None, WIDTHS[0]))
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTHS[0]))
    x = keras.ops.convert_to_tensor(x.astype("float32"))
    return lambda: finish(layer(x, training=training))


def ratios(ours, stock, rounds, warmup=5):
    """Medians of (ours, stock) in seconds, and of their ratio."""
    for _ in range(warmup):
        ours()
        stock()
    times = []
    for i in range(rounds):
        pair = (ours, stock) if i % 2 else (stock, ours)
        took = {}
        for function in pair:
            start = time.perf_counter()
            function()
            took[function] = time.perf_counter() - start
        times.append((took[ours], took[stock]))
    median = statistics.median
    return (
        median(a for a, _ in times),
        median(b for _, b in times),
        median(a / b for a, b in times),
    )


def cases(source):
    """`(name, ours, stock)` of what is compared."""
    ours = kpe.Float8DTypePolicy(source)
    stock = stock_policy(source)
    for jit in (True, False) if BACKEND != "jax" else (True,):
        yield (
            f"fit step, jit_compile={jit}",
            fit_step(network(kpe.layers, ours), jit),
            fit_step(network(keras.layers, stock), jit),
        )
    for training in (True, False):
        yield (
            f"eager layer call, training={training}",
            layer_call(kpe.layers, ours, training),
            layer_call(keras.layers, stock, training),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--sources", nargs="+", default=["float32", "mixed_bfloat16"]
    )
    arguments = parser.parse_args()
    table = Table(title=f"keras {keras.__version__} on {BACKEND}, CPU")
    for column in ("policy", "what", "ours, ms", "stock, ms", "ratio"):
        table.add_column(
            column, justify="left" if column in ("policy", "what") else "right"
        )
    for source in arguments.sources:
        for name, ours, stock in cases(source):
            a, b, ratio = ratios(ours, stock, arguments.rounds)
            table.add_row(
                source, name, f"{a * 1e3:.2f}", f"{b * 1e3:.2f}", f"{ratio:.2f}"
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
