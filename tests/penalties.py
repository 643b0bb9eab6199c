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


def loss_and_gradients(model, loss):
    """A function of a batch: a loss, and its gradients by trained variables.

    Args:
        model: A built layer or model.
        loss: Function of what calls the model in training and of the tensors
            of a batch, to a scalar. It may ask for `slopes`.
    """
    run = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}
    return run[BACKEND](model, loss)


def _jax(model, loss):
    import jax

    def of_values(values, others, batch):
        def call(x):
            outputs, _ = model.stateless_call(values, others, x, training=True)
            return outputs

        return loss(call, *batch)

    both = jax.jit(jax.value_and_grad(of_values))

    def of_batch(*batch):
        trained, others = (
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
            )
        )
        return both(trained, others, batch)

    return of_batch


def _tensorflow(model, loss):
    import tensorflow as tf

    @tf.function(autograph=False)
    def of_batch(*batch):
        trained = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            value = loss(lambda x: model(x, training=True), *batch)
        return value, tape.gradient(value, trained)

    return of_batch


def _torch(model, loss):
    def of_batch(*batch):
        trained = [v.value for v in model.trainable_variables]
        for parameter in trained:
            parameter.grad = None
        value = loss(lambda x: model(x, training=True), *batch)
        value.backward()
        return value.detach(), [parameter.grad for parameter in trained]

    return of_batch


def steepness(call, x):
    """By how much the norms of the gradients by examples differ from 1.

    The penalty of WGAN-GP, as in its example on keras.io.
    """
    (slope,) = slopes(lambda x: ops.sum(call(x)), x)
    flat = ops.reshape(slope, (slope.shape[0], -1))
    norms = ops.sqrt(ops.sum(ops.square(flat), axis=1) + 1e-12)
    return ops.mean(ops.square(norms - 1.0))
