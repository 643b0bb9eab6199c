"""Layers that contract, and one training step of them."""

from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.recipes import CurrentScaling
from steps import gradients, no_grad, numpy

FLOAT32_TOLERANCE = 1e-6
"""Relative RMS of a float32 result against one accumulated in float64."""


def policy(source="float32", recipe=None):
    return kpe.Float8DTypePolicy(source, recipe=recipe or CurrentScaling())


def run_layer(layer, x, g, compiled=True):
    """`(y, dx, dkernel)` for the output gradient `g`, as NumPy arrays."""
    y, dx, grads = gradients(layer, x, weighted(g), compiled=compiled)
    return numpy_of_any(y), numpy_of_any(dx), numpy_of_any(grads[0])


def weighted(g):
    """A loss whose gradient for the outputs is `g`."""
    g = ops.convert_to_tensor(g)
    return lambda y: ops.sum(ops.multiply(ops.cast(y, "float32"), g))


def observe(layer, x, g, training=True):
    """A training step that changes the float8 state and no weight."""
    _, _, grads = gradients(layer, x, weighted(g), training, compiled=True)
    variables = layer.trainable_variables
    with no_grad():
        variables[-1].assign(grads[-1])
    assert variables[-1] in layer.float8_state.matrices


def numpy_of_any(x):
    return numpy(ops.cast(x, "float32"))


def dense(units, inputs, dtype=None, **kwargs):
    layer = kpe.layers.Dense(units, dtype=dtype or policy(), **kwargs)
    layer.build((None, inputs))
    return layer


RECIPES = {
    "hybrid": CurrentScaling(),
    "e4m3": CurrentScaling(fp8_format="e4m3"),
    "power_of_two": CurrentScaling(power_of_two=True),
    "hybrid_fnuz": CurrentScaling(fp8_format="hybrid_fnuz"),
}
