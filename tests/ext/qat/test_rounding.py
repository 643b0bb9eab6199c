"""Kernels on a grid: the numbers that `freeze` stores, on every backend."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext import contractions, recipes, stored_kernels
from keras_policy_ext.ext.qat import rounding
from keras_policy_ext.stored_kernels import Axes
from steps import normal, numpy

SPECS = (
    "int8",
    "int4",
    "int4(group=32)",
    "int3(group=64)",
    "int2(group=128)",
    "int4(group=32,clip=0.75)",
    "float8_e4m3fn",
    "int8(scale_format='bfloat16')",
    "int4(group=32,clip=0.75,scale_format='bfloat16')",
    "int4(group=32,scale_format='float8_e8m0fnu')",
    "int2(clip=0.9,scale_format='float8_e8m0fnu')",
    "float8_e4m3fn(scale_format='bfloat16')",
    "float4_e2m1fn",
    "float4_e2m1fn(group=32,scale_format='float8_e8m0fnu')",
    "float4_e2m1fn(group=None,clip=0.9,scale_format='float32')",
    "int4(group=16,clip=0.75,scale_format='float8_e4m3fn')",
)

KERNELS = {
    "a matrix": ((96, 24), Axes((0,), (1,))),
    "its transpose": ((24, 96), Axes((1,), (0,))),
    "a part of a group": ((45, 5), Axes((0,), (1,))),
    "two axes summed": ((4, 16, 5), Axes((0, 1), (2,))),
    "a window": ((3, 3, 20, 5), Axes((0, 1, 2), (3,))),
    "with a batch": ((3, 40, 8), Axes((1,), (0, 2))),
}


def of(spec):
    return recipes.get(spec).grid


def stored_values(kernel, axes, grid):
    """What `freeze` stores of a kernel, float32."""
    how = grid.granularity, grid.weights
    form = grid.scale_format
    scales = stored_kernels.clipped_scales(
        kernel, axes, *how, (grid.clip,), form
    )
    return stored_kernels.quantize(
        kernel, axes, *how, scales, form
    ).dequantized()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", KERNELS)
def test_a_rounded_kernel_is_the_stored_one_to_the_bit(kind, spec):
    shape, axes = KERNELS[kind]
    kernel = normal(*shape) * np.exp2(np.round(4 * normal(*shape, seed=1)))
    kernel[..., 0] = 0
    values, _ = rounding.rounded_kernel(
        ops.convert_to_tensor(kernel), axes, of(spec)
    )
    np.testing.assert_array_equal(
        numpy(values), stored_values(kernel, axes, of(spec))
    )


def gradients(function, *arrays):
    """The gradients of the sum of a function's outputs."""
    name = keras.backend.backend()
    if name == "jax":
        import jax

        total = lambda *x: function(*x).sum()  # noqa: E731
        return jax.grad(total, tuple(range(len(arrays))))(*arrays)
    tensors = [ops.convert_to_tensor(each) for each in arrays]
    if name == "torch":
        import torch

        tensors = [each.detach().requires_grad_() for each in tensors]
        return torch.autograd.grad(function(*tensors).sum(), tensors)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(tensors)
        total = tf.reduce_sum(function(*tensors))
    return tape.gradient(total, tensors)


