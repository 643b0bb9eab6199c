"""Ranking as in DLRM: towers for features, products of all pairs of them."""

import keras
import numpy as np
from keras import layers, ops

from programs.data import JIT, fit, integers, normal
from programs.data import predict as predicted

USERS, MOVIES, WIDTH = 12, 9, 8


@keras.saving.register_keras_serializable("programs")
class DotInteraction(layers.Layer):
    """Products of each pair of features, without those of one with itself."""

    def call(self, inputs):
        features = ops.stack(inputs, axis=1)
        products = ops.matmul(features, ops.transpose(features, (0, 2, 1)))
        count = len(inputs)
        rows, columns = np.tril_indices(count, -1)
        flat = ops.reshape(products, (-1, count * count))
        return ops.take(flat, rows * count + columns, axis=1)


@keras.saving.register_keras_serializable("programs")
class DLRM(keras.Model):
    def __init__(self, users, movies, width, **kwargs):
        super().__init__(**kwargs)
        self.sizes = {"users": users, "movies": movies, "width": width}
        self.user_embedding = layers.Embedding(users, width)
        self.movie_embedding = layers.Embedding(movies, width)
        self.bottom = keras.Sequential(
            [layers.Dense(16, "relu"), layers.Dense(width, "relu")]
        )
        self.interaction = DotInteraction()
        self.top = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(1)])

    def call(self, inputs):
        features = [
            self.user_embedding(inputs["user"]),
            self.movie_embedding(inputs["movie"]),
            self.bottom(inputs["dense"]),
        ]
        x = self.interaction(features)
        return self.top(ops.concatenate([features[-1], x], axis=-1))

    def get_config(self):
        return {**super().get_config(), **self.sizes}


def ratings():
    x = {
        "user": integers(USERS, 16),
        "movie": integers(MOVIES, 16, seed=1),
        "dense": normal(16, 4),
    }
    return x, (x["dense"][:, :1] > 0).astype("float32")


def make():
    keras.utils.set_random_seed(0)
    model = DLRM(USERS, MOVIES, WIDTH)
    model({name: value[:2] for name, value in ratings()[0].items()})
    model.compile(
        keras.optimizers.Adagrad(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        jit_compile=JIT,
    )
    return model


def train(model):
    return fit(model, *ratings())


def predict(model):
    return predicted(model, ratings()[0])
