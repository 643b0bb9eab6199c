"""The three matmuls of a layer, against NumPy on the quantized operands."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from contracting import (
    FLOAT32_TOLERANCE,
    RECIPES,
    dense,
    numpy_of_any,
    policy,
    run_layer,
)
from keras_policy_ext import backends, kernels, reference
from keras_policy_ext.contractions import equations
from keras_policy_ext.contractions.kinds import Einsum
from keras_policy_ext.contractions.operands import operands_of
from keras_policy_ext.recipes import CurrentScaling
from products import Contract, quantized
from steps import no_grad, normal, relative_rms
from ways import (
    COMPILERS,
    bits,
    run,
    same_bits,
)


def half(x, dtype):
    """`x` rounded to a 16-bit dtype, as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(getattr(ml_dtypes, dtype, dtype)).astype("float32")


def within_half_an_ulp(actual, exact, terms, bits_stored):
    """Whether `actual` is `exact` rounded to a 16-bit dtype.

    The slack is that of a float32 sum of products; `terms` is the sum of
    their magnitudes.
    """
    exponents = np.frexp(np.maximum(np.abs(exact), 1e-30))[1] - 1
    half_an_ulp = 2.0 ** (exponents - bits_stored - 1)
    slack = 2.0**-20 * terms
    return np.all(np.abs(actual - exact) <= half_an_ulp * 1.0001 + slack)


def summed(x, term, others):
    """An operand whose axes that no other term has are of size 1, summed."""
    alone = tuple(i for i, c in enumerate(term) if c not in others)
    return x.sum(axis=alone, keepdims=True, dtype="float32") if alone else x


def check_float32(layer, equation, x, w, recipe):
    """Compare a built float32 layer with einsums of quantized operands."""
    with no_grad():
        layer.kernel.assign(w)
    first, second, out = equations.split(equation)
    apart = set(first) & set(second) & set(out)
    if not (set(second) - set(first) and set(first + second) - set(out)):
        apart = set()  # It is no bank of matrices.

    def kept(value, operand, term):
        axes = tuple(i for i, c in enumerate(term) if c in apart)
        return quantized(value, operand, recipe, axes)

    qx = kept(summed(x, first, second + out), "inputs", first)
    qw = kept(summed(w, second, first + out), "kernel", second)
    expected = np.einsum(equation, qx, qw)
    g = normal(*expected.shape, seed=7)
    qg = kept(g, "outputs_grad", out)
    # Compiled as a whole, g would be a constant. XLA for a CPU computes wrong
    # values of a constant that is transposed before it is quantized, as the
    # matrices of a bank are (JAX 0.10).
    y, dx, dw = run_layer(layer, x, g, compiled=not apart)
    assert y.shape == expected.shape
    assert relative_rms(y, expected) < FLOAT32_TOLERANCE
    # A gradient is constant along an axis that was summed alone.
    exact = derivative(equation, qg, qw, 0, qx.shape)
    assert relative_rms(dx, np.broadcast_to(exact, x.shape)) < (
        FLOAT32_TOLERANCE
    )
    exact = derivative(equation, qg, qx, 1, qw.shape)
    assert relative_rms(dw, np.broadcast_to(exact, w.shape)) < (
        FLOAT32_TOLERANCE
    )


def derivative(equation, g, other, operand, shape):
    """The gradient of one operand, without the package's own algebra.

    A second copy `Z` of each axis of the operand, tied to it by identity
    matrices, keeps apart what is summed: ordinary einsum then does the rest.
    """
    terms, out = equation.split("->")
    term = terms.split(",")[operand]
    copies = "".join("PQRSTUVW"["abcdefgh".index(c)] for c in term)
    ties = [np.eye(size) for size in shape]
    tied = ",".join(c + p for c, p in zip(term, copies, strict=True))
    rest = terms.split(",")[1 - operand]
    return np.einsum(
        f"{out},{rest},{tied}->{copies}", g, other, *ties, optimize=True
    )


# Dense and EinsumDense


DENSE = [
    ("hybrid", (6, 5)),
    ("e4m3", (6, 5)),
    ("power_of_two", (6, 5)),
    ("hybrid_fnuz", (6, 5)),
    ("hybrid", (2, 3, 5)),
    ("hybrid", (2, 2, 3, 5)),
]


@pytest.mark.full_except("e4m3-shape1", "hybrid_fnuz-shape3")
@pytest.mark.parametrize(("name", "shape"), DENSE)
def test_dense_multiplies_quantized_operands(name, shape):
    recipe = RECIPES[name]
    layer = dense(7, 5, policy(recipe=recipe), use_bias=False)
    letters = "abc"[: len(shape) - 1]
    equation = f"{letters}d,de->{letters}e"
    check_float32(layer, equation, normal(*shape), normal(5, 7, seed=1), recipe)


