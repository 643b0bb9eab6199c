"""Activations keep little for gradients, which are those of Keras."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import backends
from ways import BACKEND, array

SHAPES = [(16, 24), (3, 5), (2, 3, 8), (0, 8), (1, 1), (4, 64)]
DTYPES = ["float32", "bfloat16", "float16"]
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-7, -1e-7, 3.0]


def numbers(shape, seed):
    x = np.random.default_rng(seed).normal(size=shape).astype("float32")
    flat = x.reshape(-1)
    flat[: len(SPECIAL)] = SPECIAL[: flat.size]
    return x


def outputs_and_gradient(relu, x, outputs_grad, way):
    """Both in float32, of NumPy arrays of a dtype."""
    ways = {"jax": _of_jax, "tensorflow": _of_tensorflow, "torch": _of_torch}
    found = ways[BACKEND](relu, x, outputs_grad, way == "compiled")
    return [array(ops.cast(each, "float32")) for each in found]


def _of_jax(relu, x, g, compiled):
    import jax

    def both(x, g):
        y, backward = jax.vjp(relu, x)
        return y, *backward(g)

    return (jax.jit(both) if compiled else both)(x, g)


def _of_tensorflow(relu, x, g, compiled):
    import tensorflow as tf

    def both(x, g):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = relu(x)
        return y, tape.gradient(y, x, g)

    return tf.function(both, jit_compile=compiled or None)(x, g)


def _of_torch(relu, x, g, compiled):
    import torch

    x = x.detach().requires_grad_()
    y = (torch.compile(relu, backend="aot_eager") if compiled else relu)(x)
    y.backward(g)
    return y.detach(), x.grad


@pytest.mark.parametrize("way", ["as it is", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_keras(shape, dtype, way):
    x, g = (
        ops.cast(ops.convert_to_tensor(numbers(shape, seed)), dtype)
        for seed in (0, 1)
    )
    ours = backends.current.relu
    found, expected = (
        outputs_and_gradient(relu, x, g, way)
        for relu in (ours, keras.activations.relu)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(np.signbit(one), np.signbit(other))


RECOMPUTED = ["gelu", "silu", "mish", "hard_silu"]


@pytest.fixture
def off_a_cpu(monkeypatch):
    """As on another device, where activations are computed again."""
    here = backends.current
    monkeypatch.setattr(here, "on_cpu", lambda x: False)
    return here


@pytest.fixture
def on_a_cpu(monkeypatch):
    """As on a CPU, also where there is another device."""
    here = backends.current
    monkeypatch.setattr(here, "on_cpu", lambda x: True)
    return here


@pytest.mark.full_except(
    "gelu-float32-as it is", "mish-float32-compiled", "silu-bfloat16-compiled"
)
@pytest.mark.parametrize("way", ["as it is", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_is_computed_again_has_the_gradient_of_keras(
    off_a_cpu, name, dtype, way
):
    activation = keras.activations.get(name)

    def ours(x):
        return off_a_cpu.recomputed(activation, x)

    x, g = (
        ops.cast(ops.convert_to_tensor(numbers((16, 24), seed)), dtype)
        for seed in (0, 1)
    )
    found, expected = (
        outputs_and_gradient(each, x, g, way) for each in (ours, activation)
    )
    # Where a compiler fuses otherwise, it rounds otherwise.
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-20
    exact = way == "as it is"
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=0 if exact else step, atol=0 if exact else step
        )


@pytest.mark.skipif(BACKEND != "jax", reason="JAX alone lists what it keeps")
@pytest.mark.parametrize("name", RECOMPUTED)
def test_inputs_are_kept_and_nothing_else(off_a_cpu, name):
    import jax

    def kept(recomputed):
        activation = keras.activations.get(name)
        x = ops.ones((16, 24))
        _, backward = jax.vjp(lambda x: recomputed(activation, x), x)
        return sum(each.nbytes for each in jax.tree.leaves(backward))

    assert kept(off_a_cpu.recomputed) == 16 * 24 * 4
    assert kept(lambda activation, x: activation(x)) > 16 * 24 * 4


@pytest.mark.skipif(BACKEND != "jax", reason="JAX alone lists what it keeps")
@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_a_gelu_in_16_bits_keeps_its_inputs(on_a_cpu, dtype, name):
    import jax

    activation = keras.activations.get(name)
    x = ops.ones((16, 24), dtype)
    _, backward = jax.vjp(lambda x: on_a_cpu.recomputed(activation, x), x)
    kept = sum(each.nbytes for each in jax.tree.leaves(backward))
    is_known = name == "gelu" and dtype != "float32"
    assert (kept == x.nbytes) == is_known


@pytest.mark.full
@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch keeps its inputs")
@pytest.mark.skipif(
    not backends.current.on_cpu(ops.ones(1)),
    reason="what is rounded for a CPU needs one, and no other device",
)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.slow_except("mixed_bfloat16")
def test_on_a_cpu_no_bit_of_a_compiled_step_changes(monkeypatch, policy):
    dtypes = set()

    def trained():
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy(policy)
        x = inputs = keras.Input((48,))
        for _ in range(2):
            hidden = keras.layers.Dense(96, "gelu")(x)
            x = x + keras.layers.Dense(48)(hidden)
        model = keras.Model(inputs, x)
        kpe.convert(model, "delayed")
        model.compile("sgd", "mse", jit_compile=True)
        x, y = (
            np.random.default_rng(seed).normal(size=(256, 48))
            for seed in (0, 1)
        )
        model.fit(x, y, batch_size=64, epochs=2, verbose=0, shuffle=False)
        return model.get_weights()

    def plain(activation, x):
        dtypes.add(keras.backend.standardize_dtype(x.dtype))
        return activation(x)

    found = trained()
    monkeypatch.setattr(backends.current, "recomputed", plain)
    for one, other in zip(found, trained(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert dtypes == {policy.removeprefix("mixed_")}


@pytest.mark.full_except("hard_silu", "mish")
@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_float8_layer_computes_its_activation_again(monkeypatch, name):
    here = backends.current
    seen = []

    def recomputed(activation, x):
        seen.append(activation)
        return activation(x)

    monkeypatch.setattr(here, "recomputed", recomputed)
    x = ops.ones((2, 4, 8))
    for layer in (
        kpe.layers.Dense(8, name, dtype="mixed_float8"),
        kpe.layers.Conv1D(8, 2, activation=name, dtype="mixed_float8"),
        kpe.layers.EinsumDense(
            "abc,cd->abd", (4, 8), name, dtype="mixed_float8"
        ),
    ):
        layer(x)
    assert seen == [keras.activations.get(name)] * 3


def test_a_tensor_that_is_transposed():
    x, g = (ops.transpose(numbers((16, 24), seed)) for seed in (0, 1))
    ours = backends.current.relu
    found, expected = (
        outputs_and_gradient(relu, x, g, "as it is")
        for relu in (ours, keras.activations.relu)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(BACKEND != "torch", reason="tensors of others are whole")
@pytest.mark.parametrize("shape", [(16, 24), (3, 5)])
def test_a_gradient_lies_in_memory_as_that_of_keras(shape):
    """What sums it, as for a bias, adds in the order of memory."""
    x, g = (ops.convert_to_tensor(numbers(shape, seed)) for seed in (0, 1))
    strides = []
    for relu in (backends.current.relu, keras.activations.relu):
        _, found = outputs_and_gradient_of_transposed(relu, x, g)
        strides.append(found.stride())
    assert strides[0] == strides[1]


def outputs_and_gradient_of_transposed(relu, x, g):
    x = x.detach().requires_grad_()
    gradients = []
    turned = x.t()
    turned.register_hook(gradients.append)
    y = relu(turned)
    y.backward(g.t().contiguous())
    return y, gradients[0]


def kept_for(activation, policy):
    """Bytes that a layer of 256 units keeps of 64 rows."""
    dtype = kpe.Float8DTypePolicy(policy, recipe="current")
    layer = kpe.layers.Dense(256, activation, dtype=dtype)
    model = keras.Sequential([keras.Input((256,)), layer])
    # Without XLA TensorFlow keeps more.
    model.compile("sgd", "mse", jit_compile=BACKEND != "torch")
    return kpe.memory(model, 64, []).forms[0].kept


@pytest.mark.full_except("float32")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.extension("memory")
def test_a_bit_is_kept_of_each_output(policy):
    found = kept_for("relu", policy) - kept_for(None, policy)
    assert found == 64 * 256 // 8


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.extension("memory")
def test_of_a_gelu_in_16_bits_its_inputs_are_kept(policy):
    found = kept_for("gelu", policy) - kept_for(None, policy)
    assert found == 64 * 256 * 2
