"""JAX: casts with scales of rows and of columns, by Pallas's interpreter.

What a GPU does is not seen here: `integration/lowering` compiles the kernels
for one.
"""

import dataclasses

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

from finer_scales import ANY_ROW, E4M3, E5M2, ROW, asked
from keras_policy_ext import (
    backends,
    contractions,
    formats,
    kernels,
    recipes,
    reference,
)
from keras_policy_ext.backends import devices
from keras_policy_ext.backends.jax.rows import PallasRowCasts
from keras_policy_ext.backends.matmuls import Request
from keras_policy_ext.contractions.operands import PassOptions
from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import RowwiseScaling, Tile
from steps import normal

INTERPRETED = PallasRowCasts(None, interpreted=True)
SIZES = [(64, 128), (1, 1), (130, 3), (65, 127)]


def hostile(size, dtype):
    """Rows and columns of many sizes; some have zeros, infinities or NaN."""
    rng = np.random.default_rng(0)
    rows = 2.0 ** rng.integers(-20, 20, (size[0], 1))
    x = rng.normal(size=size) * rows * 2.0 ** rng.integers(-9, 9, size[1])
    x[size[0] // 2], x[:, size[1] // 2] = 0.0, -0.0
    if x.size > 200:
        x[-1, 0], x[-2, 1], x[-3, -1] = np.inf, np.nan, -np.inf
        x[1] *= 1e-30
    with np.errstate(over="ignore"):
        return x.astype("float32").astype(jnp.dtype(dtype))


def expected(x, asked):
    """The codes, scales and amaxes of the rows of a matrix, by NumPy."""
    wide, up = x.astype("float32"), asked.scale_rounding == "up"
    amax = np.abs(np.where(np.isnan(wide), np.inf, wide)).max(1)
    scale = reference.scale_from_amax(amax, asked.format, power_of_two=up)
    limit = formats.get(asked.format).max
    codes = np.clip(wide / scale[:, None], -limit, limit)
    return codes.astype(getattr(ml_dtypes, asked.format)), scale, amax


def bits(codes):
    """The codes as integers, of every NaN the same one."""
    codes = np.asarray(codes)
    wide = codes.astype("float32")
    return np.where(np.isnan(wide), 0x7F, codes.view("uint8"))


def same(found, x, asked):
    codes, scale, amax = expected(x, asked)
    np.testing.assert_array_equal(bits(found.values), bits(codes))
    np.testing.assert_array_equal(found.scale, scale)
    np.testing.assert_array_equal(np.isfinite(found.amax), np.isfinite(amax))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "plain", "across"),
    [
        ("bfloat16", ANY_ROW, ANY_ROW),
        ("float32", ROW, ROW),
        ("bfloat16", asked(Tile(1), E5M2), ANY_ROW),
        ("float16", None, ANY_ROW),
        ("bfloat16", ROW, None),
    ],
    ids=["any", "powers", "two formats", "columns", "rows"],
)
def test_codes_and_scales_are_those_of_numpy(size, dtype, plain, across):
    x = hostile(size, dtype)
    found = INTERPRETED.cast(jnp.asarray(x), plain, across)
    assert found.column_sums is None
    for each, matrix, wanted in (
        (found.plain, x, plain),
        (found.across, x.T, across),
    ):
        assert (each is None) == (wanted is None)
        if wanted is not None:
            same(each, matrix, wanted)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_are_those_of_the_columns_of_the_matrix(size):
    x = np.random.default_rng(1).uniform(1.0, 2.0, size).astype("float32")
    found = INTERPRETED.cast(jnp.asarray(x), ROW, ROW, column_sums=True)
    np.testing.assert_allclose(found.column_sums, x.sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "format_name", "words"),
    [
        ((4, 4), "bfloat16", E4M3, None),
        ((4, 4), "float64", E4M3, "do not read float64"),
        ((4, 4), "float32", "float8_e4m3fnuz", "do not write"),
        ((0, 4), "float32", E4M3, "1 to 2^31 - 1 numbers"),
        ((1 << 16, 1 << 16), "float32", E4M3, "1 to 2^31 - 1 numbers"),
    ],
)
def test_a_reason_says_what_the_kernels_do_not_cast(
    shape, dtype, format_name, words
):
    like = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    reason = INTERPRETED.supports(like, E4M3, format_name)
    assert reason is words or words in reason


