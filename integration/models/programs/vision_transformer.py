"""ViT: patches, an encoder of them, and attention with a residual."""

import keras
from keras import layers, ops

from programs.data import JIT, fit, images
from programs.data import predict as predicted

SIZE, WIDTH = 4, 8


@keras.saving.register_keras_serializable("programs")
class Patches(layers.Layer):
    def __init__(self, patch_size, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size

    def call(self, images):
        patches = ops.image.extract_patches(images, size=self.patch_size)
        shape = ops.shape(patches)
        return ops.reshape(patches, (shape[0], -1, shape[-1]))

    def get_config(self):
        return {**super().get_config(), "patch_size": self.patch_size}


@keras.saving.register_keras_serializable("programs")
class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim, **kwargs):
        super().__init__(**kwargs)
        self.num_patches = num_patches
        self.projection = layers.Dense(projection_dim)
        self.position_embedding = layers.Embedding(num_patches, projection_dim)

    def build(self, input_shape):
        self.projection.build(input_shape)
        self.position_embedding.build((None,))

    def call(self, patch):
        positions = ops.arange(0, self.num_patches, 1)
        return self.projection(patch) + self.position_embedding(positions)

    def get_config(self):
        return {
            **super().get_config(),
            "num_patches": self.num_patches,
            "projection_dim": self.projection.units,
        }


def make():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    encoded = PatchEncoder(4, WIDTH)(Patches(SIZE)(inputs))
    x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
    attended = layers.MultiHeadAttention(2, WIDTH, dropout=0.1, seed=1)(x1, x1)
    x2 = layers.Add()([attended, encoded])
    x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
    x3 = layers.Dense(2 * WIDTH, activation=keras.activations.gelu)(x3)
    x3 = layers.Dense(WIDTH, activation=keras.activations.gelu)(x3)
    x = layers.Add()([x3, x2])
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    logits = layers.Dense(4)(layers.Dropout(0.1, seed=2)(x))
    model = keras.Model(inputs, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, jit_compile=JIT)
    return model


def train(model):
    return fit(model, *images())


def predict(model):
    return predicted(model, images()[0])
