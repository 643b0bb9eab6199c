"""Denoising diffusion: a U-Net, its moving average, and a step of both."""

import keras
from keras import layers, ops

from programs.custom_steps import OneLoss
from programs.data import JIT, fit, images, normal

SIZE = 8


@keras.saving.register_keras_serializable("programs")
def sinusoidal_embedding(level):
    angles = 6.2831855 * level
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)


def network():
    noisy = keras.Input((SIZE, SIZE, 1))
    level = keras.Input((1, 1, 1))
    embedded = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 2))(
        level
    )
    embedded = layers.UpSampling2D(size=SIZE)(embedded)
    x = layers.Conv2D(4, 1)(noisy)
    x = layers.Concatenate()([x, embedded])
    skip = residual = layers.Conv2D(4, 1)(x)
    x = layers.BatchNormalization(center=False, scale=False)(residual)
    x = layers.Conv2D(4, 3, padding="same", activation="swish")(x)
    x = layers.Add()([x, residual])
    x = layers.AveragePooling2D(2)(x)
    x = layers.UpSampling2D(2, interpolation="nearest")(x)
    x = layers.Concatenate()([x, skip])
    outputs = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([noisy, level], outputs, name="residual_unet")


@keras.saving.register_keras_serializable("programs")
class DiffusionModel(OneLoss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.normalizer = layers.Normalization()
        # Else Keras leaves it out when it loads the model.
        self.normalizer.build((None, SIZE, SIZE, 1))
        self.network = network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.trainable = False
        self.seed_generator = keras.random.SeedGenerator(1)

    def rates(self, times):
        angles = 0.2 + times * 1.35
        return ops.sin(angles), ops.cos(angles)

    def batch_loss(self, data):
        clean = self.normalizer(data)
        shape = ops.shape(clean)
        noises = keras.random.normal(shape, seed=self.seed_generator)
        times = keras.random.uniform(
            (shape[0], 1, 1, 1), seed=self.seed_generator
        )
        noise_rates, signal_rates = self.rates(times)
        noisy = signal_rates * clean + noise_rates * noises
        found = self.network([noisy, noise_rates**2], training=True)
        return ops.mean(ops.absolute(noises - found))

    def after_step(self):
        for weight, average in zip(
            self.network.weights, self.ema_network.weights, strict=True
        ):
            average.assign(0.9 * average + 0.1 * weight)

    def denoise(self, noisy, steps=3):
        for step in range(steps):
            times = ops.full((noisy.shape[0], 1, 1, 1), 1 - step / steps)
            noise_rates, signal_rates = self.rates(times)
            noises = self.ema_network([noisy, noise_rates**2], training=False)
            clean = (noisy - noise_rates * noises) / signal_rates
            noise_rates, signal_rates = self.rates(times - 1 / steps)
            noisy = signal_rates * clean + noise_rates * noises
        return clean


def make():
    keras.utils.set_random_seed(0)
    model = DiffusionModel()
    model.normalizer.adapt(images()[0])
    model.compile(keras.optimizers.AdamW(1e-3), jit_compile=JIT)
    return model


def train(model):
    return fit(model, images()[0])


def predict(model):
    noise = ops.convert_to_tensor(normal(4, SIZE, SIZE, 1))
    return ops.convert_to_numpy(ops.stop_gradient(model.denoise(noise))).ravel()
