"""One step of a recurrent cell in float8, against NumPy."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import reference
from recurrent import BATCH, FEATURES, UNITS, assert_close
from saving_models import (
    float8,
    own_weights,
)
from steps import gradients, normal, numpy


def cell_of(name, source="float32", **kwargs):
    keras.utils.set_random_seed(0)
    policy = float8(source, recipe="current")
    cell = getattr(kpe.layers, name)(
        UNITS, bias_initializer="normal", dtype=policy, **kwargs
    )
    cell.build((None, FEATURES))
    return cell


class Once(keras.Model):
    """One step of a cell; inputs and states in one tensor."""

    def __init__(self, cell):
        super().__init__(dtype=cell.dtype_policy)
        self.cell = cell
        self.states = len(keras.tree.flatten(cell.state_size))
        self.build((None, FEATURES + self.states * UNITS))

    def build(self, input_shape):
        pass

    def call(self, x, training=None):
        cuts = [FEATURES + i * UNITS for i in range(self.states)]
        x, *states = ops.split(x, cuts, axis=1)
        return self.cell(x, states, training=training)[0]


def quantized(x, dtype):
    scale = reference.scale_from_amax(reference.amax(x), dtype)
    return reference.quantize_dequantize(x, scale, dtype)


e4m3 = functools.partial(quantized, dtype="float8_e4m3fn")
e5m2 = functools.partial(quantized, dtype="float8_e5m2")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def columns(x, count):
    return np.split(x, count, axis=-1)


def emulated(name, x, states, weights, g, reset_after=True):
    """Outputs, gradients of inputs, states but the carry, and weights."""
    kernel, recurrent, bias = weights
    kernel_q, recurrent_q, x_q = e4m3(kernel), e4m3(recurrent), e4m3(x)
    (h, *carry), inner_bias = states, 0.0
    if name == "GRUCell" and reset_after:
        bias, inner_bias = bias
    z = x_q @ kernel_q + bias
    inner = e4m3(h) @ recurrent_q + inner_bias
    h_grad = recurrent_grad = 0.0
    if name == "SimpleRNNCell":
        y = np.tanh(z + inner)
        dz = d_inner = g * (1 - y**2)
    elif name == "LSTMCell":
        i, f, c, o = columns(z + inner, 4)
        i, f, c, o = sigmoid(i), sigmoid(f), np.tanh(c), sigmoid(o)
        new = f * carry[0] + i * c
        y = o * np.tanh(new)
        d_new = g * o * (1 - np.tanh(new) ** 2)
        parts = [
            d_new * c * i * (1 - i),
            d_new * carry[0] * f * (1 - f),
            d_new * i * (1 - c**2),
            g * np.tanh(new) * o * (1 - o),
        ]
        dz = d_inner = np.concatenate(parts, axis=-1)
    else:
        u, r = (
            sigmoid(a + b)
            for a, b in zip(columns(z, 3)[:2], columns(inner, 3), strict=False)
        )
        third = recurrent_q[:, -UNITS:]
        reset = e4m3(r * h) @ third
        if reset_after:
            reset = r * columns(inner, 3)[2]
        candidate = np.tanh(columns(z, 3)[2] + reset)
        y = u * h + (1 - u) * candidate
        d_candidate = g * (1 - u) * (1 - candidate**2)
        d_reset = d_candidate * columns(inner, 3)[2]
        if not reset_after:
            d_reset = e5m2(d_candidate) @ third.T * h
        gates = [
            g * (h - candidate) * u * (1 - u),
            d_reset * r * (1 - r),
        ]
        dz = np.concatenate([*gates, d_candidate], axis=-1)
        d_inner = np.concatenate([*gates, d_candidate * r], axis=-1)
        h_grad = g * u
        if not reset_after:
            d_inner = np.concatenate(gates, axis=-1)
            h_grad = h_grad + e5m2(d_candidate) @ third.T * r
            recurrent_grad = [e4m3(r * h).T @ e5m2(d_candidate)]
    h_grad = h_grad + e5m2(d_inner) @ recurrent_q[:, : d_inner.shape[1]].T
    grads = [e4m3(h).T @ e5m2(d_inner)]
    grads += recurrent_grad if isinstance(recurrent_grad, list) else []
    bias_grad = dz.sum(0)
    if name == "GRUCell" and reset_after:
        bias_grad = np.stack([bias_grad, d_inner.sum(0)])
    x_grad = np.concatenate([e5m2(dz) @ kernel_q.T, h_grad], axis=1)
    recurrent_grad = np.concatenate(grads, axis=1)
    return y, x_grad, [x_q.T @ e5m2(dz), recurrent_grad, bias_grad]


@pytest.mark.full_except("SimpleRNNCell-options3")
@pytest.mark.parametrize(
    "name, options",
    [
        ("LSTMCell", {}),
        ("GRUCell", {}),
        ("GRUCell", {"reset_after": False}),
        ("SimpleRNNCell", {}),
    ],
)
def test_a_step_is_that_of_quantized_kernels_inputs_and_states(name, options):
    model = Once(cell_of(name, **options))
    width = FEATURES + model.states * UNITS
    x, g = normal(BATCH, width, seed=1), normal(BATCH, UNITS, seed=2)
    parts = np.split(x, range(FEATURES, width, UNITS), axis=1)
    expected = emulated(
        name, parts[0], parts[1:], map(numpy, own_weights(model)), g, **options
    )
    outputs, x_grad, grads = gradients(
        model, x, lambda y: ops.sum(ops.multiply(y, g)), compiled=True
    )
    assert model.cell.quantization_mode == "float8"
    y, expected_x_grad, expected_grads = expected
    assert_close([outputs], [y])
    reached = slice(0, FEATURES + UNITS)
    assert_close([numpy(x_grad)[:, reached]], [expected_x_grad])
    assert_close(grads, expected_grads)


@pytest.mark.full
def test_a_step_in_bfloat16_is_that_in_float32_but_for_roundings():
    x = normal(BATCH, FEATURES + 2 * UNITS, seed=1)
    x = numpy(ops.cast(ops.cast(x, "bfloat16"), "float32"))
    g = normal(BATCH, UNITS, seed=2)
    half, whole = (
        gradients(
            Once(cell_of("LSTMCell", source)),
            x,
            lambda y: ops.sum(ops.multiply(ops.cast(y, "float32"), g)),
            compiled=True,
        )
        for source in ("mixed_bfloat16", "float32")
    )
    assert keras.backend.standardize_dtype(half[0].dtype) == "bfloat16"
    # A gate is off by some roundings, 2**-9 each; a gradient that lies near
    # the middle of two codes by one step of e5m2, at most a quarter of it.
    outputs = numpy(ops.cast(half[0], "float32"))
    np.testing.assert_allclose(outputs, numpy(whole[0]), rtol=0, atol=2**-6)
    for one, other in zip(half[2], whole[2], strict=True):
        error = np.linalg.norm(numpy(one) - numpy(other))
        assert error <= 0.25 * np.linalg.norm(numpy(other))


@pytest.mark.full_except("dropout-SimpleRNNCell-options2")
@pytest.mark.parametrize(
    "name, options",
    [
        ("LSTMCell", {}),
        ("GRUCell", {"reset_after": False}),
        ("SimpleRNNCell", {}),
    ],
)
@pytest.mark.parametrize("which", ["dropout", "recurrent_dropout"])
def test_a_float8_cell_drops_what_the_stock_one_drops(name, options, which):
    x, *states = (normal(BATCH, n, seed=n) for n in (FEATURES, UNITS, UNITS))
    states = states[: 2 if name == "LSTMCell" else 1]
    outputs = {}
    for layers, policy in (
        (keras.layers, None),
        (kpe.layers, float8(recipe="current")),
    ):
        for training in (False, True):
            keras.utils.set_random_seed(1)
            cell = getattr(layers, name)(
                UNITS, dtype=policy, **{which: 0.5}, **options
            )
            outputs[layers, training] = numpy(
                cell(x, states, training=training)[0]
            )
    dropped = outputs[kpe.layers, True]
    error = np.linalg.norm(dropped - outputs[keras.layers, True])
    effect = np.linalg.norm(dropped - outputs[keras.layers, False])
    assert error < 0.2 * effect
