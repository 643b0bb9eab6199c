"""The loop of tf_keras: gradients that are unscaled before they are applied."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext.mixed_precision import LossScaleOptimizer
from loss_scaling import (
    BACKEND,
    float8_layer,
    observation,
    scaled_gradient,
    sgd,
    tensors,
)
from steps import no_grad, numpy


def test_the_loop_of_tf_keras_runs():
    variable = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(sgd(0.25))
    for expected in (0.5, 0.25):
        gradient = scaled_gradient(optimizer, variable, lambda v: v * v)
        unscaled = optimizer.get_unscaled_gradients([gradient, None])[:1]
        with no_grad():
            optimizer.get_unscaled_gradients([gradient])
            optimizer.apply_gradients([(unscaled[0], variable)])
        assert float(numpy(variable)) == expected


def test_unscaled_gradients_may_be_changed_before_they_are_applied():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build([variable])
    for expected in (-0.5, -1.0):
        gradients = optimizer.get_unscaled_gradients(tensors(3 * 2.0**15))
        clipped = [ops.minimum(g, 0.5) for g in gradients]
        with no_grad():
            optimizer.apply(clipped, [variable])
        assert float(numpy(variable)) == expected


def test_a_look_at_unscaled_gradients_changes_nothing():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build([variable])
    gradients = tensors(2.0**15)
    assert float(optimizer.get_unscaled_gradients(gradients)[0]) == 1.0
    with no_grad():
        optimizer.apply(gradients, [variable])
    assert float(numpy(variable)) == -1.0
    optimizer.get_unscaled_gradients(gradients)
    optimizer.scale_loss(ops.convert_to_tensor(1.0))  # the next step
    with no_grad():
        optimizer.apply(tensors(2.0**15), [variable])
    assert float(numpy(variable)) == -2.0


def traced_once(function):
    """A function whose Python code runs in its first call only."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    first = function()
    return lambda: first


def test_gradients_unscaled_where_only_a_compiler_saw_it_are_not_again():
    """The function is traced in the first step, and runs in all three."""
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd(), initial_scale=1024)
    optimizer.build([variable])

    def unscaled_gradient():
        loss = optimizer.get_scaled_loss(ops.convert_to_tensor(1.0))
        return optimizer.get_unscaled_gradients([loss])[0]

    step = traced_once(unscaled_gradient)
    for expected in (-1.0, -2.0, -3.0):
        gradient = step()
        with no_grad():
            optimizer.apply([gradient], [variable])
        assert float(numpy(variable)) == expected


def test_gradients_may_be_left_out_once_they_are_unscaled():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd())
    optimizer.build([variable, keras.Variable(0.0)])
    gradients = optimizer.get_unscaled_gradients([*tensors(2.0**15), None])
    with no_grad():
        optimizer.apply_gradients([(gradients[0], variable)])
    assert float(numpy(variable)) == -1.0


@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_loop_of_tf_keras_leaves_float8_state_alone(built, order):
    layer, plain = float8_layer(), float8_layer()
    optimizer = LossScaleOptimizer(sgd(), initial_scale=64)
    if built:
        optimizer.build(layer.trainable_variables)
    scaled = [64 * ops.ones((3, 2)), 64 * ops.ones((2,))]
    scaled.append(observation(layer, 5.0))
    variables = [layer.trainable_variables[i] for i in order]
    before = numpy(layer.kernel)
    for step in (1, 2):
        optimizer.scale_loss(ops.convert_to_tensor(1.0))
        gradients = [scaled[i] for i in order]
        gradients = optimizer.get_unscaled_gradients(gradients)
        with no_grad():
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            plain.float8_state.matrices[0].assign(observation(plain, 5.0))
        np.testing.assert_array_equal(numpy(layer.kernel), before - step)
        np.testing.assert_array_equal(
            numpy(layer.float8_state.matrices[0]),
            numpy(plain.float8_state.matrices[0]),
        )


def test_gradients_and_variables_are_counted():
    variable = keras.Variable(0.0)
    optimizer = LossScaleOptimizer(sgd())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"2 gradients and 1 variables"):
            optimizer.apply([*tensors(1.0), *tensors(1.0)], [variable])
        assert float(numpy(variable)) == 0.0
        optimizer.build([variable])


def test_a_loss_may_be_a_function():
    optimizer = LossScaleOptimizer(sgd(), initial_scale=4)
    scaled = optimizer.get_scaled_loss(lambda: ops.convert_to_tensor(3.0))
    assert float(scaled()) == 12.0