@pytest.mark.parametrize(
    "spec",
    ["int4(group=32,inputs='int8')", "int4(clip=1.0)", "float4_e2m1fn"],
)
def test_gradients_pass_straight_through(spec):
    contraction = contractions.Einsum("ab,bc->ac")
    x, kernel, weights = normal(6, 64), normal(64, 8, seed=1), normal(6, 8)

    def loss(x, kernel):
        given = of(spec), contraction, x, kernel, Axes((0,), (1,)), ()
        x, kernel = rounding.on_grid(*given)
        return ops.multiply(ops.matmul(x, kernel), weights)

    kernel_read = stored_values(kernel, Axes((0,), (1,)), of(spec))
    x_read = x
    if of(spec).inputs:
        scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
        x_read = np.rint(x / scale) * scale
    of_inputs, of_kernel = map(numpy, gradients(loss, x, kernel))
    np.testing.assert_allclose(
        of_inputs, weights @ kernel_read.T, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(
        of_kernel, x_read.T @ weights, rtol=1e-5, atol=1e-5
    )


def test_a_clipped_value_has_no_gradient():
    grid = of("int4(clip=0.5)")
    kernel = np.array([[1.0], [0.5], [0.53], [0.6], [-0.9], [0.1]], "float32")
    contraction = contractions.Einsum("ab,bc->ac")

    def loss(kernel):
        given = np.ones((1, 6), "float32"), kernel, Axes((0,), (1,)), ()
        return rounding.on_grid(grid, contraction, *given)[1]

    (gradient,) = gradients(loss, kernel)
    # The scale is 0.5 / 7: up to 7.5 of it still round to 7.
    np.testing.assert_array_equal(numpy(gradient)[:, 0], [0, 1, 1, 0, 0, 1])


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "spec, clip",
    [
        ("int4", 0.9),
        ("int3", 0.9),
        ("int4(clip=1.0)", 1.0),
        ("int4(group=32)", 1.0),
        ("int8", 1.0),
        ("float8_e4m3fn", 1.0),
        ("float4_e2m1fn", 1.0),
    ],
)
def test_channels_in_few_bits_are_clipped_by_default(spec, clip):
    assert of(spec).clip == clip
    assert recipes.get(spec).spec == spec


def test_what_is_not_finite_shows():
    for value in (np.nan, np.inf):
        kernel = normal(64, 4)
        kernel[3, 1] = value
        values, _ = rounding.rounded_kernel(
            ops.convert_to_tensor(kernel), Axes((0,), (1,)), of("int4")
        )
        assert np.isnan(numpy(values)[:, 1]).all()
        assert np.isfinite(numpy(values)[:, [0, 2, 3]]).all()


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "field",
    [
        {"group": 7},
        {"group": True},
        {"inputs": "int4"},
        {"clip": 0.0},
        {"clip": 2},
        {"clip": True},
        {"delay": -1},
        {"scale_format": "float16"},
    ],
)
def test_a_wrong_field_is_refused(field):
    with pytest.raises(ValueError, match="Allowed") as error:
        recipes.deserialize({"name": "int4", **field})
    assert "Received" in str(error.value)


@pytest.mark.any_backend
def test_inputs_that_no_frozen_kernel_has_are_refused():
    for call in (
        lambda: recipes.get("float4_e2m1fn(inputs='int8')"),
        lambda: recipes.get("float8_e4m3fn(inputs='int8')"),
        lambda: kpe.freeze(
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]),
            weights="float4_e2m1fn",
            activations="dynamic",
        ),
    ):
        with pytest.raises(ValueError, match="Received: weights=") as error:
            call()
        assert "Allowed" in str(error.value)


@pytest.mark.any_backend
def test_names_of_policies_round_trip():
    name = "qat/int4(group=32,inputs='int8')_from_mixed_bfloat16"
    policy = kpe.get(name)
    assert policy.full_name == name
    assert policy.mode == "qat"
    assert kpe.deserialize(kpe.serialize(policy)) == policy
    assert keras.dtype_policies.get(name) == policy
    assert "int4" not in kpe.recipes.names()
    assert "int4" in kpe.recipes.names("qat")


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "name, right",
    [
        ("qat/current_from_float32", "float8/current_from_float32"),
        ("float8/int4_from_float32", "qat/int4_from_float32"),
        ("integers/frozen_from_float32", "float8/frozen_from_float32"),
    ],
)
def test_another_first_word_is_refused(name, right):
    with pytest.raises(ValueError, match="Received") as error:
        kpe.get(name)
    assert f"Allowed: {right!r}" in str(error.value)


@pytest.mark.any_backend
def test_frozen_integers_have_a_name_and_the_one_of_earlier_files():
    spec = "frozen(weights='int4',per='group32')_from_float32"
    policy = kpe.get(f"integers/{spec}")
    assert policy.full_name == f"integers/{spec}"
    assert policy.mode == "integers"
    earlier = kpe.get(f"float8/{spec}")
    assert earlier == policy
    assert earlier.full_name == policy.full_name
    assert kpe.deserialize(kpe.serialize(policy)) == policy


@pytest.mark.any_backend
def test_a_name_of_keras_stays_that_of_keras():
    policy = kpe.get("int8_from_float32")
    assert isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy)
    assert kpe.get("int8").compute_dtype == "int8"
