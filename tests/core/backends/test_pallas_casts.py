"""JAX: the Pallas kernels that cast, by Pallas's interpreter.

What a GPU does is not seen here: `integration/lowering` compiles the kernels
for one, and `integration/benchmarks/jax_on_card.py` runs them there.
"""

import dataclasses
import itertools
import warnings

import keras
import pytest

if keras.backend.backend() != "jax":
    pytest.skip(
        f"JAX's kernels; the backend is {keras.backend.backend()}",
        allow_module_level=True,
    )

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import keras_policy_ext as kpe
from keras_policy_ext import backends, contractions, formats, kernels, recipes
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.both_layouts import ScaleHint, Wanted
from keras_policy_ext.backends.jax import pallas_casts
from keras_policy_ext.backends.jax.pallas_casts import (
    Cast,
    PallasCasts,
    Scale,
)
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.scale_sources import ScaleRule, source_of

FORMATS = ("float8_e4m3fn", "float8_e5m2")
SIZES = [(64, 128), (1, 1), (130, 3), (65, 63)]
INTERPRETED = PallasCasts(None, interpreted=True)


def hostile(shape, dtype):
    """Numbers of all sizes, with zeros, infinities and NaN among them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-30, 30, shape)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 448, 464, 465, 61440]
    count = min(x.size // 2, len(special))
    x.flat[:count] = special[:count]
    return jnp.asarray(x.astype("float32")).astype(dtype)


def bits(x):
    """Codes as bytes; of several NaN the one that casts give elsewhere.

    XLA for a CPU moves float8 by way of float16, which changes them.
    """
    x = np.asarray(x)
    one = 0x7E if x.dtype == ml_dtypes.float8_e5m2 else 0x7F
    return np.where(np.isnan(x.astype("float32")), one, x.view(np.uint8))


def interpret(monkeypatch):
    """From here on, the interpreted kernels cast the operands."""
    engine = dataclasses.replace(backends.engine, both_layouts=INTERPRETED)
    monkeypatch.setattr(backends, "engine", engine)
    # What JAX has traced knows the other casts.
    jax.clear_caches()


def expected_codes(x, scale, format_name):
    """The codes by NumPy: divided in float32, clipped, rounded once."""
    limit = formats.get(format_name).max
    with np.errstate(over="ignore"):
        wide = np.asarray(x.astype("float32")) / np.float32(scale)
    dtype = getattr(ml_dtypes, format_name)
    return bits(np.clip(wide, -limit, limit).astype(dtype))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
def test_codes_are_those_of_numpy_in_both_layouts(size, format_name):
    cases = itertools.product(("bfloat16", "float32"), (0.37, 2.0**-126))
    for dtype, scale in [*cases, ("float16", 1e30)]:
        x = hostile(size, dtype)
        how = Cast(format_name, interpreted=True)
        found = pallas_casts.cast(how, x, given(scale))
        expected = expected_codes(x, scale, format_name)
        np.testing.assert_array_equal(bits(found.values), expected)
        np.testing.assert_array_equal(bits(found.across), expected.T)
        assert found.scale == np.float32(scale)
        assert found.column_sums is None


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_amax_and_the_sums_are_those_of_the_matrix_alone(size):
    """What lies beyond its edges counts for nothing."""
    rng = np.random.default_rng(1)
    x = -rng.uniform(1.0, 2.0, size).astype("float32")
    how = Cast(FORMATS[1], sums=True, interpreted=True)
    found = pallas_casts.cast(how, jnp.asarray(x), given(1.0))
    assert found.amax == np.abs(x).max()
    np.testing.assert_allclose(found.column_sums, x.sum(0), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_amax_tells_of_numbers_that_are_not_finite(bad):
    x = jnp.ones((70, 70)).at[69, 69].set(bad)
    how = Cast(FORMATS[0], sums=True, interpreted=True)
    found = pallas_casts.cast(how, x, given(1.0))
    np.testing.assert_array_equal(found.amax, np.float32(bad))
    np.testing.assert_array_equal(
        np.isfinite(found.column_sums), np.arange(70) < 69
    )


LARGE = pallas_casts.PART * pallas_casts.PROGRAMS


@pytest.mark.parametrize("size", [1, pallas_casts.PART + 1, LARGE + 1])
def test_an_amax_is_found_only_if_it_is_wanted(size):
    """The largest number may be the first one or the last."""
    x = jnp.linspace(-3.0, 2.0, size)
    for wanted, expected in ((1, 3.0), (0, 0.0)):
        flag = jnp.asarray([wanted], "int32")
        for numbers in (x, x[::-1]):
            found = pallas_casts.amax_if(flag, numbers, interpreted=True)
            assert np.asarray(found).view("float32").max() == expected
    found = pallas_casts.amax_if(flag + 1, x.at[-1].set(jnp.nan), True)
    assert not np.isfinite(np.asarray(found).view("float32")).all()


@pytest.mark.parametrize("inverted", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_a_scale_is_computed_as_elsewhere(inverted, power_of_two):
    rule = ScaleRule(inverted, margin=1 if inverted else 0)
    how = Cast(FORMATS[0], rule, power_of_two, interpreted=True)
    x = jnp.ones((1, 1))
    rng = np.random.default_rng(5)
    for amax in (*rng.uniform(1e-3, 1e3, 4), 0.0, np.inf, np.nan, 1e-40, 3e38):
        bits_ = np.float32([amax]).view("int32")
        scale = Scale(jnp.ones(1), jnp.ones(1, "int32"), jnp.asarray(bits_))
        found = pallas_casts.cast(how, x, scale).scale
        expected = pallas_casts._by_xla(how, x, scale).scale
        assert found == expected


def given(scale):
    """A scale that is known."""
    no = jnp.zeros(1, "int32")
    return Scale(jnp.asarray([scale], "float32"), no, no)


@pytest.mark.parametrize("is_transposed_in_memory", [False, True])
@pytest.mark.parametrize("unseen", [False, True])
def test_a_scale_that_is_not_known_is_that_of_the_tensor(
    unseen, is_transposed_in_memory
):
    x = jnp.asarray(np.random.default_rng(2).normal(size=(70, 130)), "float32")
    asked = recipes.Quantization(format=FORMATS[0])
    known = ScaleHint(
        jnp.float32(0.0 if unseen else 0.25),
        jnp.asarray(unseen),
        ScaleRule(by_multiplier=True),
    )
    wanted = Wanted(True, is_transposed_in_memory)
    found = INTERPRETED.quantize(x, asked, known, wanted)
    own = casting.format_of(FORMATS[0]).max
    scale = 1 / (np.float32(own) / np.abs(x).max()) if unseen else 0.25
    np.testing.assert_allclose(found.scale, scale, rtol=1e-7)
    codes = expected_codes(x, found.scale, FORMATS[0])
    np.testing.assert_array_equal(bits(found.values), codes)
    np.testing.assert_array_equal(bits(found.across), codes.T)
    assert found.amax == np.abs(x).max()


def passes(recipe, dtype, state, equation, shapes):
    """All that comes out of a forward and a backward pass."""
    rng = np.random.default_rng(1)
    x, w, g = (jnp.asarray(rng.normal(size=size), "float32") for size in shapes)
    with kernels.prefer("native"):
        plan = contractions.make_plan(
            contractions.Einsum(equation), recipe, dtype, "float32", True
        )
    x, g = x.astype(dtype), g.astype(dtype)

    def step(x, w, g):
        outputs, residuals = plan.bound.forward(x, w, state, True)
        residuals = plan.bound.residuals(residuals.leaves(), residuals.shapes)
        return outputs, plan.bound.backward(residuals, g, state)[:3]

    return jax.tree.leaves(jax.jit(step)(x, w, g))


EQUATIONS = {
    "abc,cd->abd": ((3, 5, 32), (32, 48), (3, 5, 48)),
    "abc,dc->abd": ((3, 5, 32), (48, 32), (3, 5, 48)),
    "abc,cde->abde": ((2, 70, 32), (32, 4, 12), (2, 70, 4, 12)),
    "ab,bc->ac": ((7, 9), (9, 11), (7, 11)),
}


@pytest.mark.parametrize(
    ("name", "dtype", "equation"),
    [
        ("delayed", "bfloat16", "abc,cd->abd"),
        pytest.param(
            "current", "float32", "abc,cde->abde", marks=pytest.mark.full
        ),
        pytest.param(
            "delayed", "float32", "abc,dc->abd", marks=pytest.mark.full
        ),
        pytest.param(
            "current", "bfloat16", "ab,bc->ac", marks=pytest.mark.full
        ),
    ],
)
def test_a_step_has_the_numbers_of_separate_casts(
    monkeypatch, name, dtype, equation
):
    recipe = recipes.get(name)
    states = [()]
    if recipe.remembers:
        shape = source_of(recipe).state_shape
        first = jnp.zeros(shape).at[:, 0].set(VALID_MARK)
        known = first.at[:, 10].set(jnp.asarray([3.0, 0.5, 7.0]))
        states = [(first,), (known,)]
    given = dtype, equation, EQUATIONS[equation]
    separate = [passes(recipe, given[0], s, *given[1:]) for s in states]
    interpret(monkeypatch)
    together = [passes(recipe, given[0], s, *given[1:]) for s in states]
    pairs = zip(
        jax.tree.leaves(separate), jax.tree.leaves(together), strict=True
    )
    for one, other in pairs:
        # XLA adds up in another order where operands lie otherwise.
        np.testing.assert_allclose(
            one.astype("float32"), other.astype("float32"), rtol=1e-6, atol=1e-5
        )


def gradients(layer, x):
    """The gradients of kernel, bias and inputs, of a sum of squares."""
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        with kernels.prefer("native"):
            outputs, _ = layer.stateless_call(weights, [], x, training=True)
        return jnp.sum(jnp.square(outputs.astype("float32")))

    found, of_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, x)
    return *found[:2], of_x


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_gradient_of_a_bias_is_the_sum_of_the_cast(monkeypatch, activation):
    layer = kpe.layers.Dense(48, activation, dtype="float8_from_float32")
    x = np.random.default_rng(3).normal(size=(4, 30, 32))
    x = jnp.asarray(x, "float32")
    layer.build(x.shape)
    separate = gradients(layer, x)
    interpret(monkeypatch)
    summed = []
    quantize = PallasCasts.quantize

    def spied(self, matrix, asked, known, wanted):
        summed.append(wanted.column_sums)
        return quantize(self, matrix, asked, known, wanted)

    monkeypatch.setattr(PallasCasts, "quantize", spied)
    together = gradients(layer, x)
    assert summed.count(True) == 1
    for one, other in zip(separate, together, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_a_second_derivative_of_a_layer_with_a_bias_is_that_of_before(
    monkeypatch,
):
    layer = kpe.layers.Dense(8, "gelu", dtype="float8_from_float32")
    x = jnp.asarray(np.random.default_rng(4).normal(size=(6, 16)), "float32")
    layer.build(x.shape)

    def second():
        weights = [v.value for v in layer.trainable_variables]

        def loss(weights, x):
            with kernels.prefer("native"):
                y, _ = layer.stateless_call(weights, [], x, training=True)
            return jnp.sum(y**2)

        def penalty(weights, x):
            found = jax.grad(loss, argnums=(0, 1))(weights, x)
            return sum(jnp.sum(jnp.square(g)) for g in (found[0][1], found[1]))

        found, of_x = jax.grad(penalty, argnums=(0, 1))(weights, x)
        return *found[:2], of_x

    separate = second()
    interpret(monkeypatch)
    for one, other in zip(separate, second(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "format_name", "why"),
    [
        ("h200", (64, 64), "bfloat16", FORMATS[0], None),
        ("b200", (64, 64), "bfloat16", FORMATS[0], None),
        ("mi300", (64, 64), "bfloat16", FORMATS[0], "for CUDA"),
        ("v6e", (64, 64), "bfloat16", FORMATS[0], "for CUDA"),
        ("h200", (64, 64), "float64", FORMATS[0], "do not read float64"),
        ("h200", (64, 64), "bfloat16", "float8_e4m3fnuz", "do not write"),
        ("h200", (0, 64), "bfloat16", FORMATS[0], "1 to 2"),
        ("h200", (1 << 16, 1 << 15), "bfloat16", FORMATS[0], "1 to 2"),
    ],
)
def test_what_the_kernels_are_for(device, shape, dtype, format_name, why):
    casts = backends.engine.both_layouts
    like = jax.ShapeDtypeStruct(shape, dtype)
    with devices.pretend(device):
        found = casts.supports(like, dtype, format_name)
    assert found is None if why is None else why in found


@pytest.fixture
def untested():
    pallas_casts.failing.cache_clear()
    yield
    pallas_casts.failing.cache_clear()


def fails(how, x, scale):
    raise RuntimeError("Unsupported instruction\nand more")


def rounded_wrongly(how, x, scale):
    found = pallas_casts._by_xla(how, x, scale)
    return found._replace(across=found.across[::-1])


def interpreted(how, x, scale):
    return pallas_casts._by_pallas(how._replace(interpreted=True), x, scale)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cast": interpreted}, None),
        ({"cast": fails}, "fail here: RuntimeError: Unsupported instruction"),
        ({"cast": rounded_wrongly}, "do not round here as they should"),
        ({"triton": None}, "has no Pallas for Triton"),
    ],
)
def test_kernels_that_fail_on_a_device_are_not_used(
    monkeypatch, untested, changes, why
):
    """They are tried once, also where a compiler traces a step."""
    for name, value in changes.items():
        monkeypatch.setattr(pallas_casts, name, value)
    words = [] if why is None else [why]
    gpu = PallasCasts(lambda: devices.KNOWN["h200"])
    found = []

    @jax.jit
    def step(x):
        found.append(gpu.supports(x, "bfloat16", FORMATS[0]))
        return x

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step(jnp.ones((4, 4), "bfloat16"))
    (reason,) = found
    assert reason is None if why is None else why in reason
    told = [str(each.message) for each in warned if "takes longer" in str(each)]
    assert len(told) == len(words)
    assert all(word in text for word, text in zip(words, told, strict=True))


def test_a_program_for_a_gpu_has_one_cast_an_operand():
    layer = kpe.layers.Dense(128, dtype="float8_from_mixed_bfloat16")
    layer.build((64, 256))
    weights = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        y, _ = layer.stateless_call(weights, [], x, training=True)
        return jnp.sum(jnp.square(y.astype("float32")))

    with devices.pretend("h200"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(
            weights, jnp.ones((64, 256), "bfloat16")
        )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 6  # casts, first amaxes