def test_the_kernels_are_for_one_device_of_cuda():
    like = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    casts = backends.engine.row_casts
    assert casts.supports(like, E4M3) == "Pallas's casts are for CUDA"
    with devices.pretend("h200"):
        assert casts.supports(like, E4M3) is None


class Counting:
    """Casts by rows in the interpreter, and counts what it casts."""

    def __init__(self):
        self.calls = []

    def supports(self, like, *format_names):
        return INTERPRETED.supports(like, *format_names)

    def cast(self, matrix, plain, across, column_sums=False):
        both = plain is not None, across is not None
        self.calls.append((matrix.shape, *both, column_sums))
        return INTERPRETED.cast(matrix, plain, across, column_sums)


def step(monkeypatch, recipe, equation, shapes, casts, infinite=False):
    """What a plan saves, quantizes and computes, with these casts by rows."""
    engine = dataclasses.replace(backends.engine, row_casts=casts)
    monkeypatch.setattr(backends, "engine", engine)
    x, w, outputs_grad = (jnp.asarray(normal(*shape)) for shape in shapes)
    if infinite:
        x = x.at[0, 0].set(jnp.inf)
        outputs_grad = outputs_grad.at[1, 1].set(jnp.inf)

    with kernels.prefer("native"):
        plan = contractions.make_plan(
            contractions.Einsum(equation), recipe, "float32", "float32", True
        ).with_preference()
    bound = plan.bound

    @jax.jit
    def run(x, w, g):
        y, residuals = bound.forward(x, w, (), False)
        leaves = residuals.leaves()
        saved = bound.residuals(leaves, residuals.shapes)
        g = bound.outputs_grad.quantize(g, PassOptions(None, False))
        leaves += [*g.first.leaves(), *g.second.leaves()]
        return leaves, y, bound.backward(saved, outputs_grad, ())[:2]

    leaves, *results = run(x, w, outputs_grad)
    codes = [np.asarray(each).view("uint8") for each in leaves]
    return codes, [np.asarray(each) for each in jax.tree.leaves(results)]


def same_steps(found, usual):
    """Fail unless codes and scales are equal, and results but for the sum."""
    for each, other in zip(found[0], usual[0], strict=True):
        np.testing.assert_array_equal(each, other)
    for each, other in zip(found[1], usual[1], strict=True):
        unit = np.nanmax(np.abs(other)) * 2.0**-20
        np.testing.assert_allclose(each, other, rtol=0, atol=unit)


MATRICES = ("ab,bc->ac", ((70, 130), (130, 66), (70, 66)))
EQUATIONS = [
    (*MATRICES, 3),
    ("abc,cd->abd", ((2, 33, 70), (70, 66), (2, 33, 66)), 3),
    ("ab,cb->ac", ((70, 130), (66, 130), (70, 66)), 3),
    ("gab,gbc->gac", ((2, 9, 8), (2, 8, 7), (2, 9, 7)), 0),
]


@pytest.mark.parametrize(("equation", "shapes", "casts"), EQUATIONS)
def test_a_step_has_the_bits_of_casts_by_xla(
    monkeypatch, equation, shapes, casts
):
    """A batch of matrices is left to XLA."""
    counting = Counting()
    found, usual = (
        step(monkeypatch, RowwiseScaling(), equation, shapes, each)
        for each in (counting, None)
    )
    assert len(set(counting.calls)) == casts
    same_steps(found, usual)


def test_a_kernel_is_read_as_it_lies(monkeypatch):
    counting = Counting()
    step(monkeypatch, RowwiseScaling(), *MATRICES, counting)
    shapes = {shape for shape, *_ in counting.calls}
    assert shapes == {(70, 130), (130, 66), (70, 66)}


