"""Products with large kernels, which JAX widens part by part on a CPU."""

import keras
import numpy as np
import pytest

import keras_policy_ext as kpe
from steps import normal, numpy

LAYERS = {
    "dense": (lambda: keras.layers.Dense(2048), (3, 1024), "ab,bc->ac"),
    "no part divides it": (
        lambda: keras.layers.Dense(2053),
        (3, 1024),
        "ab,bc->ac",
    ),
    "heads": (
        lambda: keras.layers.EinsumDense("abc,cde->abde", (5, 16, 128)),
        (2, 5, 1024),
        "abc,cde->abde",
    ),
    "out of heads": (
        lambda: keras.layers.EinsumDense("abde,dec->abc", (5, 1024)),
        (2, 5, 16, 128),
        "abde,dec->abc",
    ),
    "channels before positions": (
        lambda: keras.layers.EinsumDense("abc,cd->adb", (2048, 5)),
        (2, 5, 1024),
        "abc,cd->adb",
    ),
}


@pytest.mark.full_except("dense-tensor-None", "no part divides it-tensor-None")
@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.parametrize("granularity", ["channel", "tensor", "block"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.slow_except(
    "no part divides it-tensor-dynamic",
    "out of heads-tensor-None",
    "channels before positions-tensor-None",
    "heads-channel-dynamic",
    "heads-tensor-None",
    "channels before positions-tensor-dynamic",
    "dense-block-None",
    "dense-channel-dynamic",
    "heads-block-None",
    "no part divides it-block-None",
)
def test_parts_make_the_whole(name, granularity, activations):
    make, shape, equation = LAYERS[name]
    layer = make()
    layer.build(shape)
    kpe.freeze(layer, granularity=granularity, activations=activations)
    kernel = layer._kernel.stored.dequantized()
    x = normal(*shape)
    found = numpy(layer(x))
    if activations:
        axes = tuple(
            axis
            for axis, letter in enumerate(equation.split(",")[0])
            if letter not in equation.split("->")[1]
        )
        scale = np.abs(x).max(axes, keepdims=True) / np.float32(448)
        number = keras.ops.cast(x / scale, "float8_e4m3fn")
        x = numpy(keras.ops.cast(number, "float32")) * scale
    wanted = np.einsum(equation, x, kernel)
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert found.shape == wanted.shape and error < 1e-5


@pytest.mark.skipif(
    keras.backend.backend() != "jax",
    reason="XLA says what it plans for a program of JAX",
)
def test_no_more_than_a_part_of_a_kernel_is_in_floats():
    import jax

    layers = [keras.layers.Dense(2048, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((2048,)), *layers])
    kpe.freeze(model)
    weights = [
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
        )
    ]

    def gradient(weights, x):
        def total(x):
            return model.stateless_call(*weights, x)[0].sum()

        return jax.value_and_grad(total)(x)

    compiled = jax.jit(gradient).lower(weights, normal(8, 2048)).compile()
    planned = compiled.memory_analysis().temp_size_in_bytes
    assert planned < 4 * 2048 * 2048
