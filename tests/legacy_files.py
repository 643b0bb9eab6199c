"""Files that tf_keras wrote, and what it computed with them.

integration/legacy/write_files.py has written them. Others are written here
as it does.
"""

import functools
import io
import json
import pathlib
import sys
import warnings
import zipfile

import h5py
import keras
import numpy as np
from keras import ops

from keras_policy_ext import migration

FILES = pathlib.Path(__file__).parent / "ext" / "migration" / "files"
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


def layer_in_graph(entry, class_name, inbound, **config):
    """A layer of a functional model; `inbound` has its nodes."""
    return {
        "class_name": class_name,
        "name": entry,
        "config": {"name": entry, **config},
        "inbound_nodes": inbound,
    }


def functional_config(layers, inputs, output):
    """Of a model, from its layers and the names of its ends."""
    config = {
        "name": "model",
        "layers": layers,
        "input_layers": [[name, 0, 0] for name in inputs],
        "output_layers": [[output, 0, 0]],
    }
    return {"class_name": "Functional", "config": config}


def sequential_config(*layers, shape):
    """Of a model, from pairs of class name and config."""
    entries = [
        {"class_name": name, "config": config} for name, config in layers
    ]
    shape = {"batch_input_shape": [None, *shape], "dtype": "float32"}
    start = {"class_name": "InputLayer", "config": {**shape, "name": "start"}}
    config = {"name": "sequential", "layers": [start, *entries]}
    return {"class_name": "Sequential", "config": config}


def write_h5(path, config, weights):
    """A file of HDF5; `weights` has arrays by layer and name, in order."""
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = "2.15.0"
        file.attrs["model_config"] = json.dumps(config)
        root = file.create_group("model_weights")
        for layer, arrays in weights.items():
            group = root.create_group(layer)
            group.attrs["weight_names"] = list(arrays)
            for name, array in arrays.items():
                group[name] = array
    return path


def write_archive(path, config, weights):
    """A `.keras` file; `weights` has arrays by their path in it."""
    tree = io.BytesIO()
    with h5py.File(tree, "w") as file:
        for name, array in weights.items():
            file[name] = array
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", '{"keras_version": "2.15.0"}')
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("model.weights.h5", tree.getvalue())
    return path
