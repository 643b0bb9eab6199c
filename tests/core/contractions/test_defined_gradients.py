"""Gradients are defined, not derived, also of zeros and of nothing."""

import numpy as np
import pytest

import keras_policy_ext as kpe
from cases import mostly
from contracting import (
    FLOAT32_TOLERANCE,
    RECIPES,
    dense,
    observe,
    policy,
    run_layer,
)
from keras_policy_ext import kernels, reference
from keras_policy_ext.recipes import DelayedScaling
from steps import normal, numpy, relative_rms, state_of


@pytest.mark.full
def test_no_gradient_is_taken_of_a_cast():
    """Where every input saturates, the gradient of a clip would be zero."""
    recipe = DelayedScaling(amax_history_length=1)
    layer = dense(6, 4, policy(recipe=recipe), use_bias=False)
    x, g = np.full((5, 4), 3.0, "float32"), normal(5, 6, scale=1e-3)
    observe(layer, x, g)
    scales = {
        operand: history[0] / _limit(recipe, operand)
        for operand, (_, history) in state_of(layer).items()
    }
    y, dx, dw = run_layer(layer, x * 1000, g)
    qx = np.full((5, 4), 3.0)  # saturated at the amax of the step before
    qw, qg = (
        reference.quantize_dequantize(
            value, scales[operand], recipe.format_of(operand), "float64"
        )
        for value, operand in (
            (numpy(layer.kernel), "kernel"),
            (g, "outputs_grad"),
        )
    )
    assert relative_rms(y, qx @ qw) < FLOAT32_TOLERANCE
    assert relative_rms(dx, qg @ qw.T) < FLOAT32_TOLERANCE
    assert relative_rms(dw, qx.T @ qg) < FLOAT32_TOLERANCE
    assert np.all(np.abs(dx).max(axis=1) > 0)


def _limit(recipe, operand):
    return kpe.formats.get(recipe.format_of(operand)).max


@pytest.mark.parametrize("name", ["hybrid", "power_of_two"])
def test_zeros_have_zero_outputs_and_finite_gradients(name):
    layer = dense(6, 4, policy(recipe=RECIPES[name]), use_bias=False)
    y, dx, dw = run_layer(layer, np.zeros((5, 4), "float32"), normal(5, 6))
    assert not y.any()
    assert not dw.any()
    assert np.all(np.isfinite(dx))
    y, dx, dw = run_layer(layer, normal(5, 4), np.zeros((5, 6), "float32"))
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("kind", ["native", "emulated"])
def test_an_empty_batch_has_empty_outputs_and_no_gradient(kind):
    layer = dense(6, 4, use_bias=False)
    x, g = np.zeros((0, 4), "float32"), np.zeros((0, 6), "float32")
    with kernels.prefer(kind):
        y, dx, dw = run_layer(layer, x, g)
    assert y.shape == g.shape
    assert dx.shape == x.shape
    assert not dw.any()


@pytest.mark.parametrize(
    "recipe", mostly(["rowwise", "block", "mxfp8", "nvfp4"], "nvfp4")
)
def test_so_it_has_in_every_recipe(recipe):
    recipe_policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    layer = dense(6, 4, recipe_policy, use_bias=False)
    x, g = np.zeros((0, 4), "float32"), np.zeros((0, 6), "float32")
    y, dx, dw = run_layer(layer, x, g)
    assert y.shape == g.shape
    assert dx.shape == x.shape
    assert not dw.any()


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_reaches_the_loss_scaler(poison):
    layer = dense(6, 4, use_bias=False)
    g = normal(5, 6)
    g[2, 3] = poison
    _, dx, dw = run_layer(layer, normal(5, 4), g)
    assert not np.all(np.isfinite(dw))
    assert not np.all(np.isfinite(dx))
