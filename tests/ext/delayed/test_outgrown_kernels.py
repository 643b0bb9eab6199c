"""Kernels that grow, or are replaced, while nobody observes them."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from float8_dense import dense, same_state
from keras_policy_ext.recipes import OPERANDS
from steps import (
    gradients,
    no_grad,
    normal,
    numpy,
    relative_rms,
    state_of,
    step,
    weights_of,
)
from ways import BACKEND, FASTEST, compiled

X = normal(16, 8)

ROUNDED = 0.1
"""More than the 2^-4 by which e4m3 rounds a number at most, with two operands
whose errors are independent: their root mean squares are below 0.05. A kernel
that was cut to half its size has 0.3."""


def converted(seed=0, **how):
    """A model with one kernel, converted: its amax is in its state."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    kpe.convert(model, "delayed", **how)
    return model


def error_of(outputs, model, x=X):
    """How far outputs are off those of the weights of a model."""
    kernel, bias = (numpy(v) for v in weights_of(model))
    return relative_rms(numpy(outputs), x @ kernel + bias)


def error(model):
    return error_of(model(X, training=False), model)


def error_predicted(model):
    return error_of(model.predict(X, verbose=0), model)


TARGET = normal(16, 8, seed=1, scale=200.0)


def far_away(y):
    """A loss that makes kernels grow a hundredfold in a few steps."""
    target = ops.convert_to_tensor(TARGET)
    return ops.mean(ops.square(ops.cast(y, "float32") - target))


def grown(model, before):
    """Whether a kernel is far larger than it was."""
    return np.abs(numpy(model.weights[0])).max() > 8 * before


def amax(model):
    return np.abs(numpy(model.weights[0])).max()


# Training without observing


@pytest.mark.full
def test_a_kernel_trained_without_training_is_not_cut():
    model, optimizer = converted(), keras.optimizers.SGD(1.0)
    before = amax(model)
    for _ in range(4):
        step(model, optimizer, X, far_away, training=False)
    assert grown(model, before)
    # As under delayed scaling it is that of the step before.
    step(model, keras.optimizers.SGD(0.0), X, far_away, training=False)
    assert error(model) < ROUNDED


@pytest.mark.full
def test_a_gradient_without_training_observes_the_kernel_alone():
    layer = dense()
    step(layer, keras.optimizers.SGD(0.0), X, far_away)
    before = state_of(layer)
    step(layer, keras.optimizers.SGD(1.0), X * 9, far_away, training=False)
    assert same_state(before, state_of(layer))
    step(layer, keras.optimizers.SGD(0.0), X * 9, far_away, training=False)
    after = state_of(layer)
    assert after["kernel"][1][0] == np.abs(numpy(layer.kernel)).max()
    for operand in ("inputs", "outputs_grad"):
        for one, other in zip(before[operand], after[operand], strict=True):
            np.testing.assert_array_equal(one, other)


