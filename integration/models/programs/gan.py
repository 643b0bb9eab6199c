"""DCGAN: two parts, two optimizers given to `compile`, two losses in a step.

On JAX the two optimizers do not fit into the state that `fit` hands on; there
the loop is written out, as the guide to loops in JAX has it.
"""

import keras
import numpy as np
from keras import layers, ops

from programs.data import images, normal

KERAS_COMPILES = False
LATENT = 8
BACKEND = keras.backend.backend()


def generator():
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 4),
            layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ],
        name="generator",
    )


def discriminator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2, seed=1),
            layers.Dense(1),
        ],
        name="discriminator",
    )


@keras.saving.register_keras_serializable("programs")
class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim, **kwargs):
        super().__init__(**kwargs)
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.built = True  # Else `fit` calls it on PyTorch, to build it.

    def compile(self, d_optimizer, g_optimizer, loss_fn, **kwargs):
        super().compile(**kwargs)
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "discriminator": serialize(self.discriminator),
            "generator": serialize(self.generator),
            "latent_dim": self.latent_dim,
        }

    @classmethod
    def from_config(cls, config):
        for name in ("discriminator", "generator"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)

    def noise(self, count):
        return keras.random.normal(
            (count, self.latent_dim), seed=self.seed_generator
        )

    def d_loss(self, real):
        count = ops.shape(real)[0]
        fake = self.generator(self.noise(count))
        guesses = self.discriminator(
            ops.concatenate([fake, real]), training=True
        )
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))])
        return self.loss_fn(labels, guesses)

    def g_loss(self, real):
        count = ops.shape(real)[0]
        fake = self.generator(self.noise(count), training=True)
        return self.loss_fn(ops.zeros((count, 1)), self.discriminator(fake))

    def turns(self):
        """Whose turn it is, by which loss, and who moves."""
        return [
            (self.d_optimizer, self.d_loss, self.discriminator),
            (self.g_optimizer, self.g_loss, self.generator),
        ]

    def train_step(self, real):
        losses = {}
        for optimizer, loss_of, part in self.turns():
            loss = self.descend(optimizer, loss_of, part, real)
            losses[f"{part.name}_loss"] = loss
        return {**losses, "loss": sum(losses.values())}

    def descend(self, optimizer, loss_of, part, real):
        if BACKEND == "torch":
            import torch

            self.zero_grad()
            loss = loss_of(real)
            loss.backward()
            weights = part.trainable_weights
            with torch.no_grad():
                optimizer.apply([w.value.grad for w in weights], weights)
            return loss.detach()
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of(real)
        weights = part.trainable_weights
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss


def step_in_jax(gan):
    """A compiled step of values in, values and losses out."""
    import jax

    everything = [
        *gan.variables,
        *gan.d_optimizer.variables,
        *gan.g_optimizer.variables,
    ]

    def turn(values, optimizer, loss_of, part, real):
        weights = part.trainable_variables
        numbers = {id(v): i for i, v in enumerate(everything)}
        places = [numbers[id(v)] for v in weights]

        def run(moving):
            mapping = [
                *zip(everything, values, strict=True),
                *zip(weights, moving, strict=True),
            ]
            with keras.StatelessScope(mapping) as scope:
                loss = loss_of(real)
            seed = gan.seed_generator.state
            return loss, scope.get_current_value(seed)

        differentiate = jax.value_and_grad(run, has_aux=True)
        (loss, seed), gradients = differentiate([values[i] for i in places])
        mapping = zip(everything, values, strict=True)
        with keras.StatelessScope(mapping) as scope:
            optimizer.apply(gradients, weights)
            gan.seed_generator.state.assign(seed)
        return loss, [scope.get_current_value(v) for v in everything]

    @jax.jit
    def step(values, real):
        total = 0.0
        for optimizer, loss_of, part in gan.turns():
            loss, values = turn(values, optimizer, loss_of, part, real)
            total = total + loss
        return total, values

    return everything, step


def train_in_jax(gan, batches):
    for optimizer, _, part in gan.turns():
        if not optimizer.built:
            optimizer.build(part.trainable_variables)
    everything, step = step_in_jax(gan)
    values, losses = [v.value for v in everything], []
    for real in batches:
        loss, values = step(values, real)
        losses.append(float(loss))
    for variable, value in zip(everything, values, strict=True):
        variable.assign(value)
    return losses


def make():
    keras.utils.set_random_seed(0)
    gan = GAN(discriminator(), generator(), LATENT)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(3e-4),
        g_optimizer=keras.optimizers.Adam(3e-4),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return gan


def train(gan):
    x, _ = images()
    if BACKEND == "jax":
        return train_in_jax(gan, 2 * [x[:8], x[8:]])
    history = gan.fit(x, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return history.history["loss"]


def predict(gan):
    fake = gan.generator.predict(normal(4, LATENT), verbose=0)
    return np.ravel(gan.discriminator.predict(fake, verbose=0))
