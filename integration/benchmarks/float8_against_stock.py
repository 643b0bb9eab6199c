"""Our float8 against stock Keras float8 and float32, in one process.

    KERAS_BACKEND=jax python integration/benchmarks/float8_against_stock.py

A 512 -> 2048 -> 512 MLP, batch 256, delayed scaling with a history of 1024.
Each round times one call of each of the three models, in turning order; the
table gives the median of the per-round ratios of ours to the others, so that a
machine that slows down slows all. Ratios below 1 are in our favour.
"""

import argparse

import keras
import measuring
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_policy_ext as kpe

WIDTHS = (512, 2048, 512)
BATCH = 256
KINDS = ("float8", "stock float8", "float32")


def stock_policy(source):
    return keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", source)


def network(layers, policy):
    model = keras.Sequential([keras.Input((WIDTHS[0],))])
    model.add(layers.Dense(WIDTHS[1], "relu", dtype=policy))
    model.add(layers.Dense(WIDTHS[2], dtype=policy))
    return model


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
    return lambda: layer(x, training=training)


def cases(source):
    """`(name, (ours, stock, float32))` of what is compared."""
    kinds = (
        (kpe.layers, kpe.Float8DTypePolicy(source)),
        (keras.layers, stock_policy(source)),
        (keras.layers, "float32"),
    )
    for jit in (True, False) if measuring.BACKEND != "jax" else (True,):
        steps = [fit_step(network(*kind), jit) for kind in kinds]
        yield f"fit step, jit_compile={jit}", steps
    for training in (True, False):
        calls = [layer_call(*kind, training) for kind in kinds]
        yield f"eager layer call, training={training}", calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--sources", nargs="+", default=["float32", "mixed_bfloat16"]
    )
    arguments = parser.parse_args()
    device = measuring.device()
    table = Table(title=f"keras {keras.__version__}, {device}")
    for column in ("policy", "what"):
        table.add_column(column)
    for column in ("ours, ms", "stock", "float32", "to stock", "to float32"):
        table.add_column(column, justify="right")
    for source in arguments.sources:
        for name, functions in cases(source):
            functions = dict(zip(KINDS, functions, strict=True))
            took = measuring.interleaved(functions, arguments.rounds)
            ours, *others = (took[kind] for kind in KINDS)
            times = [1e3 * np.median(took[kind]) for kind in KINDS]
            ratios = [np.median(ours / other) for other in others]
            numbers = [f"{x:.2f}" for x in (*times, *ratios)]
            table.add_row(source, name, *numbers)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
