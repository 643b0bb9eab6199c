"""A model of many kinds of layers, and a report of many layers."""

import keras
from keras import layers

from keras_policy_ext.conversion import Converted, Report, Skipped

POLICY = "float8/4_from_float32"
WIDTHS = [40, 60, 80, 100, 132, 200]


def model_of_many_kinds():
    """Multiplications by hand, in the order of the layers.

    Conv1D: 6 positions of 3 x 4 x 8; LSTM: 6 steps of (8 + 2) x 8; Dense: 2 x
    16; depthwise of 3 taps, of 8 channels on 6 positions.
    """
    inputs = keras.Input((8, 4))
    x = layers.Conv1D(8, 3, name="conv")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.DepthwiseConv1D(3, padding="same", name="depthwise")(x)
    x = layers.LSTM(2, name="lstm")(x)
    return keras.Model(inputs, layers.Dense(16, name="head")(x), name="kinds")


MULTIPLICATIONS = {
    "conv": 6 * 3 * 4 * 8,
    "depthwise": 6 * 3 * 8,
    "lstm_cell": 6 * (8 + 2) * 8,
    "head": 2 * 16,
}
KERNELS = {"conv": 96, "depthwise": 24, "lstm_cell": 80, "head": 32}


def made_up(classes=3, layers_of_each=4):
    """A report of layers with long paths, half of them skipped."""
    converted, skipped = [], []
    for c in range(classes):
        for n in range(layers_of_each):
            path = f"a_rather_long_model_name/stage_{c}/block_number_{n}/dense"
            size = 100 * c + n + 1
            numbers = {"parameters": size, "multiplications": 10 * size}
            if c % 2:
                reason = f"its kernel has {size} entries, fewer than 10000"
                entry = Skipped(path, f"SomeLayer{c}", reason, **numbers)
                skipped.append(entry)
            else:
                policy = "float8_from_mixed_bfloat16"
                entry = Converted(path, f"SomeLayer{c}", policy, **numbers)
                converted.append(entry)
    return Report(tuple(converted), tuple(skipped))
