"""Amaxes that nobody needs are never computed."""

import itertools

import numpy as np
import pytest
from keras import ops

from contracting import dense, observe, policy, weighted
from keras_policy_ext.numerics import scaling
from keras_policy_ext.recipes import DelayedScaling
from steps import gradients, normal
from ways import (
    BACKEND,
    FASTEST,
    compiled,
)


class Count:
    """Counts executions, inside compiled branches too."""

    def __init__(self):
        self.value = 0

    def increment(self):
        """Count one execution where this is traced or run."""
        if BACKEND == "jax":
            import jax

            jax.debug.callback(self._add)
        elif BACKEND == "tensorflow":
            import tensorflow as tf

            tf.numpy_function(self._add, [], tf.int64)
        else:
            self._add()

    def _add(self):
        self.value += 1
        return np.int64(self.value)

    def taken(self):
        """The number of executions since the last call."""
        if BACKEND == "jax":
            import jax

            jax.effects_barrier()
        taken, self.value = self.value, 0
        return taken


@pytest.fixture
def amaxes(monkeypatch):
    """Counts the amaxes that are computed, not those that are traced."""
    count, amax = Count(), scaling.amax

    def counted(*args, **kwargs):
        count.increment()
        return amax(*args, **kwargs)

    monkeypatch.setattr(scaling, "amax", counted)
    return count


_sizes = itertools.count(11)


def counted_layer():
    """A layer whose size was never traced, and its recipe never bound."""
    size = next(_sizes)
    recipe = DelayedScaling(amax_history_length=size)
    return dense(size, size, policy(recipe=recipe)), normal(size, size)


def compiled_call(layer):
    """`layer(x, training=False)` as `predict` runs it."""
    return compiled(lambda x: layer(x, training=False), FASTEST)


@pytest.mark.full
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_inference_with_a_delayed_recipe_computes_no_amax(amaxes, how):
    layer, x = counted_layer()

    def predict():
        call = compiled_call(layer) if how == "compiled" else layer
        tensor = ops.convert_to_tensor(x)
        return (
            call(tensor) if how == "compiled" else call(tensor, training=False)
        )

    predict()
    assert amaxes.taken() == 2  # nothing was observed: inputs and kernel
    for _ in range(2):
        observe(layer, x, x)
        assert amaxes.taken() == 3  # inputs, kernel and gradient, once each
    predict()
    assert amaxes.taken() == 0


@pytest.mark.full
def test_a_gradient_without_training_computes_one_amax_that_of_the_kernel(
    amaxes,
):
    layer, x = counted_layer()
    observe(layer, x, x)
    amaxes.taken()
    gradients(layer, x, weighted(x), training=False, compiled=True)
    assert amaxes.taken() == 1
