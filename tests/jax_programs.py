"""Programs of JAX that tests compile and read."""

import jax
import jax.numpy as jnp


def gradient_step(model):
    """A function of weights and inputs, and the weights of a model.

    Args:
        model: A built model, all of whose variables are trainable.

    Returns:
        The function, which gives the gradients of the sum of squares of the
        outputs, in training; and the values of the variables.
    """

    def step(weights, x):
        def total(weights):
            outputs, _ = model.stateless_call(weights, [], x, training=True)
            return jnp.sum(outputs.astype("float32") ** 2)

        return jax.grad(total)(weights)

    return step, [v.value for v in model.trainable_variables]
