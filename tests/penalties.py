"""Gradients that can be differentiated, written once for every backend."""

import keras
from keras import ops

BACKEND = keras.backend.backend()


def slopes(function, *tensors):
    """The gradients of a scalar function by each tensor.

    Inside of a function that is differentiated they are differentiated too.
    """
    if BACKEND == "jax":
        import jax

        return jax.grad(function, argnums=tuple(range(len(tensors))))(*tensors)
    if BACKEND == "torch":
        import torch

        tensors = [_watched(x) for x in tensors]
        return torch.autograd.grad(
            function(*tensors), tensors, create_graph=True, allow_unused=True
        )
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value = function(*tensors)
    return tape.gradient(value, tensors)


def _watched(x):
    return x if x.requires_grad else x.detach().requires_grad_()


def loss_and_gradients(model, loss, compiled=True):
    """A loss and its gradients by the trainable variables of a model.

    Args:
        model: A built layer or model.
        loss: A function of what calls the model in training, to a scalar. It
            may ask for `slopes`.
        compiled: Whether by XLA on JAX, and as a graph on TensorFlow.
    """
    variables = model.trainable_variables
    if BACKEND == "torch":
        for variable in variables:
            variable.value.grad = None
        value = loss(lambda x: model(x, training=True))
        value.backward()
        return value.detach(), [v.value.grad for v in variables]
    run = {"jax": _jax, "tensorflow": _tensorflow}[BACKEND]
    return run(model, variables, loss, compiled)


def _jax(model, variables, loss, compiled):
    import jax

    others = [v.value for v in model.non_trainable_variables]

    def of_values(values):
        def call(x):
            outputs, _ = model.stateless_call(values, others, x, training=True)
            return outputs

        return loss(call)

    both = jax.value_and_grad(of_values)
    both = jax.jit(both) if compiled else both
    return both([v.value for v in variables])


def _tensorflow(model, variables, loss, compiled):
    import tensorflow as tf

    def both():
        with tf.GradientTape() as tape:
            value = loss(lambda x: model(x, training=True))
        return value, tape.gradient(value, [v.value for v in variables])

    return (tf.function(both) if compiled else both)()


def steepness(call, x):
    """By how much the norms of the gradients by examples differ from 1.

    The penalty of WGAN-GP, as in its example on keras.io.
    """
    (slope,) = slopes(lambda x: ops.sum(call(x)), x)
    flat = ops.reshape(slope, (slope.shape[0], -1))
    norms = ops.sqrt(ops.sum(ops.square(flat), axis=1) + 1e-12)
    return ops.mean(ops.square(norms - 1.0))
