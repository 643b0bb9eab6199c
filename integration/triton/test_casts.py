"""The Triton kernels by its interpreter: codes, layouts, a training step.

What a GPU does is not seen here. Triton compiles the same functions for a
Hopper and a Blackwell GPU in `test_compiled.py`.
"""

import dataclasses
import importlib.util

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch" or not importlib.util.find_spec("triton"):
    pytest.skip(
        "needs PyTorch and Triton: run `tox run -e triton`",
        allow_module_level=True,
    )

import torch

import keras_policy_ext as kpe
from float8_states import SOURCES, assert_settles_as_the_source
from keras_policy_ext import kernels, recipes
from keras_policy_ext.kernels import (
    engines,
    torch_triton_casts,
    torch_triton_scales,
)
from keras_policy_ext.kernels.both_layouts import Known
from keras_policy_ext.kernels.torch_fused import TritonCasts, TritonStates
from keras_policy_ext.numerics import casting, scaling
from keras_policy_ext.numerics.scale_protocol import ScaleRule
from keras_policy_ext.numerics.scale_sources import source_of

FORMATS = ("float8_e4m3fn", "float8_e5m2")
SCALES = (1.0, 0.37, 33000.0, 1e-20, 2.0**-126)


def every_bfloat16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    # As float32: the interpreter reads subnormal bfloat16 as something else.
    return bits.to(torch.int16).view(torch.bfloat16).float().reshape(256, 256)


def hostile():
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 448, 464, 465, 61440]
    x = np.resize([*special, *rng.normal(size=9000)], (145, 70))
    x = x * 2.0 ** rng.integers(-40, 40, x.shape)
    return torch.tensor(x.astype("float32"))


def bits(x):
    return x.view(torch.uint8).numpy()


def quantized(x, scale, format_name=FORMATS[0], unseen=None):
    """Delayed scaling of a matrix, whose scale may be its own."""
    if unseen is not None:
        unseen = torch.tensor(unseen)
    known = Known(torch.tensor(scale), unseen, ScaleRule(inverted=True))
    asked = recipes.Quantization(format=format_name)
    return torch_triton_casts.quantize_both_ways(
        x, asked, known, observe=True, by_integers=True
    )


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("numbers", [every_bfloat16, hostile])
def test_codes_are_those_of_the_reference(numbers, scale, format_name):
    x = numbers()
    found = quantized(x, scale, format_name)
    expected = bits(casting.quantize(x, torch.tensor(scale), format_name))
    # The sign of NaN says nothing.
    sign = np.where(torch.isnan(x), 0x80, 0).astype("uint8")
    np.testing.assert_array_equal(bits(found.values) | sign, expected | sign)
    np.testing.assert_array_equal(bits(found.across).T, bits(found.values))
    assert found.across.is_contiguous()
    assert float(found.scale) == np.float32(scale)
    np.testing.assert_array_equal(found.amax, scaling.amax(x))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 64), (65, 130)])
def test_any_shape_and_any_strides(shape):
    x = torch.randn(shape[1], shape[0]).t()
    found = quantized(x, 0.01)
    expected = casting.quantize(x, torch.tensor(0.01), FORMATS[0])
    np.testing.assert_array_equal(bits(found.values), bits(expected))
    across = bits(expected.t().contiguous())
    np.testing.assert_array_equal(bits(found.across), across)
    assert float(found.amax) == float(x.abs().max())


def test_what_was_not_seen_has_the_scale_of_its_own_amax():
    x = torch.randn(70, 3)
    limit = kpe.formats.get(FORMATS[0]).max
    own = float(scaling.scale_of_multiplier(x.abs().max(), limit))
    assert float(quantized(x, 0.25, unseen=True).scale) == own
    assert float(quantized(x, 0.25, unseen=False).scale) == 0.25


@pytest.mark.parametrize("rounding", ["nearest", "up"])
@pytest.mark.parametrize(
    "amax", [0.0, 1e-45, 2.0**-126, 3e-38, 0.1, 448.0, 3e38, np.inf, np.nan]
)
def test_current_scales_are_those_of_the_reference(amax, rounding):
    x = torch.zeros(5, 6)
    x[2, 3] = amax
    asked = recipes.Quantization(format=FORMATS[1], scale_rounding=rounding)
    known = Known(None, None, ScaleRule(inverted=False))
    found = torch_triton_casts.quantize_both_ways(
        x, asked, known, observe=True, by_integers=True
    )
    expected = scaling.scale_from_amax(
        scaling.amax(x), FORMATS[1], power_of_two=rounding == "up"
    )
    np.testing.assert_array_equal(found.scale, expected)
    np.testing.assert_array_equal(found.amax, np.float32(amax))


