"""Anomaly detection: an autoencoder of windows, and a threshold on errors."""

import keras
import numpy as np
from keras import layers

from programs.data import JIT, fit
from programs.data import predict as predicted


def windows(count=16, length=8):
    phases = np.arange(count)[:, None] + np.arange(length)
    return np.sin(phases / 2)[..., None].astype("float32")


def make():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((8, 1)),
            layers.Conv1D(8, 3, padding="same", strides=2, activation="relu"),
            layers.Dropout(0.2, seed=1),
            layers.Conv1DTranspose(8, 3, padding="same", strides=2),
            layers.Conv1D(1, 3, padding="same"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=JIT)
    return model


def train(model):
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=5)
    return fit(model, windows(), windows(), callbacks=[stop])


def predict(model):
    again = predicted(model, windows()).reshape(windows().shape)
    return np.mean(np.abs(again - windows()), axis=(1, 2))
