"""What one program of XLA for a CPU keeps for the backward pass."""

import functools

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("tests of JAX", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np

import keras_policy_ext as kpe
from jax_programs import gradient_step
from keras_policy_ext.backends.jax import gradients as framework

if jax.default_backend() != "cpu":
    pytest.skip("XLA for a GPU respects barriers", allow_module_level=True)

ROWS, WIDTH, WIDE, BLOCKS = 512, 128, 512, 4
POLICY = "float8/current_from_mixed_bfloat16"


def planned_bytes(activation):
    """Bytes that a step of some blocks holds for a time."""
    framework._backward.clear_cache()
    layers = []
    for _ in range(BLOCKS):
        layers += [
            kpe.layers.Dense(WIDE, activation, dtype=POLICY),
            kpe.layers.Dense(WIDTH, dtype=POLICY),
        ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])

    step, weights = gradient_step(model)
    x = jnp.zeros((ROWS, WIDTH), "bfloat16")
    compiled = jax.jit(step).lower(weights, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_program_keeps_codes_and_not_what_they_stand_for(
    activation, monkeypatch
):
    found = planned_bytes(activation)
    monkeypatch.setattr(framework, "_LARGE", 1 << 60)
    wide = planned_bytes(activation)
    # Three bytes less for each number that a layer reads; some are there at
    # another time than most.
    numbers = BLOCKS * ROWS * (WIDTH + WIDE)
    assert wide - found > 2 * numbers


@pytest.mark.full
def test_a_rectifier_keeps_less_than_its_outputs():
    assert planned_bytes(jax.nn.relu) - planned_bytes("relu") > (
        BLOCKS * ROWS * WIDE
    )


@pytest.mark.parametrize("first", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("size", [300, 3])
def test_what_is_kept_is_the_same_after_the_loop(first, size):
    codes = jnp.asarray(
        np.random.default_rng(0).integers(0, 256, (size, size), "uint8")
    )
    scale = jnp.float32(0.1)
    gradient = jnp.asarray([first, 1.0], "float32")
    for run in (framework._decoded_after, jax.jit(framework._decoded_after)):
        found = run(gradient, [codes, scale, codes.T])
        for one, other in zip(found, [codes, scale, codes.T], strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_size_of_a_batch_may_be_open(activation):
    """What is exported with its gradient, as `model.export` does."""
    policy = "float8/current_from_float32"
    layer = kpe.layers.Dense(WIDE, activation, dtype=policy)
    layer.build((None, WIDTH))
    weights = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]

    def outputs(x):
        return layer.stateless_call(weights, others, x, training=True)[0]

    (batch,) = jax.export.symbolic_shape("batch")
    open_inputs = jax.ShapeDtypeStruct((batch, WIDTH), "float32")
    exported = jax.export.export(jax.jit(outputs))(open_inputs)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    found, backward = jax.vjp(jax.jit(outputs), x)
    gradient = exported.vjp().call(x, found)[0]
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    near(exported.call(x), found)
    near(gradient, backward(found)[0])
