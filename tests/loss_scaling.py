"""Custom training loops with a loss scaler, written once for every backend."""

import keras
import numpy as np
from keras import ops

import keras_policy_ext as kpe
from steps import numpy

BACKEND = keras.backend.backend()


def sgd(learning_rate=1.0, **kwargs):
    return keras.optimizers.SGD(learning_rate, **kwargs)


def tensors(*values):
    return [ops.convert_to_tensor(np.float32(value)) for value in values]


def float8_layer():
    policy = kpe.Float8DTypePolicy("mixed_float16", amax_history_length=2)
    layer = kpe.layers.Dense(2, dtype=policy)
    layer.build((None, 3))
    layer.kernel.assign(np.arange(6.0, dtype="float32").reshape(3, 2) - 2.5)
    return layer


def observation(layer, amax):
    """What a step observes: one use, the same amax for each operand."""
    from keras_policy_ext.ext.delayed.observations import UNIT

    (state,) = layer.float8_state.matrices
    matrix = np.zeros(tuple(state.shape), "float32")
    matrix[:, :2] = UNIT, UNIT * amax
    return ops.convert_to_tensor(matrix)


def steps(optimizer, variable, factors, compiled=False, scale=None):
    """A step for each factor, with the loss `factor * variable`.

    Args:
        optimizer: A loss scaler.
        variable: A scalar.
        factors: Numbers.
        compiled: Whether a compiler sees the step.
        scale: What scales a loss; None for `optimizer.scale_loss`.

    Returns:
        The loss scales and the values of the variable after each step.
    """
    if not optimizer.built:
        optimizer.build([variable])
    step = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[BACKEND](
        optimizer, variable, compiled, scale or optimizer.scale_loss
    )
    scales, values = [], []
    for factor in factors:
        step(ops.convert_to_tensor(np.float32(factor)))
        scales.append(float(optimizer.loss_scale))
        values.append(float(numpy(variable)))
    return scales, values


def scaled_gradient(optimizer, variable, loss):
    """The gradient of the scaled `loss(variable)`, eagerly."""
    scale = optimizer.get_scaled_loss
    if BACKEND == "jax":
        import jax

        return jax.grad(lambda v: scale(loss(v)))(variable.value)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = scale(loss(variable))
        return tape.gradient(value, variable.value)
    variable.value.grad = None
    scale(loss(variable)).backward()
    return variable.value.grad


def _jax(optimizer, variable, compiled, scale):
    import jax

    def eager(factor):
        gradient = jax.grad(lambda v: scale(factor * v))
        optimizer.apply([gradient(variable.value)], [variable])

    def stateless(value, own, factor):
        def loss(value):
            mapping = list(zip(optimizer.variables, own, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return scale(factor * value)

        gradient = jax.grad(loss)(value)
        (value,), own = optimizer.stateless_apply(own, [gradient], [value])
        return value, own

    jitted = jax.jit(stateless)

    def step(factor):
        own = [v.value for v in optimizer.variables]
        value, own = jitted(variable.value, own, factor)
        variable.assign(value)
        for v, new in zip(optimizer.variables, own, strict=True):
            v.assign(new)

    return step if compiled else eager


def _tensorflow(optimizer, variable, compiled, scale):
    import tensorflow as tf

    def step(factor):
        with tf.GradientTape() as tape:
            loss = scale(factor * variable)
        gradient = tape.gradient(loss, variable.value)
        optimizer.apply([gradient], [variable])

    return tf.function(step) if compiled else step


def _torch(optimizer, variable, compiled, scale):
    import torch

    def step(factor):
        variable.value.grad = None
        scale(factor * variable.value).backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad], [variable])

    # Dynamo's graph and its breaks; a C++ compiler would add nothing here.
    return torch.compile(step, backend="eager") if compiled else step
