"""Text classification with a transformer block that makes its own layers."""

import keras
from keras import layers, ops

from programs.data import JIT, fit, integers
from programs.data import predict as predicted

WORDS, LENGTH, WIDTH = 20, 8, 8


@keras.saving.register_keras_serializable("programs")
class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.settings = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "ff_dim": ff_dim,
            "rate": rate,
        }
        self.att = layers.MultiHeadAttention(num_heads, embed_dim)
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate, seed=1)
        self.dropout2 = layers.Dropout(rate, seed=2)

    def build(self, input_shape):
        self.att.build(input_shape, input_shape)
        self.ffn.build(input_shape)
        self.layernorm1.build(input_shape)
        self.layernorm2.build(input_shape)

    def call(self, inputs, training=None):
        attended = self.att(inputs, inputs)
        attended = self.dropout1(attended, training=training)
        x = self.layernorm1(inputs + attended)
        forward = self.dropout2(self.ffn(x), training=training)
        return self.layernorm2(x + forward)

    def get_config(self):
        return {**super().get_config(), **self.settings}


@keras.saving.register_keras_serializable("programs")
class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim, **kwargs):
        super().__init__(**kwargs)
        self.settings = {
            "maxlen": maxlen,
            "vocab_size": vocab_size,
            "embed_dim": embed_dim,
        }
        self.token_emb = layers.Embedding(vocab_size, embed_dim)
        self.pos_emb = layers.Embedding(maxlen, embed_dim)

    def build(self, input_shape):
        self.token_emb.build(input_shape)
        self.pos_emb.build((None,))

    def call(self, x):
        positions = ops.arange(0, ops.shape(x)[-1], 1)
        return self.token_emb(x) + self.pos_emb(positions)

    def get_config(self):
        return {**super().get_config(), **self.settings}


def make():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TokenAndPositionEmbedding(LENGTH, WORDS, WIDTH)(inputs)
    x = TransformerBlock(WIDTH, 2, 16)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.1, seed=3)(x)
    x = layers.Dense(8, activation="relu")(x)
    outputs = layers.Dense(2, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=JIT)
    return model


def train(model):
    x = integers(WORDS, 16, LENGTH)
    return fit(model, x, (x[:, 0] > WORDS // 2).astype("int32"))


def predict(model):
    return predicted(model, integers(WORDS, 16, LENGTH))