EINSUM_DENSE = [
    # equation, explicit equation, output_shape, inputs
    ("...x,xy->...y", "abc,cd->abd", 5, (2, 3, 4)),
    ("abc,cde->abde", "abc,cde->abde", (None, 2, 3), (2, 3, 4)),
    ("abcd,cde->abe", "abcd,cde->abe", (None, 5), (2, 3, 2, 4)),
    ("abc,bcd->abd", "abc,bcd->abd", (3, 5), (2, 3, 4)),
]


@pytest.mark.full_except("...x,xy->...y", "abc,cde->abde")
@pytest.mark.parametrize(
    ("equation", "explicit", "output_shape", "shape"),
    EINSUM_DENSE,
    ids=[case[0] for case in EINSUM_DENSE],
)
def test_einsum_dense_multiplies_quantized_operands(
    equation, explicit, output_shape, shape
):
    layer = kpe.layers.EinsumDense(equation, output_shape, dtype=policy())
    layer.build(shape)
    w = normal(*layer.kernel.shape, seed=1)
    check_float32(layer, explicit, normal(*shape), w, CurrentScaling())


MIXIN = [
    ("ab,bc->ac", (3, 4), (4, 5)),
    ("ab,cb->ac", (3, 4), (5, 4)),  # a transposed kernel
    ("ab,bc->ca", (3, 4), (4, 5)),  # reordered outputs
    ("abc,cde->eadb", (2, 3, 4), (4, 2, 3)),
    ("abc,acd->abd", (2, 3, 4), (2, 4, 5)),  # a batch axis in both
    ("abcd,bdce->eab", (2, 3, 2, 4), (3, 4, 2, 5)),
    ("ab,bc->c", (3, 4), (4, 5)),  # an axis of the inputs summed away
    ("ab,bcd->ac", (3, 4), (4, 2, 5)),  # an axis of the kernel summed away
    ("ab,cd->adbc", (2, 3), (4, 5)),  # nothing contracted
    ("ab,ab->ab", (3, 4), (3, 4)),  # nothing but batch
    ("ab,ab->", (3, 4), (3, 4)),  # a scalar
]


@pytest.mark.full_except("ab,cb->ac")
@pytest.mark.parametrize(
    ("equation", "shape", "kernel"), MIXIN, ids=[case[0] for case in MIXIN]
)
def test_any_einsum_of_a_mixin_layer_multiplies_quantized_operands(
    equation, shape, kernel
):
    layer = Contract(equation, kernel, dtype=policy())
    layer.build(shape)
    w = normal(*kernel, seed=1)
    check_float32(layer, equation, normal(*shape), w, CurrentScaling())


# Sixteen-bit sources

HALVES = {
    "mixed_bfloat16": ("bfloat16", 7),
    "mixed_float16": ("float16", 10),
    "bfloat16": ("bfloat16", 7),
}


@pytest.mark.full_except("mixed_float16")
@pytest.mark.parametrize("source", HALVES)
def test_outputs_are_rounded_once_to_the_compute_dtype(source):
    compute, stored = HALVES[source]
    recipe = CurrentScaling()
    layer = dense(7, 24, policy(source), use_bias=False)
    x, g = (half(normal(16, n), compute) for n in (24, 7))
    w = normal(24, 7, seed=1)
    with no_grad():
        layer.kernel.assign(w)
    if source == compute:
        w = half(w, compute)
    qx, qw, qg = (
        quantized(value, operand, recipe)
        for value, operand in (
            (x, "inputs"),
            (w, "kernel"),
            (g, "outputs_grad"),
        )
    )
    y, dx, dw = run_layer(layer, x, g)
    terms = np.abs(qx) @ np.abs(qw)
    assert within_half_an_ulp(y, qx @ qw, terms, stored)
    terms = np.abs(qg) @ np.abs(qw.T)
    assert within_half_an_ulp(dx, qg @ qw.T, terms, stored)
    if compute == "float16":  # in which it could overflow
        assert relative_rms(dw, qx.T @ qg) < FLOAT32_TOLERANCE
    else:
        assert np.array_equal(dw, half(dw, compute))
        terms = np.abs(qx.T) @ np.abs(qg)
        assert within_half_an_ulp(dw, qx.T @ qg, terms, stored)


def test_the_gradient_of_a_float32_kernel_does_not_overflow_in_float16():
    layer = dense(1, 1, policy("mixed_float16"), use_bias=False)
    # 64 * 2^11 is more than float16 holds.
    x, g = np.ones((64, 1), "float32"), np.full((64, 1), 2.0**11, "float32")
    _, _, dw = run_layer(layer, x, g)
    np.testing.assert_allclose(dw, 2.0**17, rtol=1e-6)


