"""Translation: encoder and decoder, causal and cross attention, masks."""

import keras
from keras import layers, ops

from programs.data import JIT, fit, integers
from programs.data import predict as predicted

WORDS, LENGTH, WIDTH = 16, 6, 8


@keras.saving.register_keras_serializable("programs")
class PositionalEmbedding(layers.Layer):
    def __init__(self, length, words, width, **kwargs):
        super().__init__(**kwargs)
        self.length, self.words, self.width = length, words, width
        self.tokens = layers.Embedding(words, width)
        self.positions = layers.Embedding(length, width)

    def build(self, input_shape):
        self.tokens.build(input_shape)
        self.positions.build((None,))

    def call(self, inputs):
        positions = ops.arange(0, ops.shape(inputs)[-1], 1)
        return self.tokens(inputs) + self.positions(positions)

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)

    def get_config(self):
        names = ("length", "words", "width")
        return {**super().get_config(), **{n: getattr(self, n) for n in names}}


class Block(layers.Layer):
    """What encoder and decoder share: a width, and a feed-forward part."""

    number_of_norms = 2

    def __init__(self, width, heads, **kwargs):
        super().__init__(**kwargs)
        self.width, self.heads = width, heads
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(heads, width)
        self.feed_forward = keras.Sequential(
            [layers.Dense(2 * width, activation="relu"), layers.Dense(width)]
        )
        self.norms = [
            layers.LayerNormalization() for _ in range(self.number_of_norms)
        ]

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)
        self.feed_forward.build(input_shape)
        for norm in self.norms:
            norm.build(input_shape)

    def get_config(self):
        mine = {"width": self.width, "heads": self.heads}
        return {**super().get_config(), **mine}


@keras.saving.register_keras_serializable("programs")
class Encoder(Block):
    def call(self, inputs, mask=None):
        x = self.norms[0](inputs + self.attention(inputs, inputs))
        return self.norms[1](x + self.feed_forward(x))


@keras.saving.register_keras_serializable("programs")
class Decoder(Block):
    number_of_norms = 3

    def __init__(self, width, heads, **kwargs):
        super().__init__(width, heads, **kwargs)
        self.cross = layers.MultiHeadAttention(heads, width)

    def build(self, input_shape):
        super().build(input_shape)
        self.cross.build(input_shape, input_shape)

    def call(self, inputs, encoded, mask=None):
        attended = self.attention(inputs, inputs, use_causal_mask=True)
        x = self.norms[0](inputs + attended)
        x = self.norms[1](x + self.cross(x, encoded))
        return self.norms[2](x + self.feed_forward(x))


def make():
    keras.utils.set_random_seed(0)
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    encoded = PositionalEmbedding(LENGTH, WORDS, WIDTH)(source)
    encoded = Encoder(WIDTH, 2)(encoded)
    x = PositionalEmbedding(LENGTH, WORDS, WIDTH)(target)
    x = Decoder(WIDTH, 2)(x, encoded)
    logits = layers.Dense(WORDS)(x)
    model = keras.Model({"source": source, "target": target}, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=0
    )
    model.compile("rmsprop", loss, jit_compile=JIT)
    return model


def sentences():
    source = integers(WORDS, 16, LENGTH)
    target = source[:, ::-1].copy()
    return {"source": source, "target": target}, target


def train(model):
    return fit(model, *sentences())


def predict(model):
    return predicted(model, sentences()[0])
