"""Training steps of an optimizer that is not Keras's."""

import keras
import numpy as np

import keras_policy_ext as kpe
from keras_policy_ext.layers.stored_weights import is_state
from steps import gradients, mean_square, no_grad, normal, numpy

BACKEND = keras.backend.backend()
RATE = 2.0**-4  # A power of two: its product with a gradient is exact.


def batches(count=4):
    return [normal(8, 8, seed=seed) * (1 + seed) for seed in range(count)]


def network(recipe="delayed(amax_history_length=4)"):
    keras.utils.set_random_seed(0)
    dtype = kpe.Float8DTypePolicy("float32", recipe=recipe)
    return keras.Sequential(
        [
            keras.Input((8,)),
            kpe.layers.Dense(16, "relu", dtype=dtype),
            kpe.layers.Dense(4, dtype=dtype),
        ]
    )


def gradients_of(model, x):
    if BACKEND != "jax":
        return gradients(model, x, mean_square)[2]
    import jax

    if "gradients" not in model.__dict__:  # compiled once for each model

        def loss(values, fixed, x):
            y, _ = model.stateless_call(values, fixed, x, training=True)
            return mean_square(y)

        model.__dict__["gradients"] = jax.jit(jax.grad(loss))
    values = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    return model.__dict__["gradients"](values, fixed, x)


def update_weights(model, grads):
    with no_grad():
        for v, g in zip(model.trainable_variables, grads, strict=True):
            if not is_state(v):
                v.assign(v.value - RATE * g)


def values_of(model):
    return [numpy(v) for v in model.weights]


def states_of(model):
    return [numpy(v) for v in model.weights if is_state(v)]


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def trained_by_keras(xs):
    model, optimizer = network(), keras.optimizers.SGD(RATE)
    for x in xs:
        grads = gradients_of(model, x)
        with no_grad():
            optimizer.apply(grads, model.trainable_variables)
    return model


def states_variable(model):
    return model.layers[0].float8_state.matrices[0]
