"""Actor and critic with a common trunk, in a loop over a toy game."""

import keras
import numpy as np
from keras import layers, ops

from programs.data import normal

KERAS_COMPILES = False  # Its optimizer is its own.
BACKEND = keras.backend.backend()
GAMMA, STEPS, ACTIONS = 0.9, 6, 2


def make():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    common = layers.Dense(16, activation="relu")(inputs)
    action = layers.Dense(ACTIONS, activation="softmax")(common)
    critic = layers.Dense(1)(common)
    model = keras.Model(inputs=inputs, outputs=[action, critic])
    model.optimizer = keras.optimizers.Adam(0.01)
    return model


def episode(model, rng):
    """States, actions that the model chose, and the sums of later rewards."""
    state, states, actions, rewards = rng.normal(size=4), [], [], []
    for _ in range(STEPS):
        probabilities = predict_one(model, state)
        action = int(rng.random() > probabilities[0])
        states.append(state)
        actions.append(action)
        rewards.append(1.0 if (state[0] > 0) == bool(action) else -1.0)
        state = rng.normal(size=4)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + GAMMA * total
        returns.insert(0, total)
    as_floats = [np.array(x, "float32") for x in (states, returns)]
    return as_floats[0], np.array(actions, "int32"), as_floats[1]


def predict_one(model, state):
    state = ops.convert_to_tensor(state[None].astype("float32"))
    return ops.convert_to_numpy(ops.stop_gradient(model(state)[0]))[0]


def loss_of(outputs, actions, returns):
    probabilities, values = outputs
    values = ops.squeeze(values, -1)
    chosen = ops.sum(probabilities * ops.one_hot(actions, ACTIONS), axis=-1)
    advantage = ops.stop_gradient(returns - values)
    huber = keras.losses.huber(returns[:, None], values[:, None])
    return ops.sum(-ops.log(chosen) * advantage) + ops.sum(huber)


def train(model):
    rng = np.random.default_rng(0)
    steps = {"jax": in_jax, "tensorflow": in_tensorflow, "torch": in_torch}
    step = steps[BACKEND](model)
    return [float(step(*episode(model, rng))) for _ in range(3)]


def in_torch(model):
    import torch

    def step(states, actions, returns):
        model.zero_grad()
        states, actions, returns = map(
            ops.convert_to_tensor, (states, actions, returns)
        )
        loss = loss_of(model(states, training=True), actions, returns)
        loss.backward()
        weights = model.trainable_variables
        with torch.no_grad():
            model.optimizer.apply([w.value.grad for w in weights], weights)
        return loss.detach()

    return step


def in_tensorflow(model):
    import tensorflow as tf

    def step(states, actions, returns):
        with tf.GradientTape() as tape:
            outputs = model(states, training=True)
            loss = loss_of(outputs, actions, ops.convert_to_tensor(returns))
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return step


def in_jax(model):
    import jax

    @jax.jit
    def gradients_of(trainable, fixed, states, actions, returns):
        def loss(trainable):
            outputs, _ = model.stateless_call(
                trainable, fixed, states, training=True
            )
            return loss_of(outputs, actions, returns)

        return jax.value_and_grad(loss)(trainable)

    def step(*data):
        trainable = [v.value for v in model.trainable_variables]
        fixed = [v.value for v in model.non_trainable_variables]
        loss, gradients = gradients_of(trainable, fixed, *data)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def predict(model):
    return np.stack([predict_one(model, state) for state in normal(4, 4)])
