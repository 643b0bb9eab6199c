"""Characters from characters: two LSTMs, then models made of their layers."""

import keras
import numpy as np
from keras import layers

from programs.data import JIT, fit, integers

SIGNS, LENGTH, UNITS = 6, 5, 8


def make():
    keras.utils.set_random_seed(0)
    source = keras.Input((LENGTH, SIGNS), name="source")
    _, h, c = layers.LSTM(UNITS, return_state=True, name="encoder")(source)
    target = keras.Input((LENGTH, SIGNS), name="target")
    decoder = layers.LSTM(
        UNITS, return_sequences=True, return_state=True, name="decoder"
    )
    outputs, _, _ = decoder(target, initial_state=[h, c])
    outputs = layers.Dense(SIGNS, "softmax", name="signs")(outputs)
    model = keras.Model([source, target], outputs)
    model.compile("rmsprop", "categorical_crossentropy", jit_compile=JIT)
    return model


def pairs():
    source = np.eye(SIGNS, dtype="float32")[integers(SIGNS, 16, LENGTH)]
    target = source[:, ::-1].copy()
    shifted = np.roll(target, 1, axis=1)
    return [source, shifted], target


def train(model):
    return fit(model, *pairs())


def predict(model):
    """Sign by sign, with an encoder and a decoder out of the same layers."""
    _, h, c = model.get_layer("encoder").output
    encoder = keras.Model(model.inputs[0], [h, c])
    sign = keras.Input((1, SIGNS))
    states = [keras.Input((UNITS,)), keras.Input((UNITS,))]
    x, h, c = model.get_layer("decoder")(sign, initial_state=states)
    decoder = keras.Model([sign, *states], [model.get_layer("signs")(x), h, c])
    (source, shifted), _ = pairs()
    states = encoder.predict(source[:4], verbose=0)
    x, written = shifted[:4, :1], []
    for _ in range(2):
        x, *states = decoder.predict([x, *states], verbose=0)
        written.append(x)
    return np.ravel(written)