@pytest.mark.parametrize("slot", [0, 3, 7, 9])
def test_an_observation_is_that_of_the_source(slot):
    source = source_of(recipes.DelayedScaling(amax_history_length=3))
    amaxes = [torch.tensor(x) for x in (0.5, torch.inf, 0.0)]
    found = torch_triton_scales.observation(source, amaxes, slot)
    np.testing.assert_array_equal(found, source.observation(amaxes, slot))


@pytest.mark.parametrize("recipe", SOURCES, ids=repr)
def test_states_settle_as_in_the_source(recipe):
    assert_settles_as_the_source(
        TritonStates(interpreted=True), source_of(recipe)
    )


@pytest.fixture
def fused(monkeypatch):
    """Native matmuls whose operands are cast by Triton."""
    engine = dataclasses.replace(
        engines.engine(),
        both_layouts=TritonCasts(interpreted=True),
        states=(TritonStates(interpreted=True),),
    )
    monkeypatch.setitem(engines._loaded, "torch", engine)


def passes(recipe, dtype, state, observe=True):
    """All that comes out of a forward and a backward pass."""
    rng = np.random.default_rng(1)
    x, w, g = (
        torch.tensor(rng.normal(size=size).astype("float32"))
        for size in ((3, 5, 32), (32, 48), (3, 5, 48))
    )
    with kernels.prefer("native"):
        plan = kernels.make_plan(
            kernels.Einsum("abc,cd->abd"), recipe, dtype, "float32", True
        )
    x, g = x.to(getattr(torch, dtype)), g.to(getattr(torch, dtype))
    outputs, residuals = plan.forward(x, w, state, observe)
    leaves = residuals.leaves()
    residuals = plan.residuals(leaves, residuals.shapes)
    found = [outputs, *plan.backward(residuals, g, state)[:2]]
    observed = plan.backward(residuals, g, state)[2]
    kept = [residuals.inputs.transposed, residuals.kernel.transposed]
    return [*found, *observed], [each.values[0] for each in kept]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("seen", [False, True])
def test_a_step_has_the_bits_of_separate_casts(
    monkeypatch, name, dtype, seen, request
):
    recipe = recipes.get(name)
    state = ()
    if recipe.history_length:
        shape = source_of(recipe).state_shape
        matrix = torch.zeros(shape)
        matrix[:, 0] = -1.0
        if seen:
            matrix[:, 10] = torch.tensor([3.0, 0.5, 7.0])
        state = (matrix,)
    separate, _ = passes(recipe, dtype, state)
    request.getfixturevalue("fused")
    together, kept = passes(recipe, dtype, state)
    for one, other in zip(separate, together, strict=True):
        np.testing.assert_array_equal(one.float(), other.float())
    # Each lies as its matmul wants it: nothing is copied for that.
    assert all(values.is_contiguous() for values in kept)


def test_inf_marks_the_gradients_of_a_recipe_without_state(fused):
    layer = kpe.layers.Dense(16, dtype="float8/current_from_float32")
    layer.build((None, 16))
    x = torch.ones(16, 16)
    x[3, 4] = torch.inf
    with kernels.prefer("native"):
        outputs = layer(x, training=True)
        outputs.sum().backward()
    assert torch.isfinite(outputs).all()
    assert not torch.isfinite(layer.kernel.value.grad).any()


def test_a_model_trains_the_same(fused, monkeypatch):
    def trained():
        keras.utils.set_random_seed(0)
        policy = "float8_from_float32"
        model = keras.Sequential(
            [kpe.layers.Dense(n, "relu", dtype=policy) for n in (32, 16)]
        )
        model.build((None, 16))
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
        with kernels.prefer("native"):
            losses = [float(model.train_on_batch(x, x)) for _ in range(4)]
        return losses, model.get_weights()

    losses, weights = trained()
    plain = dataclasses.replace(engines.engine(), both_layouts=None, states=())
    monkeypatch.setitem(engines._loaded, "torch", plain)
    expected, expected_weights = trained()
    assert losses == expected
    for one, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(one, other)
