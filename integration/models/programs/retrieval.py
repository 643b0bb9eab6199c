"""Retrieval: a query tower, a candidate tower, a loss over the batch."""

import keras
from keras import layers, ops

from programs.data import JIT, fit, integers
from programs.data import predict as predicted

KERAS_LOADS = False  # It has no `get_config`.
USERS, MOVIES, WIDTH = 12, 16, 8


class TwoTowers(keras.Model):
    def __init__(self, users, movies, width, **kwargs):
        super().__init__(**kwargs)
        self.query_tower = self.tower(users, width)
        self.candidate_tower = self.tower(movies, width)

    def tower(self, count, width):
        return keras.Sequential(
            [
                layers.Embedding(count, width),
                layers.Dense(width, activation="relu"),
                layers.Dense(width),
            ]
        )

    def call(self, inputs):
        return {
            "user": self.query_tower(inputs["user"]),
            "movie": self.candidate_tower(inputs["movie"]),
        }

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        scores = ops.matmul(y_pred["user"], ops.transpose(y_pred["movie"]))
        labels = ops.arange(ops.shape(scores)[0])
        losses = keras.losses.sparse_categorical_crossentropy(
            labels, scores, from_logits=True
        )
        return ops.mean(losses)


def watched():
    users = integers(USERS, 16)
    return {"user": users, "movie": (users + 1) % MOVIES}


def make():
    keras.utils.set_random_seed(0)
    model = TwoTowers(USERS, MOVIES, WIDTH)
    model(watched())
    model.compile(keras.optimizers.Adam(0.01), jit_compile=JIT)
    return model


def train(model):
    return fit(model, watched())


def predict(model):
    return predicted(model, watched())