def test_a_matmul_in_high_precision_needs_no_cast(monkeypatch):
    """The kernel has one scale there: it is left to XLA."""
    counting = Counting()
    recipe = RowwiseScaling(kernel_grad="high_precision")
    found, usual = (
        step(monkeypatch, recipe, *MATRICES, each) for each in (counting, None)
    )
    assert set(counting.calls) == {
        ((70, 130), True, False, False),
        ((70, 66), True, False, False),
    }
    same_steps(found, usual)


def test_an_infinity_marks_the_gradients_of_its_row_and_column(monkeypatch):
    found, usual = (
        step(monkeypatch, RowwiseScaling(), *MATRICES, each, infinite=True)
        for each in (Counting(), None)
    )
    outputs, inputs_grad, kernel_grad = found[1]
    assert np.isfinite(outputs).all()
    rows, columns = np.arange(130) == 0, np.arange(66) == 1
    marked = rows[:, np.newaxis] | columns
    np.testing.assert_array_equal(np.isnan(kernel_grad), marked)
    marked = np.broadcast_to(np.arange(70) == 1, (130, 70)).T
    np.testing.assert_array_equal(np.isnan(inputs_grad), marked)
    same_steps(found, usual)


def test_other_recipes_are_cast_as_before(monkeypatch):
    counting = Counting()
    for name in ("current", "mxfp8", "block"):
        step(monkeypatch, recipes.get(name), *MATRICES, counting)
    assert not counting.calls


@pytest.fixture(scope="module")
def of_rows():
    """The kernel of matmuls with scales of rows, and two operands of it."""
    how = "forward", ANY_ROW, ANY_ROW, False, "native", True
    kernel, _ = backends.engine.select(Request(*how))
    operands = [
        quantize(jnp.asarray(normal(1, rows, 256)), ANY_ROW)[0].encoded(E4M3)
        for rows in (70, 66)
    ]
    return kernel, operands


def test_a_kernel_gradient_is_rounded_once(of_rows):
    """On CUDA before the scales multiply it, and elsewhere after."""
    kernel, (a, b) = of_rows
    gradient = kernel.of_gradient
    found = gradient.multiply(a, b, "bfloat16", False)
    usual = kernel.multiply(a, b, "bfloat16", False)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, usual.astype("float32"))
    for each, dtype in ((gradient, "bf16"), (kernel, "f32")):
        lowered = jax.jit(
            lambda x, y, each=each: each.multiply(
                a.with_values(x), b.with_values(y), "bfloat16", False
            )
        ).trace(a.values, b.values)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        (product,) = (x for x in text.splitlines() if "dot_general" in x)
        assert f"x{dtype}>" in product.rpartition("->")[2]


def test_several_devices_add_up_a_kernel_gradient_in_float32(
    monkeypatch, of_rows
):
    """Each device has a partial sum, which must not be rounded before."""
    kernel, (a, b) = of_rows
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    traced = jax.jit(
        lambda x, y: kernel.of_gradient.multiply(
            a.with_values(x), b.with_values(y), "bfloat16", False
        )
    ).trace(a.values, b.values)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (product,) = (x for x in text.splitlines() if "dot_general" in x)
    assert "xf32>" in product.rpartition("->")[2]


@pytest.mark.parametrize(
    ("inputs", "kernel", "is_float32"),
    [
        ("bfloat16", "float32", True),
        ("bfloat16", "bfloat16", False),
        ("float32", "float32", False),
        ("float16", "float32", False),
    ],
)
def test_only_float32_kernels_of_bfloat16_have_such_gradients(
    inputs, kernel, is_float32
):
    with kernels.prefer("native"):
        plan = contractions.make_plan(
            contractions.Einsum("ab,bc->ac"),
            RowwiseScaling(),
            inputs,
            kernel,
            True,
        ).with_preference()
    found = type(plan.bound._kernel_grad._kernel).__name__
    assert (found == "GradientOfRows") == is_float32