class Student(keras.Model):
    """Calls a frozen teacher, and then what it trains."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.layers.Dense(8, trainable=False)
        self.student = keras.layers.Dense(8)

    def build(self, input_shape):
        self.teacher.build(input_shape)
        self.student.build(input_shape)

    def call(self, x, training=None):
        self.teacher(x, training=False)
        return self.student(x)


@pytest.mark.parametrize("training", [False, True])
def test_a_student_called_after_its_frozen_teacher_is_not_cut(training):
    model = Student()
    model.build((None, 8))
    kpe.convert(model, "delayed")
    optimizer = keras.optimizers.SGD(1.0)
    for _ in range(4):
        step(model, optimizer, X, far_away, training=training)
    step(model, keras.optimizers.SGD(0.0), X, far_away, training=training)
    kernel, bias = (numpy(v) for v in weights_of(model.student))
    outputs = numpy(model(X, training=False))
    assert relative_rms(outputs, X @ kernel + bias) < ROUNDED


@pytest.mark.full
def test_fit_of_a_trainable_backbone_called_without_training():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    backbone = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    outputs = keras.layers.Rescaling(1.0)(backbone(inputs, training=False))
    model = keras.Model(inputs, outputs)
    kpe.convert(model, "delayed")
    before = amax(backbone)
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    model.fit(X, TARGET, epochs=6, batch_size=16, verbose=0)
    assert grown(backbone, before)
    assert error_predicted(backbone) < ROUNDED


# Optimizers that are not handed the states


@pytest.mark.full
@pytest.mark.parametrize("training", [True, None])
def test_an_optimizer_that_is_handed_kernels_alone_cuts_nothing(training):
    model, optimizer = converted(), keras.optimizers.SGD(1.0)
    before = amax(model)
    weights = weights_of(model)
    for _ in range(4):
        _, _, grads = gradients(model, X, far_away, training)
        with no_grad():
            optimizer.apply(grads[:2], weights)
    assert grown(model, before)
    assert error(model) < ROUNDED
    assert error_predicted(model) < ROUNDED


def test_a_state_that_another_optimizer_has_is_that_of_one_for_all():
    def trained(*parts):
        model = converted()
        variables = model.trainable_variables
        optimizers = [keras.optimizers.SGD(2.0**-4) for _ in parts]
        for optimizer, part in zip(optimizers, parts, strict=True):
            optimizer.build(variables[part])
        for _ in range(3):
            grads = gradients(model, X, far_away)[2]
            with no_grad():
                for optimizer, part in zip(optimizers, parts, strict=True):
                    optimizer.apply(grads[part], variables[part])
        return numpy(variables[-1])

    together = trained(slice(None))
    apart = trained(slice(2, None), slice(2))
    np.testing.assert_array_equal(together, apart)


@pytest.mark.full_except("False")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="graphs of TensorFlow")
@pytest.mark.parametrize("jit", [False, True])
def test_a_graph_whose_optimizer_is_handed_kernels_alone_cuts_nothing(jit):
    import tensorflow as tf

    model, optimizer = converted(), keras.optimizers.SGD(1.0)
    weights = weights_of(model)
    optimizer.build(weights)

    @tf.function(jit_compile=jit)
    def train():
        with tf.GradientTape() as tape:
            loss = far_away(model(X, training=True))
        grads = tape.gradient(loss, [v.value for v in weights])
        optimizer.apply(grads, weights)

    before = amax(model)
    error(model)
    for _ in range(4):
        train()
    assert grown(model, before)
    assert error(model) < ROUNDED


@pytest.mark.skipif(BACKEND != "jax", reason="functions of values")
@pytest.mark.parametrize("gradients_of", ["kernels", "all"])
def test_a_compiled_step_that_updates_kernels_alone_cuts_nothing(gradients_of):
    import jax

    model, optimizer = converted(), keras.optimizers.SGD(1.0)
    variables = model.trainable_variables
    if gradients_of == "all":
        optimizer.build(variables[:2])

    def loss(weights, states):
        y, _ = model.stateless_call([*weights, *states], [], X, training=True)
        return far_away(y), y

    def update(weights, states):
        both = (0, 1) if gradients_of == "all" else 0
        grads, y = jax.grad(loss, both, has_aux=True)(weights, states)
        grads = grads[0] if gradients_of == "all" else grads
        pairs = zip(weights, grads, strict=True)
        return y, [w - g for w, g in pairs]

    update = jax.jit(update)
    *weights, states = (v.value for v in variables)
    before = amax(model)
    for _ in range(4):
        given = weights
        outputs, weights = update(weights, [states])
    for variable, value in zip(variables, [*given, states], strict=True):
        variable.assign(value)
    assert grown(model, before)
    assert error_of(outputs, model) < ROUNDED
    assert error_predicted(model) < ROUNDED


@pytest.mark.skipif(BACKEND != "torch", reason="tensors changed in place")
def test_a_parameter_that_is_changed_in_place_is_not_cut():
    import torch

    model = converted()
    error(model)
    for _ in range(3):
        with torch.no_grad():
            model.weights[0].value.mul_(9.0)
        assert error(model) < ROUNDED


# Kernels that are assigned


def assign(model, kernel):
    model.weights[0].assign(kernel)


def set_weights(model, kernel):
    model.set_weights([kernel, *model.get_weights()[1:]])


def follow(model, kernel):
    other = converted()
    other.weights[0].assign(kernel)
    pairs = zip(weights_of(model), weights_of(other), strict=True)
    for mine, others in pairs:
        mine.assign(others)


def average(model, kernel):
    optimizer = keras.optimizers.SGD(1.0, use_ema=True)
    optimizer.build(model.trainable_variables)
    optimizer._model_variables_moving_average[0].assign(kernel)
    optimizer.finalize_variable_values(model.trainable_variables)


@pytest.mark.full_except("error-assign", "error-average")
@pytest.mark.parametrize("change", [assign, set_weights, follow, average])
@pytest.mark.parametrize("found", [error, error_predicted])
def test_a_kernel_that_is_replaced_is_not_cut(change, found):
    model = converted()
    assert found(model) < ROUNDED
    for factor in (20, 400):
        change(model, factor * numpy(model.weights[0]))
        assert found(model) < ROUNDED


def test_a_kernel_that_is_assigned_after_training_is_not_cut():
    model, optimizer = converted(), keras.optimizers.SGD(0.01)
    for _ in range(2):
        step(model, optimizer, X, far_away)
    assign(model, 20 * numpy(model.weights[0]))
    assert error(model) < ROUNDED


@pytest.mark.skipif(BACKEND != "tensorflow", reason="graphs of TensorFlow")
def test_a_kernel_that_is_assigned_in_a_graph_is_not_cut():
    import tensorflow as tf

    model = converted()

    @tf.function
    def grow():
        outputs = model(X, training=False)
        model.weights[0].assign(3.0 * model.weights[0])
        return outputs

    for _ in range(4):
        kernel = numpy(model.weights[0])
        outputs = numpy(grow())
        assert relative_rms(outputs, X @ kernel) < ROUNDED


def test_what_is_assigned_within_the_recorded_amax_changes_no_state():
    model = converted()
    step(model, keras.optimizers.SGD(0.01), X, far_away)
    before = state_of(model.layers[0])
    assign(model, 0.5 * numpy(model.weights[0]))
    error(model)
    assert same_state(before, state_of(model.layers[0]))


def test_shapes_that_are_found_between_steps_observe_nothing():
    def trained(finds_shapes):
        model, optimizer = converted(), keras.optimizers.SGD(0.5)
        for _ in range(3):
            step(model, optimizer, X, far_away)
            if finds_shapes:
                keras.layers.Lambda(model.call).compute_output_shape((4, 8))
        return model.get_weights()

    for one, other in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_that_are_set_come_back_bit_for_bit():
    model, optimizer = converted(), keras.optimizers.SGD(0.01)
    for _ in range(3):
        step(model, optimizer, X, far_away)
    weights = model.get_weights()
    outputs = numpy(model(X, training=False))
    step(model, optimizer, X, far_away)
    model.set_weights(weights)
    for mine, given in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(mine, given)
    np.testing.assert_array_equal(numpy(model(X, training=False)), outputs)


@pytest.mark.full
def test_a_copy_of_a_model_observes_its_own_kernel():
    import copy

    model = converted()
    error(model)
    other = copy.deepcopy(model)
    error(other)
    assign(other, 20 * numpy(other.weights[0]))
    assert error(other) < ROUNDED
    assert amax(model) == state_of(model.layers[0])["kernel"][1][0]


# What is said of them


@pytest.mark.extension("inspect")
def test_inspect_shows_the_amax_of_a_kernel_that_was_not_observed():
    layer = dense()
    (found,) = (
        o for o in kpe.inspect(layer).layers[0].operands if o.name == "kernel"
    )
    assert found.amax == np.abs(numpy(layer.kernel)).max()
    assert state_of(layer)["kernel"][1][0] == 0


def test_a_compiled_forward_pass_of_an_untouched_model_keeps_its_state():
    model = converted()
    before = state_of(model.layers[0])
    call = compiled(lambda x: model(x, training=False), FASTEST)
    first, again = (numpy(call(ops.convert_to_tensor(X))) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert same_state(before, state_of(model.layers[0]))
    assert set(before) == set(OPERANDS)
