"""Every bfloat16 number, and blocks that are as bad as they come.

JAX and TensorFlow on a CPU read a subnormal float32 as 0 (docs/numerics.md):
what they are compared with reads it as 0 too.
"""

import ml_dtypes
import numpy as np
import pytest
from keras import ops

from keras_policy_ext import backends, contractions, kernels, recipes, reference
from keras_policy_ext.ext.delayed.observations import VALID_MARK
from keras_policy_ext.numerics import casting
from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import Quantization, Tile
from ways import BACKEND, FASTEST, array, compiled, same_bits

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
FLUSHES = BACKEND != "torch"

ALL = np.arange(2**16, dtype="uint16").view(ml_dtypes.bfloat16)
SMALLEST = np.float32(2.0**-126)


def flushed(x):
    """As this backend reads it."""
    x = np.asarray(x, "float32")
    if not FLUSHES:
        return x
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


# Every bfloat16 number

CASTS = {
    "emulated": casting.quantize_float32,
    "narrow": casting.quantize,
    "of the kernel, emulated": lambda *a: backends.engine.cast(*a),
    "of the kernel, narrow": lambda *a: backends.engine.narrow_cast(*a),
}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", CASTS)
def test_all_bfloat16_numbers_become_those_of_the_reference(name, dtype):
    run = compiled(lambda x, s: CASTS[name](x, s, dtype), FASTEST)
    x = ops.cast(ops.convert_to_tensor(ALL.astype("float32")), "bfloat16")
    for scale in np.float32([1, 0.1, 2.0**-120, 7e30]):
        found = array(run(x, ops.convert_to_tensor(scale)))
        expected = reference.quantize(flushed(ALL), scale, dtype)
        same_bits(found.astype("float32"), expected.astype("float32"))


def run_by_xla(function):
    """As the matmul is native on TensorFlow; elsewhere as it is fastest."""
    if BACKEND != "tensorflow":
        return compiled(function, FASTEST)
    import tensorflow as tf

    return tf.function(function, jit_compile=True, autograph=False)


@pytest.mark.parametrize("prefer", ["native", "emulated"])
def test_all_of_them_in_a_matmul(prefer):
    """Multiplied by one: the outputs are what the operand became."""
    finite = np.where(np.isfinite(ALL.astype("float32")), ALL, 0)
    finite = finite.astype("float32").reshape(256, 256)
    recipe = recipes.DelayedScaling(initial_scale=1.0, amax_history_length=1)
    contraction = contractions.Einsum("ab,bc->ac")
    kinds = set()

    def both(x, w, state):
        # Where XLA is going to compile is seen while it traces.
        with kernels.prefer(prefer):
            plan = contractions.make_plan(
                contraction, recipe, "bfloat16", "float32"
            )
        kinds.update(plan.choose(m)[1].kind for m in ("forward", "inputs_grad"))
        y, residuals = plan.bound.forward(x, w, (state,), observe=False)
        return y, plan.bound.backward(residuals, x, (state,))[0]

    x = ops.cast(ops.convert_to_tensor(finite), "bfloat16")
    state = np.zeros((3, 11), "float32")
    state[:, 0] = VALID_MARK
    w = ops.convert_to_tensor(np.eye(256, dtype="float32"))
    found = run_by_xla(both)(x, w, ops.convert_to_tensor(state))
    assert kinds == {prefer}
    for got, dtype in zip(found, (E4M3, E5M2), strict=True):
        expected = reference.cast(flushed(finite), dtype).astype("float32")
        np.testing.assert_array_equal(array(got).astype("float32"), expected)


# Blocks

BLOCKS = {
    "1x128": Quantization(format=E4M3, tile=Tile(1, 128), scale_rounding="up"),
    "1x128 float32": Quantization(format=E4M3, tile=Tile(1, 128)),
    "128x128": Quantization(
        format=E4M3, tile=Tile(128, 128), scale_rounding="up"
    ),
    "mx up": Quantization(
        format=E4M3,
        tile=Tile(1, 32),
        scale_format="float8_e8m0fnu",
        scale_rounding="up",
    ),
    "mx floor": Quantization(
        format=E4M3,
        tile=Tile(1, 32),
        scale_format="float8_e8m0fnu",
        scale_rounding="floor",
    ),
    "nv": Quantization(format=E2M1, tile=Tile(1, 16), scale_format=E4M3),
    "nv kernel": Quantization(
        format=E2M1, tile=Tile(16, 16), scale_format=E4M3
    ),
}

_TINY = np.float32(2.0**-140)
HARD = {
    "all zero": [0.0],
    "one huge": [1e37, 1.0, -1e-3, 0.0],
    "all subnormal": [_TINY, -3 * _TINY, 5 * _TINY],
    "a subnormal beside normal numbers": [_TINY, 1.0, -0.3],
    "a subnormal beside the smallest": [2.0**-127, 2.0**-126, -(2.0**-125)],
    "2^-127": [2.0**-127],
    "the smallest normal number": [2.0**-126],
    "the largest number": [np.finfo("float32").max, -1.0],
    "infinity": [np.inf, 1.0, 2.0],
    "minus infinity": [-np.inf, 1.0, 2.0],
    "not a number": [np.nan, 1.0, 2.0],
}
"""What the first tile has, again and again; normal numbers come after it."""

_RUNS = {}


def quantized(x, asked):
    if asked not in _RUNS:

        def parts(x):
            found, amax = quantize(x, asked)
            above = found.tensor_scale
            above = ops.ones(()) if above is None else above
            return (
                found.values,
                found.scale,
                above,
                found.with_nan_scales(amax).scale,
            )

        _RUNS[asked] = compiled(parts, FASTEST)
    return [array(part) for part in _RUNS[asked](ops.convert_to_tensor(x))]


def hard(numbers):
    x = np.random.default_rng(0).normal(size=(1, 128, 160)).astype("float32")
    x[:, :, :128] = np.resize(np.float32(numbers), (128, 128))
    return x


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("name", BLOCKS)
def test_hard_blocks_become_those_of_the_reference(name, kind):
    asked, x = BLOCKS[name], hard(HARD[kind])
    values, scale, above, marked = quantized(x, asked)
    expected = reference.quantize_matrices(flushed(x), asked)
    codes = expected.codes.astype("float32")
    codes = np.where(expected.nan, np.nan, codes)
    np.testing.assert_array_equal(values, codes)
    np.testing.assert_array_equal(
        flushed(scale), flushed(expected.scales.astype("float32"))
    )
    np.testing.assert_array_equal(
        np.isnan(marked), ~np.broadcast_to(expected.finite, marked.shape)
    )
    if expected.tensor_scale is not None:
        np.testing.assert_array_equal(above, expected.tensor_scale)
