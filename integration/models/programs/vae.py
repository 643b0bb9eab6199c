"""Variational autoencoder: an encoder, a decoder, a step, and no `call`."""

import keras
from keras import layers, ops

from programs.custom_steps import OneLoss
from programs.data import JIT, fit, images
from programs.data import predict as predicted

LATENT = 2


@keras.saving.register_keras_serializable("programs")
class Sampling(layers.Layer):
    """Uses (mean, log variance) to sample a code."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * noise


def encoder():
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, 2, "same", activation="relu")(inputs)
    x = layers.Flatten()(x)
    x = layers.Dense(16, activation="relu")(x)
    mean = layers.Dense(LATENT, name="mean")(x)
    log_var = layers.Dense(LATENT, name="log_var")(x)
    code = Sampling()([mean, log_var])
    return keras.Model(inputs, [mean, log_var, code], name="encoder")


def decoder():
    inputs = keras.Input((LATENT,))
    x = layers.Dense(4 * 4 * 4, activation="relu")(inputs)
    x = layers.Reshape((4, 4, 4))(x)
    x = layers.Conv2DTranspose(4, 3, 2, "same", activation="relu")(x)
    outputs = layers.Conv2D(1, 3, 1, "same", activation="sigmoid")(x)
    return keras.Model(inputs, outputs, name="decoder")


@keras.saving.register_keras_serializable("programs")
class VAE(OneLoss):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "encoder": serialize(self.encoder),
            "decoder": serialize(self.decoder),
        }

    @classmethod
    def from_config(cls, config):
        for name in ("encoder", "decoder"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)

    def batch_loss(self, data):
        mean, log_var, code = self.encoder(data, training=True)
        again = self.decoder(code, training=True)
        missed = keras.losses.binary_crossentropy(data, again)
        reconstruction = ops.mean(ops.sum(missed, axis=(1, 2)))
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        return reconstruction + ops.mean(ops.sum(kl, axis=1))


def make():
    keras.utils.set_random_seed(0)
    vae = VAE(encoder(), decoder())
    vae.compile(keras.optimizers.Adam(), jit_compile=JIT)
    return vae


def train(vae):
    x, _ = images()
    return fit(vae, x.clip(0, 1))


def predict(vae):
    x, _ = images()
    mean, _, _ = vae.encoder.predict(x, verbose=0)
    return predicted(vae.decoder, mean)
