"""Time series: a recurrent layer in both directions over windows."""

import keras
import numpy as np
from keras import layers

from programs.data import JIT, fit
from programs.data import predict as predicted


def windows(length=8, count=16):
    wave = np.sin(np.arange(length + count + 1) / 3).astype("float32")
    x = np.stack([wave[i : i + length] for i in range(count)])[..., None]
    return x, wave[length : length + count, None]


def make():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 1)),
            layers.Bidirectional(layers.GRU(4)),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mae", jit_compile=JIT)
    return model


def train(model):
    return fit(model, *windows())


def predict(model):
    return predicted(model, windows()[0])
