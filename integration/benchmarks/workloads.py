"""The models that are measured, under whatever policy is global."""

import dataclasses

import keras
import numpy as np
from keras import ops


@dataclasses.dataclass(frozen=True)
class Llama:
    """A transformer as Llama's blocks are: of Keras's own layers, no rotation.

    Attributes:
        batch: Sequences.
        length: Positions of each.
        width: Of the residual stream.
        wide: Of the gate and what it lets through.
        heads: Of queries.
        groups: Heads of keys and values.
        blocks: How many.
    """

    batch: int
    length: int
    width: int
    wide: int
    heads: int
    groups: int
    blocks: int = 1

    @property
    def shape(self):
        """Of the inputs, and of the outputs."""
        return self.batch, self.length, self.width

    def __str__(self):
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return (
            f"{blocks} of {self.width}, {self.wide} in the middle, "
            f"{self.heads} heads in {self.groups} groups, "
            f"{self.batch} × {self.length} tokens"
        )

    def model(self):
        """The built model, from vectors to vectors."""
        inputs = keras.Input(self.shape[1:])
        x = inputs
        for _ in range(self.blocks):
            x = self._block(x)
        return keras.Model(inputs, x)

    def _block(self, x):
        layers = keras.layers
        y = layers.RMSNormalization()(x)
        y = layers.GroupQueryAttention(
            self.width // self.heads, self.heads, self.groups, use_bias=False
        )(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.RMSNormalization()(x)
        gate = layers.Dense(self.wide, "silu", use_bias=False)(y)
        up = layers.Dense(self.wide, use_bias=False)(y)
        down = layers.Dense(self.width, use_bias=False)
        return layers.Add()([x, down(layers.Multiply()([gate, up]))])


def dense(size):
    """A Dense of a square kernel with a bias, as the layer of a model.

    A layer alone computes in float32 in `stateless_call` of Keras 3.15.
    """
    return keras.Sequential([keras.Input((size,)), keras.layers.Dense(size)])


def normal(shape, dtype="bfloat16", seed=0):
    """Normal random numbers as a tensor."""
    x = np.random.default_rng(seed).standard_normal(shape, dtype="float32")
    return ops.cast(ops.convert_to_tensor(x), dtype)
