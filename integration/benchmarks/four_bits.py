"""How much of the loss of rounding kernels training on the grid wins back.

    python integration/benchmarks/four_bits.py --seeds 0 1 2

The demo's transformer is trained in float32, then fine-tuned in float32, and
from the same weights for as long on each grid. "Rounded" is the validation loss
of the model that was fine-tuned in float32, with kernels rounded then; "least
squares" has the best clips. Losses are in nats per character.
"""

import argparse
import json
import time

import keras
import numpy as np
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.ext.demo import text, train
from keras_policy_ext.ext.demo.train import Settings

NVFP4 = "float4_e2m1fn"
MXFP4 = "float4_e2m1fn(group=32,scale_format='float8_e8m0fnu')"
GRIDS = ("int8", "int4(group=32)", "int4", "int3(group=32)", NVFP4, MXFP4)
SIZES = Settings(context=32, width=64, hidden=256, windows=32)


def weights_of(model):
    return [ops.convert_to_numpy(each) for each in model.weights]


def run(model, corpus, steps, rate, seed):
    """Train a model in place."""
    schedule = keras.optimizers.schedules.PolynomialDecay(
        rate, steps, 0.1 * rate
    )
    model.compile(
        keras.optimizers.Adam(schedule, beta_2=0.98),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() == "jax",
    )
    for step in range(steps):
        batch = corpus.batch(step, seed, SIZES.windows, SIZES.context)
        model.train_on_batch(*batch)


def loss(model, corpus):
    held_out = corpus.validation_batch(1024, SIZES.context)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return float(model.evaluate(*held_out, batch_size=64, verbose=0))


def model_with(weights, corpus):
    model = train.decoder(corpus.tokens, SIZES, "float32")
    for variable, value in zip(model.weights, weights, strict=True):
        variable.assign(value)
    return model


def measure(seed, corpus, grids, steps, tuning):
    """A row for each grid."""
    drawn = train.draw(corpus, SIZES._replace(seed=seed))
    model = train.decoder(corpus.tokens, SIZES, "float32")
    for variable in model.weights:
        variable.assign(drawn[variable.path])
    run(model, corpus, steps, 3e-3, seed)
    begun = weights_of(model)
    run(model, corpus, tuning, 6e-4, seed + 1000)
    tuned, floats = weights_of(model), loss(model, corpus)
    for grid in grids:
        how = kpe.recipes.get(grid).grid
        losses = {}
        for scales in ("amax", "least_squares"):
            model = model_with(tuned, corpus)
            kpe.freeze(
                model,
                weights=how.weights,
                granularity=how.granularity,
                scales=scales,
                scale_format=how.scale_format,
            )
            losses[scales] = loss(model, corpus)
        model = model_with(begun, corpus)
        kpe.convert(model, grid)
        run(model, corpus, tuning, 6e-4, seed + 1000)
        kpe.freeze(model)
        trained, rounded = loss(model, corpus), losses["amax"]
        yield {
            "backend": keras.backend.backend(),
            "seed": seed,
            "grid": grid,
            "float": floats,
            "rounded": rounded,
            "least_squares": losses["least_squares"],
            "trained": trained,
            "won_back": (rounded - trained) / (rounded - floats),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--grids", nargs="+", default=GRIDS)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--tuning", type=int, default=250)
    parser.add_argument("--out", help="a file of JSON lines to append to")
    given = parser.parse_args()
    corpus = text.load(None, SIZES.context)
    rows = []
    for seed in given.seeds:
        began = time.perf_counter()
        for row in measure(
            seed, corpus, given.grids, given.steps, given.tuning
        ):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if given.out:
                with open(given.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        print(f"seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
    for grid in given.grids:
        of_grid = [row for row in rows if row["grid"] == grid]
        mean = np.mean([row["won_back"] for row in of_grid])
        print(f"{grid}: {100 * mean:.0f} % won back")


if __name__ == "__main__":
    main()
