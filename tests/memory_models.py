"""Two layers whose memory is counted by hand."""

import keras
import numpy as np
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext._keras import walking

BATCH, IN, WIDE, OUT = 64, 16, 128, 32
ARRAY = np.zeros((BATCH, IN), "float32")


def mlp(activation="relu", dtype="float32"):
    with kpe.policy_scope(dtype):
        return keras.Sequential(
            [
                keras.Input((IN,)),
                keras.layers.Dense(WIDE, activation=activation, name="first"),
                keras.layers.Dense(OUT, name="second"),
            ]
        )


def by_name(form):
    return {layer.path.rpartition("/")[2]: layer for layer in form.layers}


def snapshot(model):
    """What layers and optimizer hold, by identity, and all values."""
    things = walking.layers_within(model)
    variables = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        things = [*things, model.optimizer]
        variables += model.optimizer.variables
    held = [
        (
            id(thing),
            type(thing),
            sorted((k, id(v)) for k, v in vars(thing).items()),
        )
        for thing in things
    ]
    values = [ops.convert_to_numpy(v.value).tobytes() for v in variables]
    return held, values, [id(v) for v in variables]
