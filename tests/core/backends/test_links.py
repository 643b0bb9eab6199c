"""A step whose gradients nobody differentiates keeps nothing more for that."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from cases import BEFORE_3_15
from steps import normal
from ways import BACKEND

POLICY = "float8_from_float32"


def model():
    keras.utils.set_random_seed(0)
    with kpe.policy_scope(POLICY):
        layers = [kpe.layers.GRU(16, return_sequences=True)]
        layers += [kpe.layers.Dense(64, "gelu"), kpe.layers.Dense(8)]
    return keras.Sequential([keras.Input((6, 32)), *layers])


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch's links")
def test_nothing_but_what_was_quantized_keeps_inputs_of_pytorch():
    import torch

    layer = kpe.layers.Dense(8, dtype=POLICY)
    layer.build((16, 32))
    x = torch.tensor(normal(16, 32), requires_grad=True) * 1.0
    there = weakref.ref(x)
    gc.disable()
    try:
        y = layer(x, training=True)
        del x
        if BEFORE_3_15:  # Keras leaves tensors in `keras.tree`, in cycles.
            gc.collect()
        assert there() is None
    finally:
        gc.enable()
    y.sum().backward()


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch's links")
def test_a_link_of_pytorch_has_memory_for_one_number():
    import torch

    from keras_policy_ext.backends.torch.gradients import links_of

    leaf = torch.zeros(100, 30, requires_grad=True)
    kernel = torch.nn.Parameter(torch.zeros(30, 20))
    link, itself = links_of(leaf * 1.0, kernel)
    assert link.shape == leaf.shape
    assert link.untyped_storage().nbytes() == 4
    assert itself is kernel
    assert links_of(leaf.detach(), kernel.detach()) == (None, None)
    (link * 2.0).sum().backward()
    np.testing.assert_array_equal(leaf.grad, np.full((100, 30), 2.0))


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "jax", reason="of JAX's links")
def test_xla_compiles_the_same_program_as_without_links(monkeypatch):
    """Loops included, in which a link would be stacked."""
    import jax

    from keras_policy_ext.backends.jax import gradients

    def compiled():
        network = model()
        values = [v.value for v in network.trainable_variables]
        others = [v.value for v in network.non_trainable_variables]

        def loss(values, x):
            y, _ = network.stateless_call(values, others, x, training=True)
            return ops.sum(ops.square(y))

        step = jax.jit(jax.grad(loss))
        return step.lower(values, normal(4, 6, 32)).compile()

    linked = compiled()
    monkeypatch.setattr(
        gradients, "_are_differentiated_twice", lambda *_: False
    )
    without = compiled()
    planned = [
        each.memory_analysis().temp_size_in_bytes for each in (linked, without)
    ]
    assert planned[0] == planned[1]
    lines = [each.as_text().count(" = ") for each in (linked, without)]
    assert lines[0] == lines[1]


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow's graphs")
def test_graphs_of_tensorflow_are_the_same_as_without_links(monkeypatch):
    import tensorflow as tf

    from keras_policy_ext.backends.tensorflow import gradients

    def operations():
        network = model()

        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(network(x, training=True) ** 2)
            weights = [v.value for v in network.trainable_variables]
            return tape.gradient(loss, weights)

        graph = step.get_concrete_function(tf.constant(normal(4, 6, 32))).graph
        return [operation.type for operation in graph.get_operations()]

    linked = operations()
    monkeypatch.setattr(gradients, "record", None)
    assert linked == operations()
