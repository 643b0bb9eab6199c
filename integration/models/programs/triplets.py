"""Siamese network: one embedding sees three images, `add_loss` in a layer."""

import keras
from keras import layers, ops

from programs.data import JIT, fit, images
from programs.data import predict as predicted


@keras.saving.register_keras_serializable("programs")
class DistanceLayer(layers.Layer):
    """Distances of an anchor from the two others, and their loss."""

    def call(self, anchor, positive, negative):
        near = ops.sum(ops.square(anchor - positive), axis=-1)
        far = ops.sum(ops.square(anchor - negative), axis=-1)
        self.add_loss(ops.mean(ops.maximum(near - far + 0.5, 0.0)))
        return ops.stack([near, far], axis=-1)


def embedding():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, 2, "same", activation="relu"),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(4),
        ],
        name="embedding",
    )


def make():
    keras.utils.set_random_seed(0)
    embed = embedding()
    names = ("anchor", "positive", "negative")
    inputs = [keras.Input((8, 8, 1), name=name) for name in names]
    distances = DistanceLayer()(*map(embed, inputs))
    model = keras.Model(inputs, distances, name="siamese")
    model.compile(keras.optimizers.Adam(1e-3), jit_compile=JIT)
    return model


def train(model):
    x, _ = images()
    return fit(model, [x, x[:, ::-1].copy(), x[::-1].copy()])


def predict(model):
    x, _ = images()
    return predicted(model.get_layer("embedding"), x)