def rounded_codes_differ(w, dtype="float8_e4m3fn"):
    scale = reference.scale_from_amax(reference.amax(w), dtype)
    direct = bits(reference.quantize(w, scale, dtype))
    twice = bits(reference.quantize(half(w, "bfloat16"), scale, dtype))
    return direct != twice


def test_the_kernel_is_quantized_from_its_float32_master():
    w = normal(16, 64, seed=3)
    w[0, 0] = 4.0  # an amax that bfloat16 has too
    differ = rounded_codes_differ(w)
    assert differ.sum() > 5
    layer = dense(64, 16, policy("mixed_bfloat16"), use_bias=False)
    with no_grad():
        layer.kernel.assign(w)
    y = numpy_of_any(layer(np.eye(16, dtype="float32")))
    recipe = CurrentScaling()
    qx = quantized(np.eye(16), "inputs", recipe)
    expected = half(qx @ quantized(w, "kernel", recipe), "bfloat16")
    wrong = qx @ quantized(half(w, "bfloat16"), "kernel", recipe)
    wrong = half(wrong, "bfloat16")
    np.testing.assert_array_equal(y, expected)
    assert np.all(y[differ] != wrong[differ])


# Native and emulated


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_native_and_emulated_operands_have_the_same_bits(dtype, source):
    engine = backends.engine
    random = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint64)
    x = random.astype(np.uint32).view("float32")
    codes = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    x = np.concatenate([x, codes.astype("float32"), normal(1000)])
    # A subnormal quotient is 0 or not, and float8 rounds it to 0 anyway.
    x = np.where(np.abs(x) < 2.0**-126, 0, x)
    tensor = ops.cast(ops.convert_to_tensor(x), source)
    for scale in (np.float32(1), np.float32(0.1), np.float32(3e-5)):
        results = []
        for native in (True, False):
            cast = engine.narrow_cast if native else engine.cast
            values = cast(tensor, ops.convert_to_tensor(scale), dtype)
            stored = keras.backend.standardize_dtype(values.dtype)
            assert stored in ((dtype,) if native else (dtype, "float32"))
            results.append(ops.cast(values, dtype))
            exact = ops.cast(ops.cast(values, dtype), "float32")
            same_bits(exact, ops.cast(values, "float32"))
        same_bits(*results)
        expected = reference.quantize(half(x, source), scale, dtype)
        same_bits(results[0], expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@COMPILERS
def test_a_compiler_leaves_no_rounding_out(dtype, way):
    """Emulated numbers are rounded without a cast; sums must not cancel."""
    engine, x = backends.engine, normal(5000)

    def rounded(x, scale):
        return ops.cast(engine.cast(x, scale, dtype), "float32")

    scale = np.float32(0.013)
    expected = reference.quantize(x, scale, dtype).astype("float32")
    same_bits(run(rounded, way, x, scale), expected)


@pytest.mark.full_except("matmul")
@pytest.mark.parametrize(
    ("equation", "shape", "kernel", "source"),
    [
        (*MIXIN[0], "float32"),
        (*MIXIN[0], "mixed_bfloat16"),
        (*MIXIN[4], "float32"),
    ],
    ids=["matmul", "matmul, bfloat16", "batched"],
)
def test_native_and_emulated_results_agree(equation, shape, kernel, source):
    results = {}
    layer = Contract(equation, kernel, dtype=policy(source))
    layer.build(shape)
    x = half(normal(*shape), "bfloat16")
    g = half(normal(*numpy_of_any(layer(x)).shape), "bfloat16")
    for kind in ("native", "emulated"):
        with kernels.prefer(kind):
            results[kind] = run_layer(layer, x, g)
            chosen = layer.kernel_choice.kind
        possible = kernels.select(equation, "current").kind
        if kind == "emulated":
            assert chosen == "emulated"
        elif possible == "native":
            assert chosen == "native"
    for native, emulated in zip(*results.values(), strict=True):
        if source == "float32":
            assert relative_rms(native, emulated) < FLOAT32_TOLERANCE
        else:  # both round once; the sums before may differ by an ulp
            terms = 64 * np.abs(emulated).max()
            assert within_half_an_ulp(native, emulated, terms, 6)


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("equation", "can"), [("ab,bc->ac", True), ("bij,bjk->bik", False)]
)
def test_one_matrix_alone_is_cast_in_both_layouts_at_once(equation, can):
    """Products of attention have a batch of matrices."""
    operands = operands_of(Einsum(equation), kpe.recipes.get("delayed"))
    casts = operands.cast_for_both.values()
    assert [each is not None for each in casts] == [can] * 3
