"""A loss that is never scaled: gradients are divided nevertheless."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.mixed_precision import LossScaleMixin, LossScaleOptimizer
from loss_scaling import BACKEND, scaled_gradient, sgd, steps, tensors
from steps import no_grad

SAYS = r"not scaled.*scale_loss"


@contextlib.contextmanager
def no_word_of_scaling():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*scale_loss.*")
        yield


def unscaled(loss):
    return loss


def data():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    return x, x[:, :2]


class OwnStep(keras.Model):
    """A model with the `train_step` of Keras's guides."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, dtype="mixed_float16")

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        return {"jax": self._jax, "tensorflow": self._tf, "torch": self._torch}[
            BACKEND
        ](*args)

    def _jax(self, state, batch):
        import jax

        weights, others, own, metrics = state
        x, y = batch

        def loss(weights):
            y_pred, _ = self.stateless_call(weights, others, x)
            return self.compute_loss(x, y, y_pred)

        value, grads = jax.value_and_grad(loss)(weights)
        weights, own = self.optimizer.stateless_apply(own, grads, weights)
        return {"loss": value}, (weights, others, own, metrics)

    def _tf(self, batch):
        import tensorflow as tf

        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}

    def _torch(self, batch):
        x, y = batch
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        with no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


class OwnScaledStep(LossScaleMixin, OwnStep):
    pass


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_never_scales_the_loss_is_told_once(compiled):
    optimizer = LossScaleOptimizer(sgd())
    with pytest.warns(UserWarning, match=SAYS) as record:
        steps(optimizer, keras.Variable(0.0), [1, 2, 3], compiled, unscaled)
    assert len([w for w in record if "scale_loss" in str(w.message)]) == 1


@pytest.mark.parametrize("model_class", [OwnStep, OwnScaledStep])
def test_a_train_step_that_never_scales_the_loss_is_told(model_class):
    model = model_class()
    model(data()[0])
    if model_class is OwnStep:
        kpe.mixed_precision.compile(model, sgd(), "mse")
    else:
        model.compile(sgd(), "mse")
    with pytest.warns(UserWarning, match=SAYS):
        model.fit(*data(), verbose=0)


def test_gradients_that_were_never_scaled_are_told_where_they_are_unscaled():
    optimizer = LossScaleOptimizer(sgd())
    with pytest.warns(UserWarning, match=SAYS):
        optimizer.get_unscaled_gradients(tensors(1.0))


def test_a_loop_that_forgets_to_scale_after_steps_that_did_is_told():
    optimizer, variable = LossScaleOptimizer(sgd()), keras.Variable(0.0)
    with no_word_of_scaling():
        steps(optimizer, variable, [1, 2])
    with pytest.warns(UserWarning, match=SAYS), no_grad():
        for _ in range(2):
            optimizer.apply(tensors(1.0), [variable])


@pytest.mark.skipif(
    BACKEND != "jax", reason="TensorFlow and PyTorch compile a read of it"
)
def test_a_scale_that_a_compiled_function_cannot_follow_is_told():
    import jax

    optimizer, variable = LossScaleOptimizer(sgd()), keras.Variable(0.0)
    optimizer.build([variable])
    with pytest.warns(UserWarning, match="constant.*StatelessScope"):
        jax.jit(jax.grad(optimizer.scale_loss))(1.0)
    with no_word_of_scaling():
        jax.grad(LossScaleOptimizer(sgd()).scale_loss)(1.0)
        fixed = LossScaleOptimizer(sgd(), dynamic=False, initial_scale=2)
        jax.jit(fixed.scale_loss)(1.0)


def test_a_scale_that_was_read_before_the_loop_only_is_not_taken_for_used():
    optimizer, variable = LossScaleOptimizer(sgd()), keras.Variable(0.0)
    assert float(optimizer.loss_scale) == 2.0**15
    with pytest.warns(UserWarning, match=SAYS), no_grad():
        for _ in range(2):
            optimizer.apply(tensors(1.0), [variable])


@pytest.mark.full
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("way", ["scale_loss", "get_scaled_loss"])
def test_a_loop_that_scales_the_loss_is_told_nothing(way, compiled):
    optimizer = LossScaleOptimizer(sgd())
    with no_word_of_scaling():
        scale = getattr(optimizer, way)
        steps(optimizer, keras.Variable(0.0), [1, 2, 3], compiled, scale)


def test_a_loop_that_multiplies_by_the_scale_is_told_nothing():
    optimizer, variable = LossScaleOptimizer(sgd()), keras.Variable(0.0)
    with no_word_of_scaling():
        steps(
            optimizer,
            variable,
            [1, 2],
            scale=lambda x: x * optimizer.loss_scale,
        )
    assert float(ops.convert_to_numpy(variable)) == -3.0


def test_the_loop_of_tf_keras_is_told_nothing():
    optimizer, variable = LossScaleOptimizer(sgd()), keras.Variable(1.0)
    with no_word_of_scaling():
        for _ in range(2):
            gradient = scaled_gradient(optimizer, variable, lambda v: v * v)
            (gradient,) = optimizer.get_unscaled_gradients([gradient])
            with no_grad():
                optimizer.apply([gradient], [variable])


def test_two_groups_of_variables_share_a_scaled_loss():
    optimizer = LossScaleOptimizer(sgd())
    first, second = keras.Variable(0.0), keras.Variable(0.0)
    optimizer.build([first, second])
    with no_word_of_scaling(), no_grad():
        for _ in range(2):
            gradient = optimizer.scale_loss(ops.convert_to_tensor(1.0))
            optimizer.apply([gradient], [first])
            optimizer.apply([gradient], [second])


def test_gradients_may_be_accumulated_before_they_are_applied():
    optimizer, variable = LossScaleOptimizer(sgd()), keras.Variable(0.0)
    with no_word_of_scaling(), no_grad():
        for _ in range(2):
            one = ops.convert_to_tensor(1.0)
            total = optimizer.scale_loss(one) + optimizer.scale_loss(one)
            optimizer.apply([total], [variable])
    assert float(ops.convert_to_numpy(variable)) == -4.0


def test_a_scale_of_one_that_never_changes_needs_no_scaled_loss():
    optimizer = LossScaleOptimizer(sgd(), dynamic=False, initial_scale=1)
    with no_word_of_scaling():
        steps(optimizer, keras.Variable(0.0), [1, 2], scale=unscaled)


@pytest.mark.parametrize("accumulated", [None, 2])
def test_fit_is_told_nothing(accumulated):
    model = keras.Sequential([keras.layers.Dense(2, dtype="mixed_float16")])
    optimizer = sgd(0.1, gradient_accumulation_steps=accumulated)
    kpe.mixed_precision.compile(model, optimizer, "mse")
    with no_word_of_scaling():
        model.fit(*data(), batch_size=4, epochs=2, verbose=0)
        model.train_on_batch(*data())
