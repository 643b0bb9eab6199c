"""How long a conversion takes, and how much memory it asks for.

    KERAS_BACKEND=jax python integration/benchmarks/conversion.py

Converts a transformer of 24 blocks (6 contractions each) in place and back,
three times, and prints seconds per 100 converted layers and the growth of the
process beside the size of the weights.
"""

import resource
import time

import keras

import keras_policy_ext as kpe

BLOCKS, WIDTH, HEADS = 24, 256, 4


def transformer():
    inputs = keras.Input((16, WIDTH))
    x = inputs
    for _ in range(BLOCKS):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        x = keras.layers.Add()([x, y])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(y)
        y = keras.layers.Dense(WIDTH)(y)
        x = keras.layers.Add()([x, y])
    return keras.Model(inputs, x)


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    model = transformer()
    weights = sum(
        v.nbytes for v in map(keras.ops.convert_to_numpy, model.weights)
    )
    print(f"{keras.backend.backend()}: weights {weights / 2**20:.0f} MiB")
    for _ in range(3):
        peak = peak_megabytes()
        start = time.perf_counter()
        count = len(kpe.convert(model, "mixed_float8").converted)
        converted = time.perf_counter()
        kpe.revert(model)
        reverted = time.perf_counter()
        print(
            f"{count} layers: convert {100 * (converted - start) / count:.2f} "
            f"s / 100 layers, revert {100 * (reverted - converted) / count:.2f}"
            f" s / 100 layers, peak memory {peak_megabytes() - peak:+.0f} MiB"
        )


if __name__ == "__main__":
    main()
