"""MLP-Mixer: blocks that transpose, and a stem that is a convolution."""

import keras
from keras import layers, ops

from programs.data import JIT, fit, images
from programs.data import predict as predicted

PATCHES, WIDTH = 16, 8


@keras.saving.register_keras_serializable("programs")
class MixerBlock(layers.Layer):
    def __init__(self, patches, width, **kwargs):
        super().__init__(**kwargs)
        self.patches, self.width = patches, width
        self.tokens = self.mlp(patches)
        self.channels = self.mlp(width)
        self.norms = [layers.LayerNormalization() for _ in range(2)]

    def mlp(self, units):
        return keras.Sequential(
            [layers.Dense(2 * units, activation="gelu"), layers.Dense(units)]
        )

    def build(self, input_shape):
        self.tokens.build((None, self.width, self.patches))
        self.channels.build(input_shape)
        for norm in self.norms:
            norm.build(input_shape)

    def call(self, inputs):
        x = ops.transpose(self.norms[0](inputs), (0, 2, 1))
        x = inputs + ops.transpose(self.tokens(x), (0, 2, 1))
        return x + self.channels(self.norms[1](x))

    def get_config(self):
        mine = {"patches": self.patches, "width": self.width}
        return {**super().get_config(), **mine}


def make():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(WIDTH, 2, strides=2),
            layers.Reshape((PATCHES, WIDTH)),
            MixerBlock(PATCHES, WIDTH),
            layers.GlobalAveragePooling1D(),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, jit_compile=JIT)
    return model


def train(model):
    return fit(model, *images())


def predict(model):
    return predicted(model, images()[0])
