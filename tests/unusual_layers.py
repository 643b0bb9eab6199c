"""Models whose layers are frozen, shared, unused or without tokens."""

import keras
from keras import layers, ops


class Experts(keras.Model):
    """A layer without tokens, one with zeros, one used twice, one unused."""

    def __init__(self):
        super().__init__()
        self.names = ("empty", "zeros", "shared", "unused", "head")
        for name in self.names:
            setattr(self, name, layers.Dense(6, name=name))

    def build(self, shape):
        for name in self.names:
            getattr(self, name).build((None, 6))

    def call(self, x):
        nobody = self.empty(x[:0])
        y = self.shared(self.shared(x)) + self.zeros(0 * x)
        return self.head(y) + ops.sum(nobody)


def bank():
    """Three experts with a kernel each, in one layer."""
    experts = layers.EinsumDense("tei,eio->teo", (3, 5), name="experts")
    return keras.Sequential([keras.Input((3, 6)), experts])


def attention():
    """Self-attention and a head."""
    x = keras.Input((5, 8))
    y = layers.MultiHeadAttention(2, 4, use_bias=False, name="mha")(x, x)
    return keras.Model(x, layers.Dense(3, name="head")(y))
