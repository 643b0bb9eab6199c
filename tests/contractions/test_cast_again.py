"""JAX: kernels that are cast again for the backward pass."""

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX casts kernels again; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_policy_ext import contractions, kernels, recipes
from keras_policy_ext.backends import devices
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.scale_sources import source_of

DELAYED = recipes.DelayedScaling(amax_history_length=4)
FIXED = recipes.DelayedScaling(amax_history_length=4, initial_scale=1.0)
CURRENT = recipes.CurrentScaling()
AGAIN, ONCE = "h200", "b200"
"""Both multiply float8; of the first each matmul wants its own layout."""

every_recipe = pytest.mark.parametrize(
    "recipe", [DELAYED, FIXED, CURRENT], ids=["delayed", "fixed", "current"]
)


def plan_of(recipe):
    equation = contractions.Einsum("ab,bc->ac")
    return contractions.make_plan(equation, recipe, "bfloat16", "float32", True)


def state_of(recipe):
    shape = source_of(recipe).state_shape
    return () if shape is None else (jnp.zeros(shape, "float32"),)


def weights(bad=None):
    kernel = np.random.default_rng(1).normal(size=(32, 48)) * 1e-2
    kernel[0, :4] = 0.0, -0.0, 1e-40, 3.0
    if bad is not None:
        kernel[3, 3] = bad
    return jnp.asarray(kernel, "float32")


def random(*shape):
    x = np.random.default_rng(2).normal(size=shape)
    return jnp.asarray(x, "bfloat16")


def gradients(device, recipe, kernel):
    """Those of a step, with what is kept handed on as its tensors."""

    @jax.jit
    def step(x, w, g, *state):
        plan = plan_of(recipe)
        _, residuals = plan.bound.forward(x, w, state, observe=True)
        again = plan.bound.residuals(residuals.leaves(), residuals.shapes)
        return plan.bound.backward(again, g, state)

    with devices.pretend(device):
        x, g = random(16, 32), random(16, 48)
        inputs, weights, state = step(x, kernel, g, *state_of(recipe))
    return [np.asarray(e, "float32") for e in (inputs, weights, *state)]


@pytest.mark.full_except("inf-delayed", "nan-delayed", "nan-fixed")
@every_recipe
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_the_gradients_are_those_of_codes_that_were_kept(recipe, bad):
    again = gradients(AGAIN, recipe, weights(bad))
    once = gradients(ONCE, recipe, weights(bad))
    for one, other in zip(again, once, strict=True):
        np.testing.assert_array_equal(one, other)
        known = ~np.isnan(one)
        signs = (np.signbit(each)[known] for each in (one, other))
        np.testing.assert_array_equal(*signs)


def codes_kept(device, recipe):
    """How many tensors of codes are as large as the kernel."""

    def kept(x, w, *state):
        return plan_of(recipe).bound.forward(x, w, state, True)[1].leaves()

    operands = random(16, 32), weights(), *state_of(recipe)
    with devices.pretend(device):
        held = jax.eval_shape(kept, *operands)
    narrow = [x.size for x in held if x.dtype.itemsize == 1]
    return narrow.count(operands[1].size)


@every_recipe
def test_no_codes_of_a_kernel_are_kept(recipe):
    assert codes_kept(AGAIN, recipe) == 0
    assert codes_kept(ONCE, recipe) == 1


def test_several_devices_keep_what_they_have_gathered(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert codes_kept(AGAIN, DELAYED) == 1


def test_what_is_emulated_keeps_its_codes():
    with kernels.prefer("emulated"):
        assert codes_kept(AGAIN, DELAYED) == 1


def test_scales_of_rows_are_kept_with_their_codes():
    """In each layout, as each is quantized from the weights themselves."""
    assert codes_kept(AGAIN, recipes.get("rowwise")) == 1


@pytest.mark.parametrize("scale", [1.0, 0.0123, 3e-39, 2.0**126])
def test_a_divisor_for_cuda_gives_the_same_numbers(monkeypatch, scale):
    x = np.exp(np.random.default_rng(3).normal(size=4096) * 20)
    x *= np.where(np.arange(4096) % 2, 1, -1)
    x[:6] = np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40
    x = jnp.asarray(x, "float32")

    def divided():
        return np.asarray(
            casting.scaled(x, jnp.float32(scale), "float8_e4m3fn")
        ).tobytes()

    expected = divided()
    monkeypatch.setattr(
        lax, "platform_dependent", lambda *x, cuda, default: cuda(*x)
    )
    assert divided() == expected
