"""WaveNet: gated convolutions with holes, residuals and skips."""

import keras
from keras import layers

from programs.data import JIT, fit, integers
from programs.data import predict as predicted

LEVELS, LENGTH, WIDTH = 8, 8, 4


def gated(x, dilation):
    convolve = {"padding": "causal", "dilation_rate": dilation}
    value = layers.Conv1D(WIDTH, 2, activation="tanh", **convolve)(x)
    gate = layers.Conv1D(WIDTH, 2, activation="sigmoid", **convolve)(x)
    z = layers.Multiply()([value, gate])
    skip = layers.Conv1D(WIDTH, 1)(z)
    return layers.Add()([skip, x]), skip


def make():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(LEVELS, WIDTH)(inputs)
    skips = []
    for dilation in (1, 2):
        x, skip = gated(x, dilation)
        skips.append(skip)
    x = layers.ReLU()(layers.Add()(skips))
    logits = layers.Conv1D(LEVELS, 1)(x)
    model = keras.Model(inputs, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Nadam(0.01), loss, jit_compile=JIT)
    return model


def train(model):
    x = integers(LEVELS, 16, LENGTH)
    return fit(model, x, (x + 1) % LEVELS)


def predict(model):
    return predicted(model, integers(LEVELS, 16, LENGTH))
