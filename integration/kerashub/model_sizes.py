"""The sizes of small models, and what is asked of models of any library."""

from typing import NamedTuple

import keras
import numpy as np

from keras_policy_ext._keras import walking
from keras_policy_ext.layers.state import Float8State


class Sizes(NamedTuple):
    """Sizes of a small transformer, whichever library has it."""

    tokens: int  # of the vocabulary
    length: int  # of a text, at most
    width: int
    inner: int  # the width of feed-forward parts
    heads: int
    groups: int  # heads of keys and values
    blocks: int

    @property
    def head(self):
        """The width of a head."""
        return self.width // self.heads

    def under(self, **names):
        """Arguments: sizes under the names that a library gives them."""
        return {name: getattr(self, size) for name, size in names.items()}


def numpy(x):
    # PyTorch's arrays are views, which change with the tensor.
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")))


def layers_of(model):
    """All layers, without the states of float8 layers."""
    return [
        layer
        for layer in walking.layers_within(model)
        if not isinstance(layer, Float8State)
    ]


def compile_to_train(model, optimizer, loss, **options):
    """Compile; XLA takes longer than it saves, but JAX knows no other."""
    is_jax = keras.backend.backend() == "jax"
    model.compile(optimizer, loss, jit_compile=is_jax, **options)
    return model
