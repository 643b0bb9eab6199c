"""What `inspect` says of a model."""

import json

import keras
import numpy as np
import pytest

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


@pytest.mark.full
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


def test_an_inspection_is_a_dict_and_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    model, _ = trained()
    inspection = kpe.inspect(model)
    json.dumps(inspection.as_dict())
    counted = sum(layer.count_params() for layer in model.layers)
    assert inspection.parameters == counted == 46
    assert inspection.state == 3 * (2 + 8 + 4)
    text = inspection.table(full=True)
    assert "1 of 2 layers with a kernel" in text
    for word in (
        "model/body",
        "model/norm",
        POLICY,
        "outputs_grad",
        "emulated:",
        "46 parameters, and 42 numbers of float8 state; Keras counts 88",
    ):
        assert word in text


def test_the_short_table_has_a_row_for_each_class_and_policy(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = str(kpe.inspect(trained()[0]))
    # 24 of 32 multiplications, and of 46 parameters.
    assert text.splitlines()[0] == (
        "75.0 % of the multiplications and 52.2 % of the parameters are in "
        "float8"
    )
    body, head = (line for line in text.splitlines() if " Dense " in line)
    assert "emulated" in body and body.endswith(POLICY)
    assert " 4 " in body  # Scaled for x in a step that saw 4 x.
    assert head.endswith("mixed_bfloat16")
    assert "emulated: " in text and "42 numbers of float8 state" in text
    assert "LayerNormalization" not in text and "outputs_grad" not in text
    assert text.endswith("Every layer: inspection.table(full=True)")


def test_columns_without_content_are_left_out():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    text = str(kpe.inspect(model))
    assert text.startswith("0 % of the multiplications and 0 %")
    assert "policy" in text
    assert "kernel  " not in text and "saturation" not in text


@pytest.mark.full_except("60")
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_tables_are_as_wide_as_the_terminal(width, monkeypatch):
    model, _ = trained()
    inspection = kpe.inspect(model)
    monkeypatch.setenv("COLUMNS", str(width))
    for full, least in ((False, 60), (True, 75)):
        text = inspection.table(full=full)
        assert max(map(len, text.splitlines())) <= max(width, least)
    for layer in inspection.layers:
        assert layer.path in text


def test_notebooks_get_a_table():
    page = kpe.inspect(trained()[0])._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 1
    assert page.count("<tr>") == 3
    assert POLICY in page


def test_layers_without_state_are_shown_too():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    kpe.convert(model, "float8/current_from_float32")
    (dense,) = kpe.inspect(model).layers
    assert "CurrentScaling" in dense.recipe and dense.operands == ()
    assert dense.policy == "float8/current_from_float32"


@pytest.mark.parametrize(
    "model",
    [
        lambda: keras.Sequential([keras.layers.Dense(4)]),
        lambda: keras.layers.Dense(4),
        lambda: keras.layers.Dense(4, dtype="mixed_float8"),
    ],
    ids=["model", "layer", "float8"],
)
def test_what_is_not_built_is_said_to_be_so(model):
    text = str(kpe.inspect(model()))
    assert text.startswith("The model is not built")
    assert "No layer with a kernel" not in text


def test_a_built_model_without_kernels_has_none():
    model = keras.Sequential([keras.Input((4,)), keras.layers.ReLU()])
    assert str(kpe.inspect(model)).startswith("No layer with a kernel")
