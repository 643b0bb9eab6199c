"""A loop of its own that adds gradients up before each update."""

import keras
from keras import layers, ops

from programs.data import integers
from programs.data import predict as predicted

KERAS_COMPILES = False  # Its optimizer is its own.
BACKEND = keras.backend.backend()
EVERY = 2
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(12, 8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(8, activation="relu"),
            layers.Dense(3),
        ]
    )
    model.optimizer = keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=EVERY
    )
    return model


def batches():
    x = integers(12, 32, 6)
    y = x[:, 0] // 4
    return [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]


def train(model):
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    loops = {"jax": in_jax, "tensorflow": in_tensorflow, "torch": in_torch}
    return loops[BACKEND](model, 2 * batches())


def in_torch(model, data):
    import torch

    losses = []
    for x, y in data:
        logits = model(x, training=True)
        loss = loss_fn(ops.convert_to_tensor(y), logits)
        model.zero_grad()
        loss.backward()
        weights = model.trainable_weights
        with torch.no_grad():
            model.optimizer.apply([w.value.grad for w in weights], weights)
        losses.append(float(loss.detach()))
    return losses


def in_tensorflow(model, data):
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        weights = model.trainable_weights
        gradients = tape.gradient(loss, weights)
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return [float(step(x, y)) for x, y in data]


def in_jax(model, data):
    import jax

    def loss_of(trainable, fixed, x, y):
        logits, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return loss_fn(y, logits), fixed

    differentiate = jax.value_and_grad(loss_of, has_aux=True)

    @jax.jit
    def step(state, x, y):
        trainable, fixed, slots = state
        (loss, fixed), gradients = differentiate(trainable, fixed, x, y)
        trainable, slots = model.optimizer.stateless_apply(
            slots, gradients, trainable
        )
        return loss, (trainable, fixed, slots)

    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
    )
    state, losses = tuple([v.value for v in each] for each in variables), []
    for x, y in data:
        loss, state = step(state, x, y)
        losses.append(float(loss))
    for held, values in zip(variables, state, strict=True):
        for variable, value in zip(held, values, strict=True):
            variable.assign(value)
    return losses


def predict(model):
    return predicted(model, integers(12, 16, 6, seed=1))
