"""Layers that can follow a float8 policy, under the names of `keras.layers`.

`from keras_policy_ext import layers` replaces `from keras import layers`. A
name without a float8 form here is the stock layer.
"""

from typing import TYPE_CHECKING, Any

import keras

from keras_policy_ext import _extensions

if TYPE_CHECKING:
    # The names that `__getattr__` forwards.
    from keras.layers import *  # noqa: F403

    from keras_policy_ext.ext.mixed.autocast import (
        AutocastMixin,
        autocast_scope,
        is_autocast_variable,
    )
    from keras_policy_ext.ext.recurrent.rnn import (
        GRU,
        LSTM,
        GRUCell,
        LSTMCell,
        SimpleRNN,
        SimpleRNNCell,
    )

from keras_policy_ext.layers.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
)
from keras_policy_ext.layers.conv import (
    Conv1D,
    Conv1DTranspose,
    Conv2D,
    Conv2DTranspose,
    Conv3D,
    Conv3DTranspose,
    SeparableConv1D,
    SeparableConv2D,
)
from keras_policy_ext.layers.dense import Dense, EinsumDense
from keras_policy_ext.layers.embedding import Embedding, ReversibleEmbedding
from keras_policy_ext.layers.mixin import Float8Mixin

Convolution1D = Conv1D
Convolution2D = Conv2D
Convolution3D = Conv3D
Convolution1DTranspose = Conv1DTranspose
Convolution2DTranspose = Conv2DTranspose
Convolution3DTranspose = Conv3DTranspose
SeparableConvolution1D = SeparableConv1D
SeparableConvolution2D = SeparableConv2D
GroupQueryAttention = GroupedQueryAttention

__all__ = [
    "GRU",
    "LSTM",
    "AutocastMixin",
    "Conv1D",
    "Conv1DTranspose",
    "Conv2D",
    "Conv2DTranspose",
    "Conv3D",
    "Conv3DTranspose",
    "Convolution1D",
    "Convolution1DTranspose",
    "Convolution2D",
    "Convolution2DTranspose",
    "Convolution3D",
    "Convolution3DTranspose",
    "Dense",
    "EinsumDense",
    "Embedding",
    "Float8Mixin",
    "GRUCell",
    "GroupQueryAttention",
    "GroupedQueryAttention",
    "LSTMCell",
    "MultiHeadAttention",
    "ReversibleEmbedding",
    "SeparableConv1D",
    "SeparableConv2D",
    "SeparableConvolution1D",
    "SeparableConvolution2D",
    "SimpleRNN",
    "SimpleRNNCell",
    "autocast_scope",
    "is_autocast_variable",
]


def __getattr__(name: str) -> Any:
    """Return a layer of an extension, or else the stock layer."""
    if _extensions.has(f"layers.{name}"):
        return _extensions.get(f"layers.{name}")
    if name in __all__ and not hasattr(keras.layers, name):
        # It raises: no installed extension has the name.
        return _extensions.get(f"layers.{name}")
    return getattr(keras.layers, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(keras.layers)})
