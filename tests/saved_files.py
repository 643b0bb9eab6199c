"""How the files in `goldens/files` were written.

`python tests/saved_files.py FOLDER` writes what the installed package writes.
The golden files are never written anew: they show what the package wrote at
their time.
"""

import pathlib
import sys

import keras
import numpy as np

import keras_policy_ext as kpe
from converted_models import DELAYED, batch_for, stock
from steps import numpy


def layers_of_the_package():
    """Layers that were made in float8."""
    return keras.Sequential(
        [
            keras.Input((6, 4)),
            kpe.layers.Conv1D(8, 3, activation="relu", dtype=DELAYED),
            keras.layers.Flatten(),
            kpe.layers.Dense(3, dtype=DELAYED),
        ],
        name="model",
    )


def frozen():
    """Stored kernels of every granularity, and inputs of every kind."""
    ids = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(9, 4, name="words")(ids)
    x = keras.layers.Conv1D(5, 3, activation="tanh", name="conv")(x)
    x = keras.layers.LSTM(4, name="lstm")(x)
    model = keras.Model(ids, keras.layers.Dense(3, name="head")(x))
    kpe.freeze(model, include="words", granularity="tensor")
    kpe.freeze(model, include="conv", weights="float8_e5m2")
    kpe.freeze(model, include="lstm", activations="dynamic")
    kpe.convert(model, DELAYED)
    kpe.calibrate(model, words_for(model)[0])
    kpe.freeze(model, include="head", granularity="block", activations="static")
    return model


def words_for(model):
    """Inputs and targets for `frozen`."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 9, (8, 6)).astype("int32")
    return ids, rng.normal(size=(8, 3)).astype("float32")


def trained(model, batch=batch_for):
    """A model after two steps under Adam."""
    for _ in range(2):
        model.train_on_batch(*batch(model))
    return model


def write(name, model, folder, batch=batch_for):
    """The file, and the numbers that it must give."""
    outputs = model(batch(model)[0], training=False)
    model.save(folder / f"{name}.keras")
    weights, slots = model.weights, model.optimizer.variables
    np.savez_compressed(
        folder / f"{name}.npz",
        outputs=numpy(outputs),
        **{f"weight_{i:02}": numpy(v) for i, v in enumerate(weights)},
        **{f"slot_{i:02}": numpy(v) for i, v in enumerate(slots)},
    )


def main(folder):
    keras.utils.set_random_seed(0)
    model = layers_of_the_package()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    write("layers", trained(model), folder)
    if hasattr(kpe, "convert"):
        model = stock("blocks")
        kpe.convert(model, DELAYED)
        write("converted", trained(model), folder)
    if hasattr(kpe, "freeze"):
        model = frozen()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        write("frozen", trained(model, words_for), folder, words_for)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
