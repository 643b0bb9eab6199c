"""SimSiam: an encoder and a predictor that see two views, and no `call`."""

import keras
from keras import layers, ops

from programs.custom_steps import OneLoss
from programs.data import JIT, fit, images
from programs.data import predict as predicted

KERAS_LOADS = False  # It has no `get_config`, as in the example.


def encoder():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, 2, "same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(16, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(16, use_bias=False),
            layers.BatchNormalization(),
        ],
        name="encoder",
    )


def predictor():
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(8, use_bias=False),
            layers.ReLU(),
            layers.BatchNormalization(),
            layers.Dense(16),
        ],
        name="predictor",
    )


def distance(p, z):
    z = ops.stop_gradient(z)
    p, z = ops.normalize(p, axis=1), ops.normalize(z, axis=1)
    return -ops.mean(ops.sum(p * z, axis=1))


class SimSiam(OneLoss):
    def __init__(self):
        super().__init__()
        self.encoder = encoder()
        self.predictor = predictor()

    def batch_loss(self, data):
        one, two = data
        z1 = self.encoder(one, training=True)
        z2 = self.encoder(two, training=True)
        p1 = self.predictor(z1, training=True)
        p2 = self.predictor(z2, training=True)
        return (distance(p1, z2) + distance(p2, z1)) / 2


def make():
    keras.utils.set_random_seed(0)
    model = SimSiam()
    model.compile(keras.optimizers.SGD(0.03, momentum=0.9), jit_compile=JIT)
    return model


def train(model):
    one, _ = images()
    return fit(model, one, one[:, ::-1].copy())


def predict(model):
    return predicted(model.encoder, images()[0])
