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
from converted_models import DELAYED, batch_for, predictions, stock
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


def trained(model):
    """A model after two steps under Adam."""
    for _ in range(2):
        model.train_on_batch(*batch_for(model))
    return model


def write(name, model, folder):
    """The file, and the numbers that it must give."""
    model.save(folder / f"{name}.keras")
    weights, slots = model.weights, model.optimizer.variables
    np.savez_compressed(
        folder / f"{name}.npz",
        outputs=predictions(model),
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


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
