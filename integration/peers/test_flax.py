"""Flax's delayed scaling, step by step on the same numbers."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from comparing import SHAPES, error, numbers
from flax import linen
from flax.linen import fp8_ops
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.recipes import OPERANDS
from steps import gradients, numpy, state_of

STATE = "_overwrite_with_gradient"
NAMES = {"inputs": "input", "kernel": "kernel", "outputs_grad": "output_grad"}
HISTORY, STEPS, RATE = 1024, 12, 0.05


def mean_square(y, target):
    return ((y - target) ** 2).mean()


class OfFlax:
    """A Dense of Flax without bias, trained by gradient descent."""

    def __init__(self, kernel):
        self.dense = linen.Dense(
            kernel.shape[1],
            use_bias=False,
            dtype=jnp.float32,
            dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
        )
        like = jnp.zeros((1, len(kernel)))
        self.variables = dict(self.dense.init(jax.random.PRNGKey(0), like))
        self.variables["params"] = {"kernel": jnp.asarray(kernel)}
        self.step = jax.jit(self._step)

    def train(self, x, target):
        """The loss of a step, and the state after it."""
        value, self.variables = self.step(self.variables, x, target)
        return float(value), jax.tree.leaves_with_path(self.variables[STATE])

    def _step(self, variables, x, target):
        def loss(variables):
            return mean_square(self.dense.apply(variables, x), target)

        value, grads = jax.value_and_grad(loss)(variables)
        params = jax.tree.map(
            lambda w, g: w - RATE * g, variables["params"], grads["params"]
        )
        return value, {"params": params, STATE: grads[STATE]}


def told_by_flax(state, operand, what):
    (found,) = (
        np.asarray(value, "float32").ravel()
        for path, value in state
        if f"{NAMES[operand]}_{what}" in jax.tree_util.keystr(path)
    )
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_training_by_delayed_scaling(shape, seed):
    """Sums in another order now and then change a code, and so a loss."""
    rows, inputs, units = SHAPES[shape]
    kernel = numbers((inputs, units), seed) / np.sqrt(inputs)
    theirs = OfFlax(kernel)
    recipe = kpe.recipes.DelayedScaling(
        amax_history_length=HISTORY, initial_scale=1.0
    )
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    ours = kpe.layers.Dense(units, use_bias=False, dtype=policy)
    ours.build((None, inputs))
    ours.kernel.assign(kernel)
    optimizer = keras.optimizers.SGD(RATE)
    for number in range(STEPS):
        x = numbers((rows, inputs), 10 * seed + number, spread=number % 4)
        target = numbers((rows, units), 100 + number)
        expected, state = theirs.train(x, target)
        y, _, grads = gradients(
            ours, x, lambda y, t=target: ops.mean(ops.square(y - t))
        )
        optimizer.apply(grads, ours.trainable_variables)
        found = mean_square(numpy(y), target)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        for operand in OPERANDS:
            scale, history = state_of(ours)[operand]
            wanted = told_by_flax(state, operand, "scale")
            np.testing.assert_allclose(scale, wanted[0], rtol=1e-4)
            wanted = told_by_flax(state, operand, "amax_history")
            assert error(np.sort(history), np.sort(wanted)) <= 1e-4
    weights = np.asarray(theirs.variables["params"]["kernel"])
    assert error(numpy(ours.kernel), weights) <= 1e-4
