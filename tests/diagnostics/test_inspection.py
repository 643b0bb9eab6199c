"""What `inspect` says of a model."""

import json

import keras
import numpy as np

import keras_policy_ext as kpe
from steps import state_of

POLICY = "float8/4_from_float32"
JIT = keras.backend.backend() == "jax"


def trained():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, name="body"),
            keras.layers.LayerNormalization(name="norm"),
            keras.layers.Dense(2, name="head", dtype="mixed_bfloat16"),
        ],
        name="model",
    )
    kpe.convert(model, POLICY, exclude="head")
    model.compile("sgd", "mse", jit_compile=JIT)
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    for factor in (1.0, 4.0):
        model.fit(factor * x, x[:, :2], batch_size=8, verbose=0)
    return model, x


def test_numbers_are_those_of_the_state():
    model, x = trained()
    (body, norm, head) = kpe.inspect(model).layers
    assert (norm.policy, norm.recipe, norm.operands) == ("float32", None, ())
    assert (head.policy, head.recipe) == ("mixed_bfloat16", None)
    assert (body.path, body.class_name) == ("model/body", "Dense")
    assert body.policy == POLICY
    assert body.kernel == "emulated" and body.reason
    operands = {operand.name: operand for operand in body.operands}
    for name, (scale, history) in state_of(model.layers[0]).items():
        assert operands[name].scale == scale
        assert operands[name].amax == history[0]
    inputs = operands["inputs"]
    assert inputs.format == "float8_e4m3fn"
    assert operands["outputs_grad"].format == "float8_e5m2"
    # Scaled for x in a step that saw 4 x.
    assert abs(inputs.saturation - 4) < 1e-5
    assert inputs.amax == np.float32(4) * np.abs(x).max()


def test_an_inspection_is_a_dict_and_a_table():
    model, _ = trained()
    inspection = kpe.inspect(model)
    json.dumps(inspection.as_dict())
    counted = sum(layer.count_params() for layer in model.layers)
    assert inspection.parameters == counted == 46
    assert inspection.state == 3 * (2 + 8 + 4)
    text = str(inspection)
    assert text.startswith("1 of 3 layers in float8")
    for word in (
        "model/body",
        "model/norm",
        POLICY,
        "outputs_grad",
        "emulated:",
    ):
        assert word in text


def test_layers_without_state_are_shown_too():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    kpe.convert(model, "float8/current_from_float32")
    (dense,) = kpe.inspect(model).layers
    assert "CurrentScaling" in dense.recipe and dense.operands == ()
    assert dense.policy == "float8/current_from_float32"
