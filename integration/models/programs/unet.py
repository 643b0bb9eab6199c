"""Segmentation: a U-Net with transposed convolutions on the way up."""

import keras
from keras import layers

from programs.data import JIT, fit, images
from programs.data import predict as predicted


def make(activation=None):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = previous = layers.Activation("relu")(x)
    x = layers.SeparableConv2D(8, 3, padding="same")(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    shortcut = layers.Conv2D(8, 1, strides=2, padding="same")(previous)
    x = layers.add([x, shortcut])
    x = layers.Conv2DTranspose(8, 3, strides=2, padding="same")(x)
    x = layers.Concatenate()([x, previous])
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    outputs = layers.Conv2D(2, 3, activation=activation, padding="same")(x)
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=activation is None
    )
    model.compile(keras.optimizers.RMSprop(1e-3), loss, jit_compile=JIT)
    return model


def train(model):
    x, _ = images()
    return fit(model, x, (x > 0.5).astype("int32"))


def predict(model):
    return predicted(model, images()[0])
