"""Activations that are quantized, against the arithmetic in NumPy."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from frozen_models import dequantized, outputs_of, rounded_inputs
from steps import gradients, normal, numpy, observe_inputs

LAYERS = keras.layers
DELAYED = "float8/4_from_float32"


def sequential(shape, *layers):
    model = keras.Sequential([keras.Input(shape), *layers])
    for n, variable in enumerate(model.weights):
        variable.assign(normal(*variable.shape, seed=n))
    return model


def assert_near(found, expected):
    """Equal up to the order of float32 sums of few terms."""
    error = np.linalg.norm(found - expected)
    assert error <= 1e-6 * np.linalg.norm(expected)


def spread_inputs(*shape, seed=5):
    """Tokens of sizes so far apart that one scale would lose most."""
    x = normal(*shape, seed=seed)
    return x * np.exp2(6 * normal(*shape[:-1], 1, seed=seed + 1))


@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
def test_dynamic_scales_each_token(granularity):
    model = sequential((4, 6), LAYERS.Dense(5))
    kernel, bias = map(numpy, model.layers[0].weights)
    kpe.freeze(model, granularity=granularity, activations="dynamic")
    x = spread_inputs(3, 4, 6)
    wide = dequantized(kernel, (0,), granularity)
    expected = rounded_inputs(x) @ wide + bias
    assert_near(outputs_of(model, x), expected)
    assert np.linalg.norm(expected - (x @ wide + bias)) > 1e-3


def test_dynamic_scales_over_all_summed_axes_together():
    layer = LAYERS.EinsumDense("abde,dec->abc", (None, 5))
    model = sequential((3, 2, 4), layer)
    kernel = numpy(model.layers[0]._kernel)
    kpe.freeze(model, activations="dynamic")
    x = spread_inputs(2, 3, 2, 4)
    wide = dequantized(kernel, (0, 1))
    expected = np.einsum("abde,dec->abc", rounded_inputs(x, (2, 3)), wide)
    assert_near(outputs_of(model, x), expected)
    by_last = np.einsum("abde,dec->abc", rounded_inputs(x, 3), wide)
    assert np.linalg.norm(expected - by_last) > 1e-3


def test_dynamic_scales_tokens_of_a_kernel_with_a_batch():
    model = sequential((3, 6), LAYERS.EinsumDense("abc,bcd->abd", (3, 5)))
    kernel = numpy(model.layers[0]._kernel)
    kpe.freeze(model, activations="dynamic")
    x = spread_inputs(2, 3, 6)
    wide = dequantized(kernel, (1,))
    expected = np.einsum("abc,bcd->abd", rounded_inputs(x), wide)
    assert_near(outputs_of(model, x), expected)


@pytest.mark.full
def test_dynamic_scales_each_example_of_a_convolution():
    model = sequential((6, 5, 3), LAYERS.Conv2D(4, 2, padding="same"))
    kernel, bias = map(numpy, model.layers[0].weights)
    kpe.freeze(model, activations="dynamic")
    x = normal(3, 6, 5, 3) * np.array([1, 50, 2e-3]).reshape(3, 1, 1, 1)
    x = x.astype("float32")
    twin = keras.ops.conv(
        rounded_inputs(x, (1, 2, 3)), dequantized(kernel, (0, 1, 2)), 1, "same"
    )
    assert_near(outputs_of(model, x), numpy(twin) + bias)


@pytest.mark.full
def test_dynamic_scales_logits_of_a_reversible_embedding():
    layer = LAYERS.ReversibleEmbedding(11, 6)
    layer.build((None,))
    table = normal(11, 6)
    layer._embeddings.assign(table)
    kpe.freeze(layer, activations="dynamic")
    x = spread_inputs(2, 3, 6)
    expected = rounded_inputs(x) @ dequantized(table, (1,)).T
    assert_near(numpy(layer(x, reverse=True)), expected)
    looked_up = numpy(layer(np.array([[3, 0, 10]])))
    np.testing.assert_array_equal(
        looked_up[0], dequantized(table, (1,))[[3, 0, 10]]
    )


@pytest.mark.full
def test_dynamic_scales_inputs_and_states_of_a_recurrent_layer():
    model = sequential((3, 6), LAYERS.SimpleRNN(5, use_bias=False))
    kernel, recurrent = map(numpy, model.layers[0].weights)
    kpe.freeze(model, activations="dynamic")
    x = spread_inputs(2, 3, 6)
    state = np.zeros((2, 5), "float32")
    for step in range(3):
        state = np.tanh(
            rounded_inputs(x[:, step]) @ dequantized(kernel, (0,))
            + rounded_inputs(state) @ dequantized(recurrent, (0,))
        )
    found = outputs_of(model, x)
    # An ulp of float32 may move a state over a boundary of two numbers.
    assert np.linalg.norm(found - state) < 2.0**-4 * np.linalg.norm(state)
    assert np.median(np.abs(found - state)) < 1e-5


def calibrated(x):
    model = sequential((4, 6), LAYERS.Dense(5))
    kpe.convert(model, DELAYED)
    observe_inputs(model, x)
    return model


@pytest.mark.full
def test_static_takes_the_scale_of_calibration():
    seen = normal(8, 4, 6, seed=9)
    model = calibrated(seen)
    kernel, bias = map(numpy, model.layers[0].weights[:2])
    kpe.freeze(model, activations="static")
    scale = np.abs(seen).max() / np.float32(448)
    assert numpy(model.layers[0]._kernel.inputs_scale) == scale
    x = 2 * normal(3, 4, 6)  # Some of it is larger than all that was seen.
    assert np.abs(x).max() > 448 * scale
    expected = rounded_inputs(x, scale=scale) @ dequantized(kernel, (0,))
    assert_near(outputs_of(model, x), expected + bias)


@pytest.mark.full
def test_static_takes_the_largest_amax_of_the_history():
    model = sequential((6,), LAYERS.Dense(5))
    kpe.convert(model, DELAYED)
    for factor in (1, 3, 2):
        observe_inputs(model, factor * np.ones((2, 6), "float32"))
    kpe.freeze(model, activations="static", granularity="tensor")
    scale = numpy(model.layers[0]._kernel.inputs_scale)
    assert scale == np.float32(3) / np.float32(448)


def test_trained_scales_are_kept():
    model = sequential((6,), LAYERS.Dense(5))
    kpe.convert(model, DELAYED)
    model.compile("sgd", "mse")
    model.fit(normal(8, 6), normal(8, 5), epochs=2, verbose=0)
    layer = model.layers[0]
    kept = layer.float8_state.of(layer._kernel).rows()["kernel"][0]
    kernel = numpy(layer._kernel)
    kpe.freeze(model, granularity="tensor", trained_scales=True)
    stored = model.layers[0]._kernel.stored
    np.testing.assert_array_equal(stored.scale, [[kept]])
    assert kept != np.abs(kernel).max() / np.float32(448)
    assert np.abs(stored.dequantized() - kernel).max() <= 2**-4 * 448 * kept


@pytest.mark.parametrize("activations", [None, "dynamic", "static"])
def test_what_is_not_finite_shows_in_its_token_alone(activations):
    model = calibrated(normal(8, 4, 6))
    kpe.freeze(model, activations=activations)
    x = normal(2, 4, 6)
    whole = outputs_of(model, x)
    x[0, 1, 2], x[1, 3, 0] = np.nan, np.inf
    found = outputs_of(model, x)
    bad = np.zeros((2, 4), bool)
    bad[0, 1] = True
    bad[1, 3] = activations != "static"  # There it is bounded.
    assert not np.any(np.isfinite(found[bad]))
    bad[1, 3] = True
    np.testing.assert_allclose(found[~bad], whole[~bad], rtol=1e-5)
    if activations == "static":
        assert np.all(np.isfinite(found[1, 3]))


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_tokens_of_zeros_give_the_bias(activations):
    model = calibrated(normal(8, 4, 6))
    bias = numpy(model.layers[0].bias)
    kpe.freeze(model, activations=activations)
    x = normal(2, 4, 6)
    x[0, 1] = 0
    np.testing.assert_array_equal(outputs_of(model, x)[0, 1], bias)


def test_inputs_in_bfloat16_are_rounded_as_they_are():
    layer = LAYERS.Dense(5, dtype="mixed_bfloat16", use_bias=False)
    model = sequential((6,), layer)
    kernel = numpy(model.layers[0]._kernel)
    kpe.freeze(model, activations="dynamic")
    x = normal(7, 6)
    given = numpy(keras.ops.cast(keras.ops.cast(x, "bfloat16"), "float32"))
    expected = rounded_inputs(given) @ dequantized(kernel, (0,))
    found = outputs_of(model, x)
    # The sum is rounded to bfloat16 once: half an ulp of 2^-7.
    np.testing.assert_allclose(found, expected, rtol=2.0**-8, atol=2.0**-12)


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_gradients_take_rounding_for_the_identity(activations):
    model = calibrated(normal(8, 4, 6))
    kernel = numpy(model.layers[0]._kernel)
    kpe.freeze(model, activations=activations)
    _, found, _ = gradients(
        model, normal(2, 4, 6), lambda y: keras.ops.sum(y * y) / 2
    )
    outputs = outputs_of(model, normal(2, 4, 6))
    assert_near(numpy(found), outputs @ dequantized(kernel, (0,)).T)
