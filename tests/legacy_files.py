"""Files that tf_keras wrote, and what it computed with them.

integration/legacy/write_files.py has written them.
"""

import functools
import pathlib
import sys
import warnings

import keras
import numpy as np
from keras import ops

from keras_policy_ext import migration

FILES = pathlib.Path(__file__).parent / "migration" / "files"
MODELS = sorted(
    p.name for p in FILES.iterdir() if p.suffix in (".h5", ".keras")
)
WITHOUT_CODE = [name for name in MODELS if not name.startswith("bytecode")]
UNIT = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-12}
"""Largest relative error of one rounding."""


@functools.cache
def expected(name):
    """Arrays of tf_keras by group and name."""
    groups = {}
    with np.load(FILES / f"{pathlib.Path(name).stem}.npz") as arrays:
        for key in arrays:
            group, rest = key.split("/", 1)
            groups.setdefault(group, {})[rest] = arrays[key]
    return groups


def load(name, on_loss_scale="keep", **kwargs):
    """A new model from a file, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return migration.load_legacy_model(
            FILES / name, on_loss_scale, **kwargs
        )


@functools.cache
def loaded(name):
    """The model of a file, which tests only read."""
    return load(name)


def predictions(model, name):
    """By name; the one of an only output is nameless."""
    inputs = expected(name)["inputs"]
    fed = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    outputs = model(fed, training=False)
    if not isinstance(outputs, dict):
        outputs = {"": outputs}
    return {
        key: ops.convert_to_numpy(ops.cast(value, "float32"))
        for key, value in outputs.items()
    }


def error_allowed(model, value):
    """Of a prediction: every layer rounds once more, another way."""
    dtypes = {x.compute_dtype for x in model.layers if x.weights}
    unit = max([UNIT[dtype] for dtype in dtypes], default=UNIT["float32"])
    # Sums in the layers have up to 48 terms, each with a rounding in float32.
    unit = max(unit, 48 * UNIT["float32"])
    return len(model.layers) * unit * max(1.0, np.abs(value).max())


def weights_by_layer(model):
    return {
        f"{layer.name}/{i}": weight
        for layer in model.layers
        for i, weight in enumerate(layer.get_weights())
    }


def saved_weights(name, group="weights"):
    """Of tf_keras, by the name that the layer has in Keras 3."""
    arrays = expected(name).get(group, {})
    renamed = {}
    for key, value in arrays.items():
        layer, index = key.rsplit("/", 1)
        renamed[f"{layer.replace('/', '_')}/{index}"] = value
    return renamed


def python_that_wrote_the_bytecode():
    return sys.version_info[:2] == (3, 11)


def is_loss_scaler(optimizer):
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
