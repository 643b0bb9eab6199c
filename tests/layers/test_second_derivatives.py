"""A gradient in float8 is taken once; to differentiate it again is refused."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from ways import BACKEND

REFUSAL = {
    "jax": (NotImplementedError, "cannot be differentiated again"),
    "tensorflow": (LookupError, "cannot be differentiated again"),
    "torch": (NotImplementedError, "cannot be differentiated again"),
}


def penalty(layer, x):
    """The derivative by the kernel of how steep a layer is at `x`."""
    if BACKEND == "jax":
        import jax

        def steepness(kernel):
            def outputs(x):
                weights = [kernel, *(v.value for v in rest)]
                values, _ = layer.stateless_call(weights, [], x)
                return ops.sum(values)

            return ops.sum(jax.grad(outputs)(x) ** 2)

        kernel, *rest = layer.trainable_variables
        return jax.grad(steepness)(kernel.value)
    if BACKEND == "torch":
        import torch

        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(ops.sum(layer(x)), x, create_graph=True)
        ops.sum(slope**2).backward()
        return layer.kernel.value.grad
    import tensorflow as tf

    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = ops.sum(layer(x))
        steepness = ops.sum(inner.gradient(outputs, x) ** 2)
    return outer.gradient(steepness, layer.kernel.value)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_second_derivative_is_refused_and_not_wrong(recipe):
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    layer = kpe.layers.Dense(4, use_bias=False, dtype=policy)
    x = ops.convert_to_tensor(np.ones((2, 3), "float32"))
    layer.build(x.shape)
    error, words = REFUSAL[BACKEND]
    with pytest.raises(error, match=words):
        penalty(layer, x)


def test_the_same_is_answered_where_nothing_is_in_float8():
    """Or else the test above would show nothing."""
    layer = kpe.layers.Dense(4, use_bias=False, dtype="float32")
    x = ops.convert_to_tensor(np.ones((2, 3), "float32"))
    layer.build(x.shape)
    found = keras.ops.convert_to_numpy(penalty(layer, x))
    kernel = keras.ops.convert_to_numpy(layer.kernel.value)
    expected = np.broadcast_to(4 * kernel.sum(1, keepdims=True), (3, 4))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def forward_mode(layer, x):
    """How the outputs of a layer change along with its inputs."""
    if BACKEND == "jax":
        import jax

        return jax.jvp(layer, (x,), (x,))[1]
    if BACKEND == "torch":
        from torch.autograd import forward_ad

        with forward_ad.dual_level():
            outputs = layer(forward_ad.make_dual(x, x))
            return forward_ad.unpack_dual(outputs).tangent.detach()
    import tensorflow as tf

    with tf.autodiff.ForwardAccumulator(x, x) as accumulator:
        outputs = layer(x)
    return accumulator.jvp(outputs)


FORWARD_MODE = {
    "jax": TypeError,
    "tensorflow": (LookupError, TypeError),
    "torch": NotImplementedError,
}


@pytest.mark.parametrize("policy", ["float8_from_float32", "float32"])
def test_forward_mode_is_refused_and_not_wrong(policy):
    layer = kpe.layers.Dense(4, use_bias=False, dtype=policy)
    x = ops.convert_to_tensor(np.ones((2, 3), "float32"))
    layer.build(x.shape)
    if policy == "float32":
        found = ops.convert_to_numpy(forward_mode(layer, x))
        np.testing.assert_allclose(found, ops.convert_to_numpy(layer(x)))
        return
    with pytest.raises(FORWARD_MODE[BACKEND]):
        forward_mode(layer, x)


@pytest.mark.parametrize("mode", ["full", None])
def test_first_derivatives_go_through_loops_and_rematerialization(mode):
    # Models and loops, which stock Keras cannot do again on TensorFlow, are
    # outside.
    with kpe.policy_scope("float8_from_float32"):
        loop = kpe.layers.GRU(5, return_sequences=True)
        with keras.RematScope(mode=mode):
            dense = [kpe.layers.Dense(n) for n in (6, 2)]
    model = keras.Sequential([keras.Input((3, 4)), loop, *dense])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 3, 4), "float32"), np.ones((4, 3, 2), "float32")
    losses = model.fit(x, y, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
