"""Experts of KerasHub's mixtures, whose products are seen by operation."""

import hub_models as hub
import keras
import numpy as np
import pytest
from test_routers import FAMILIES, routers_of

import keras_policy_ext as kpe

BACKEND = keras.backend.backend()
SHARE = 0.95


def mixture(name):
    keras.utils.set_random_seed(0)
    model = FAMILIES[name]()
    rng = np.random.default_rng(2)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:  # Some are zeros at first.
            size = variable.shape[-2] ** -0.5
            variable.assign(rng.normal(size=variable.shape) * size)
    return model


def inputs_of(model):
    tokens, _ = hub.data("llama")
    positions = np.tile(np.arange(hub.LENGTH, dtype="int32"), (hub.BATCH, 1))
    return {
        name: positions if "position" in name else tokens[name]
        for name in model.input
    }


def experts_of(model):
    names = "Experts", "Gemma4MoEBlock"
    return [x for x in hub.layers_of(model) if type(x).__name__.endswith(names)]


@pytest.mark.parametrize("name", FAMILIES)
def test_nearly_all_multiplications_are_in_float8(name):
    model = mixture(name)
    report = kpe.convert(model)
    totals = report.totals
    share = totals.multiplications_in_float8 / totals.multiplications
    assert share >= SHARE
    assert len(experts_of(model)) == 2
    for layer in experts_of(model):
        assert {len(v.shape) for v in layer.float8_contracted} == {3}
        assert len(layer.float8_contracted) in (2, 3)
    for layer in routers_of(model):
        assert type(layer) is keras.layers.Dense


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*((name, "delayed") for name in FAMILIES), ("gpt_oss", "rowwise")],
)
def test_they_train_are_saved_and_come_back(name, recipe, tmp_path):
    model = mixture(name)
    inputs = inputs_of(model)
    kpe.convert(model, recipe)
    model.compile(
        keras.optimizers.Adam(1e-3), "mse", jit_compile=BACKEND == "jax"
    )
    target = np.zeros(model(inputs).shape, "float32")
    losses = [model.train_on_batch(inputs, target) for _ in range(3)]
    assert losses[-1] < losses[0]
    if recipe == "delayed":
        for layer in experts_of(model):
            for state in layer.float8_state.matrices:
                assert np.all(hub.numpy(state).max(axis=1) > 0)

    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        hub.numpy(loaded(inputs)), hub.numpy(model(inputs))
    )
    again = model.train_on_batch(inputs, target)
    assert loaded.train_on_batch(inputs, target) == again

    kept = [hub.numpy(v) for v in kpe.loops.weights(model)]
    kpe.revert(model)
    assert not any(hasattr(x, "float8_state") for x in hub.layers_of(model))
    for variable, value in zip(model.weights, kept, strict=True):
        np.testing.assert_array_equal(hub.numpy(variable), value)


@pytest.mark.parametrize("name", FAMILIES)
def test_frozen_experts_take_a_byte_for_each_number(name, tmp_path):
    model = mixture(name)
    inputs = inputs_of(model)
    tokens = np.random.default_rng(3).normal(size=(6, 16)).astype("float32")
    # Those of Gemma 4 are also given how much each token asks of them.
    several = [tokens, np.ones((6, 4), "float32")]
    call = several if name == "gemma4" else several[:1]
    expected = [hub.numpy(layer(*call)) for layer in experts_of(model)]

    report = kpe.freeze(model)
    frozen = {entry.path for entry in report.converted}
    assert {layer.path for layer in experts_of(model)} <= frozen
    for layer, floats in zip(experts_of(model), expected, strict=True):
        assert len(layer.float8_contracted) in (2, 3)
        for each in layer.float8_contracted:
            experts, summed, _ = each.shape
            assert (experts, each.codes.dtype) == (4, "uint8")
            # Of float32, 0.25 and a scale for each column of an expert.
            scales = int(np.prod(each.scale.shape))
            assert scales * summed == int(np.prod(each.shape))
        found = hub.numpy(layer(*call))
        error = np.linalg.norm(found - floats) / np.linalg.norm(floats)
        assert 1e-4 < error < 0.06

    found = hub.numpy(model(inputs))
    model.save(tmp_path / "model.keras")
    loaded = kpe.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(hub.numpy(loaded(inputs)), found)
