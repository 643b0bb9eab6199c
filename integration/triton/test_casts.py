"""The Triton kernels by its interpreter: codes, layouts, a training step.

What a GPU does is not seen here. Triton compiles the same functions for a
Hopper and a Blackwell GPU in `test_compiled.py`.
"""

import copy
import dataclasses
import gc
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
from torch_counts import dense_step

import keras_policy_ext as kpe
from float8_states import SOURCES, assert_settles_as_the_source
from keras_policy_ext import backends, contractions, kernels, recipes
from keras_policy_ext.backends.both_layouts import ScaleHint, Wanted
from keras_policy_ext.backends.torch import triton_casts
from keras_policy_ext.backends.torch.backend import BACKEND
from keras_policy_ext.backends.torch.casts import TritonCasts
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.ext.delayed.torch import kernels as state_kernels
from keras_policy_ext.ext.delayed.torch import observations, triton_states
from keras_policy_ext.ext.delayed.torch.kernels import TritonStates
from keras_policy_ext.numerics import casting, scaling
from keras_policy_ext.numerics.scale_sources import ScaleRule, source_of

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


@pytest.fixture(autouse=True)
def _memory_starts_as_nan():
    """What no kernel writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def quantized(x, scale, format_name=FORMATS[0], unseen=None, seen_lately=False):
    """Delayed scaling of a matrix, whose scale may be its own."""
    if unseen is not None:
        unseen = torch.tensor(unseen)
    rule = ScaleRule(by_multiplier=True)
    known = ScaleHint(torch.tensor(scale), unseen, rule, seen_lately)
    asked = recipes.Quantization(format=format_name)
    return triton_casts.quantize_both_ways(
        x, asked, known, Wanted(amax=True), by_integers=True
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
    np.testing.assert_array_equal(found.amax.amax(), scaling.amax(x))


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 64), (65, 130)])
def test_any_shape_and_any_strides(shape):
    x = torch.randn(shape[1], shape[0]).t()
    found = quantized(x, 0.01)
    expected = casting.quantize(x, torch.tensor(0.01), FORMATS[0])
    np.testing.assert_array_equal(bits(found.values), bits(expected))
    across = bits(expected.t().contiguous())
    np.testing.assert_array_equal(bits(found.across), across)
    assert float(found.amax.max()) == float(x.abs().max())


def test_each_tile_has_its_amax():
    x = torch.randn(130, 70)
    found = quantized(x, 0.01).amax.reshape(3, 2)
    tiles = [[t.abs().max() for t in r.split(64, 1)] for r in x.split(64)]
    np.testing.assert_array_equal(found, np.array(tiles))


@pytest.mark.parametrize("shape", [(70, 3), (130, 200), (1, 70)])
@pytest.mark.parametrize("seen_lately", [False, True])
def test_what_was_not_seen_has_the_scale_of_its_own_amax(shape, seen_lately):
    x = torch.randn(shape[1], shape[0]).t()
    x[0, 2] = -30.0
    x[-1, -1] = 50.0
    limit = kpe.formats.get(FORMATS[0]).max
    own = scaling.scale_of_multiplier(x.abs().max(), limit)
    for unseen, scale in ((True, own), (False, torch.tensor(0.25))):
        found = quantized(x, 0.25, unseen=unseen, seen_lately=seen_lately)
        assert float(found.scale) == float(scale)
        expected = casting.quantize(x, scale, FORMATS[0])
        np.testing.assert_array_equal(bits(found.values), bits(expected))
        assert float(found.amax.max()) == 50.0


@pytest.mark.parametrize("rounding", ["nearest", "up"])
@pytest.mark.parametrize(
    "amax", [0.0, 1e-45, 2.0**-126, 3e-38, 0.1, 448.0, 3e38, np.inf, np.nan]
)
def test_current_scales_are_those_of_the_reference(amax, rounding):
    x = torch.zeros(5, 6)
    x[2, 3] = amax
    asked = recipes.Quantization(format=FORMATS[1], scale_rounding=rounding)
    known = ScaleHint(None, None, ScaleRule(by_multiplier=False))
    found = triton_casts.quantize_both_ways(
        x, asked, known, Wanted(amax=True), by_integers=True
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
    found = triton_states.observation(source, amaxes, slot)
    np.testing.assert_array_equal(found, source.observation(amaxes, slot))


@pytest.mark.parametrize("last", [0.25, np.inf, np.nan])
def test_an_observation_is_of_the_largest_amax_of_an_operand(last):
    source = source_of(recipes.DelayedScaling(amax_history_length=3))
    parts = torch.rand(9000) + 1.0
    parts[4500], parts[-1] = 7.0, last
    wholes = torch.tensor(0.5), parts.amax(), torch.tensor(3.0)
    found = triton_states.observation(
        source, [wholes[0], parts, wholes[2][None]], 2
    )
    np.testing.assert_array_equal(found, source.observation([*wholes], 2))


@pytest.mark.parametrize("recipe", SOURCES, ids=repr)
def test_states_settle_as_in_the_source(recipe):
    assert_settles_as_the_source(
        TritonStates(interpreted=True), source_of(recipe)
    )


@pytest.fixture
def fused(monkeypatch):
    """Native matmuls whose operands are cast by Triton, as on a GPU."""
    # Where a flag could be read only by waiting for it.
    monkeypatch.setattr(BACKEND, "known_any", lambda flags: None)
    engine = dataclasses.replace(
        backends.engine,
        both_layouts=TritonCasts(interpreted=True),
    )
    interpreted = (TritonStates(interpreted=True),)
    monkeypatch.setattr(frameworks.current, "kernels", interpreted)
    monkeypatch.setattr(backends, "engine", engine)


def passes(recipe, dtype, state, observe=True):
    """All that comes out of a forward and a backward pass."""
    rng = np.random.default_rng(1)
    x, w, g = (
        torch.tensor(rng.normal(size=size).astype("float32"))
        for size in ((3, 5, 32), (32, 48), (3, 5, 48))
    )
    with kernels.prefer("native"):
        plan = contractions.make_plan(
            contractions.Einsum("abc,cd->abd"), recipe, dtype, "float32", True
        )
    x, g = x.to(getattr(torch, dtype)), g.to(getattr(torch, dtype))
    outputs, residuals = plan.bound.forward(x, w, state, observe)
    leaves = residuals.leaves()
    residuals = plan.bound.residuals(leaves, residuals.shapes)
    found = [outputs, *plan.bound.backward(residuals, g, state)[:2]]
    observed = plan.bound.backward(residuals, g, state)[2]
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
    if recipe.remembers:
        shape = source_of(recipe).state_shape
        matrix = torch.zeros(shape)
        matrix[:, 0] = VALID_MARK
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


LAUNCHED = {
    triton_casts: ("amax", "cast", "edges", "cast_rows", "sums"),
    triton_states: ("history", "observation", "settle"),
}


@pytest.fixture
def launched(fused, monkeypatch):
    """The names of what is launched, as the counter writes them."""
    found = []

    class Noting:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel
            self.arg_names = kernel.arg_names

        def __getitem__(self, grid):
            found.append(f"triton {self.name}")
            return self.kernel[grid]

    for module, names in LAUNCHED.items():
        for name in names:
            kernel = getattr(module, f"{name}_kernel")
            noting = Noting(name, kernel)
            monkeypatch.setattr(module, f"{name}_kernel", noting)
    zero = triton_casts._zero

    def zeros(x):
        found.append("zeros")
        return zero(x)

    monkeypatch.setattr(triton_casts, "_zero", zeros)
    return found


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_the_counter_counts_what_is_launched(launched, monkeypatch, name):
    """Where the path is not straight, as in a layer of odd sizes."""
    general = dataclasses.replace(backends.engine, straight=lambda bound: None)
    monkeypatch.setattr(backends, "engine", general)
    layer = kpe.layers.Dense(32, dtype=f"float8/{name}_from_mixed_bfloat16")
    layer.build((None, 48))
    optimizer = keras.optimizers.SGD()
    optimizer.build(layer.trainable_variables)
    steps = []
    for _ in range(3):
        launched.clear()
        with kernels.prefer("native"):
            layer(torch.ones(16, 48), training=True).sum().backward()
        gradients = [v.value.grad for v in layer.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, layer.trainable_variables)
        layer.zero_grad()
        steps.append(list(launched))
    for step, seen_lately in zip(steps, (False, True, True), strict=True):
        counted = dense_step(4096, name, True, seen_lately)
        ours = [k.name for k in counted if k.name in {"zeros", *step}]
        assert step == ours
        assert [k.name for k in counted].count("triton cast") == 3


def state_of(layer):
    return layer.float8_state.matrices[0]


def test_a_state_that_is_put_back_is_noticed(launched, monkeypatch):
    """By the casts too, of which the host was told that all were seen."""
    layer = kpe.layers.Dense(32, use_bias=False, dtype="float8_from_float32")
    layer.build((None, 48))
    state = state_of(layer)
    before = state.value.detach().clone()
    x = torch.randn(16, 48)

    def step():
        launched.clear()
        with kernels.prefer("native"):
            y = layer(x, training=True)
            y.backward(torch.ones_like(y))
        gradient, layer.kernel.value.grad = layer.kernel.value.grad, None
        kpe.loops.settle(layer)
        return y.detach(), gradient

    first = step()
    assert launched.count("triton amax") == 3
    step()
    assert launched.count("triton amax") == 0
    with monkeypatch.context() as later:
        # The host is ahead of the GPU, and knows of it what it told before.
        later.setattr(observations, "host_flags", lambda state: None)
        state.value.data.copy_(before)
        again = step()
        assert launched.count("triton amax") == 0
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)
    state.assign(before.numpy())
    assert not observations.seen_lately(state.value)
    again = step()
    assert launched.count("triton amax") == 3
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("writes", [True, False])
def test_whether_a_kernel_tells_the_host_is_tried(monkeypatch, writes):
    zeros, flags = torch.zeros, observations.pinned_flags
    monkeypatch.setattr(torch, "zeros", lambda shape, device: zeros(shape))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        observations, "pinned_flags", lambda count: flags(count, False)
    )
    if not writes:
        scales = triton_states.history_scales
        monkeypatch.setattr(
            triton_states,
            "history_scales",
            lambda *args: scales(*args[:2]),
        )
    state_kernels.tells_the_host.cache_clear()
    try:
        assert state_kernels.tells_the_host() == writes
    finally:
        state_kernels.tells_the_host.cache_clear()


def test_that_no_kernel_tells_the_host_is_said(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no such memory")

    monkeypatch.setattr(torch, "zeros", fails)
    state_kernels.tells_the_host.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no such memory"):
            assert not state_kernels.tells_the_host()
    finally:
        state_kernels.tells_the_host.cache_clear()


def test_a_copy_of_a_layer_is_told_of_its_own_state(fused):
    layer = kpe.layers.Dense(32, dtype="float8_from_float32")
    layer.build((None, 48))
    other = copy.deepcopy(layer)
    with kernels.prefer("native"):
        for _ in range(2):
            layer(torch.ones(16, 48), training=True).sum().backward()
            kpe.loops.settle(layer)
            layer(torch.ones(16, 48), training=True)
    told = observations.seen_lately
    assert told(state_of(layer).value)
    assert not told(state_of(other).value)
    assert not told(state_of(copy.deepcopy(layer)).value)


def test_memory_for_what_is_told_is_used_again(monkeypatch):
    made, flags = [], observations.pinned_flags

    def pinned_flags(*args):
        made.append(flags(*args))
        return made[-1]

    monkeypatch.setattr(observations, "_FREE", [])
    monkeypatch.setattr(observations, "pinned_flags", pinned_flags)
    for _ in range(3):
        layer = kpe.layers.Dense(4, dtype="float8_from_float32")
        layer.build((None, 8))
        state = state_of(layer).value
        told = observations.host_flags(state)
        assert not observations.seen_lately(state)
        told.fill_(False)  # as a kernel does
        assert observations.seen_lately(state)
        del layer, state
        gc.collect()
    assert len(made) == 1


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
            [
                # The sums that are a bias's gradient have another order.
                kpe.layers.Dense(n, "relu", use_bias=False, dtype=policy)
                for n in (32, 16)
            ]
        )
        model.build((None, 16))
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
        with kernels.prefer("native"):
            losses = [float(model.train_on_batch(x, x)) for _ in range(4)]
        return losses, model.get_weights()

    losses, weights = trained()
    plain = dataclasses.replace(backends.engine, both_layouts=None)
    monkeypatch.setattr(frameworks.current, "kernels", ())
    monkeypatch.setattr(backends, "engine", plain)
    expected, expected_weights = trained()
    assert losses == expected
    for one, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(one, other)
