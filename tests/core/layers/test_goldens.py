"""Results of peers, reproduced by the layers on every backend."""

import pathlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext.recipes import OPERANDS
from steps import gradients, numpy, state_of

GOLDENS = pathlib.Path(__file__).parents[2] / "goldens"


def close(actual, expected, tolerance):
    """Whether the error's RMS is at most `tolerance` of the expected RMS."""
    error = np.sqrt(np.mean(np.square(numpy(actual) - expected)))
    return error <= tolerance * np.sqrt(np.mean(np.square(expected)))


def ulps(actual, expected):
    spacing = np.spacing(np.abs(np.asarray(expected, "float32")))
    return np.max(np.abs(np.asarray(actual) - expected) / spacing)


def float32_dense(units, inputs, recipe, **kwargs):
    policy = kpe.Float8DTypePolicy("float32", recipe=recipe)
    layer = kpe.layers.Dense(units, use_bias=False, dtype=policy, **kwargs)
    layer.build((None, inputs))
    return layer


def test_delayed_scaling_follows_flax_for_seven_steps():
    golden = np.load(GOLDENS / "delayed_scaling_flax.npz")
    recipe = kpe.recipes.DelayedScaling(
        amax_history_length=4, initial_scale=1.0
    )
    layer = float32_dense(24, 32, recipe)
    layer.kernel.assign(golden["w0"])
    optimizer = keras.optimizers.SGD(0.1)
    for i in range(7):
        target = ops.convert_to_tensor(golden[f"{i}/t"])

        def loss(y, target=target):
            return ops.mean(ops.square(y - target))

        y, dx, grads = gradients(layer, golden[f"{i}/x"], loss)
        np.testing.assert_allclose(
            numpy(loss(y)), golden[f"{i}/loss"], rtol=1e-5
        )
        assert close(y, golden[f"{i}/y"], 1e-5)
        assert close(dx, golden[f"{i}/dx"], 1e-5)
        assert close(grads[0], golden[f"{i}/dw"], 1e-5)
        optimizer.apply(grads, layer.trainable_variables)
        for operand in OPERANDS:
            scale, history = state_of(layer)[operand]
            assert ulps(scale, golden[f"{i}/{operand}_scale"]) <= 1
            assert ulps(history, golden[f"{i}/{operand}_amax_history"]) <= 1


OF_TORCHAO = {
    "tensorwise": "current",
    "rowwise": "rowwise(power_of_two=True)",
    "rowwise_with_gw_hp": (
        "rowwise(power_of_two=True,kernel_grad='high_precision')"
    ),
}


@pytest.mark.parametrize("kind", ["auto", "native", "emulated"])
@pytest.mark.parametrize("name", OF_TORCHAO)
def test_products_equal_torchao_s(name, kind):
    golden = np.load(GOLDENS / "linear_torchao.npz")
    layer = float32_dense(48, 64, OF_TORCHAO[name])
    layer.kernel.assign(golden["kernel"])
    g = ops.convert_to_tensor(golden["g"])
    with kpe.kernels.prefer(kind):
        y, dx, (dw,) = gradients(
            layer, golden["x"], lambda y: ops.sum(ops.multiply(y, g))
        )
    assert close(y, golden[f"{name}/y"], 1e-6)
    assert close(dx, golden[f"{name}/dx"], 1e-6)
    assert close(dw, golden[f"{name}/dkernel"], 1e-6)
