"""A million codes and scales, in each form a compiler makes of the arithmetic.

A compiler may replace a division by an approximation, or by a factor that
differs in the last bit: seen of `ones_like(x) / x` in TensorFlow's graphs, of
`x / 448` in XLA. What is divided is to be no constant to it.
"""

import functools

import ml_dtypes
import numpy as np
import pytest
from keras import ops

from keras_policy_ext import reference
from keras_policy_ext.ext.nvfp4.quantized import two_level
from keras_policy_ext.ext.reference.scales import two_level_scales
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import Quantization, Tile
from ways import BACKEND, COMPILERS, array, compiled

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
E8M0 = "float8_e8m0fnu"
SHAPE = (2, 512, 1024)
KEY = 77

ASKED = {
    "tensor": Quantization(format=E4M3),
    "tensor, e5m2": Quantization(format=E5M2),
    "rows": Quantization(format=E4M3, tile=Tile(1), scale_rounding="up"),
    "rows, any scale": Quantization(format=E4M3, tile=Tile(1)),
    "blocks": Quantization(format=E4M3, tile=Tile(1, 128), scale_rounding="up"),
    "blocks, any scale": Quantization(format=E4M3, tile=Tile(1, 128)),
    "squares": Quantization(format=E4M3, tile=Tile(128, 128)),
    "mx": Quantization(
        format=E4M3,
        tile=Tile(1, 32),
        scale_format=E8M0,
        scale_rounding="up",
    ),
    "mx, floor": Quantization(
        format=E4M3,
        tile=Tile(1, 32),
        scale_format=E8M0,
        scale_rounding="floor",
    ),
    "nv": Quantization(format=E2M1, tile=Tile(1, 16), scale_format=E4M3),
    "nv, squares": Quantization(
        format=E2M1, tile=Tile(16, 16), scale_format=E4M3
    ),
    "nv, transformed": Quantization(
        format=E2M1, tile=Tile(1, 16), scale_format=E4M3, hadamard=16
    ),
    "nv, four over six": Quantization(
        format=E2M1, tile=Tile(1, 16), scale_format=E4M3, four_over_six=True
    ),
    "nv, four over six, squares": Quantization(
        format=E2M1, tile=Tile(16, 16), scale_format=E4M3, four_over_six=True
    ),
    "nv, four over six, at random": Quantization(
        format=E2M1,
        tile=Tile(1, 16),
        scale_format=E4M3,
        hadamard=16,
        rounding="stochastic",
        four_over_six=True,
    ),
    "nv, at random": Quantization(
        format=E2M1,
        tile=Tile(1, 16),
        scale_format=E4M3,
        hadamard=16,
        rounding="stochastic",
    ),
}


FORMS = {"jax": ["jit"], "tensorflow": ["graph", "xla"], "torch": ["eager"]}
each_form = pytest.mark.parametrize("form", FORMS[BACKEND])


@functools.cache
def numbers(kind):
    """Ordinary numbers; bfloat16 numbers are often half-way between two."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=SHAPE)
    if kind == "float32":
        x = x * 2.0 ** rng.integers(-6, 7, SHAPE)
        return x.astype("float32")
    return x.astype(ml_dtypes.bfloat16).astype("float32")


@pytest.mark.full
@each_form
@pytest.mark.parametrize("name", ASKED)
def test_a_million_codes_are_those_of_the_reference(name, form):
    asked = ASKED[name]

    def parts(x, key):
        found, _ = quantize(x, asked, key=key)
        whole = found.tensor_scale
        return (
            found.values,
            found.scale,
            found.scale if whole is None else whole,
        )

    run = compiled(parts, form)
    at_random = asked.rounding == "stochastic"
    key = ops.convert_to_tensor(KEY, "int32")
    for kind in ("float32", "bfloat16"):
        x = numbers(kind)
        got = [array(y) for y in run(ops.convert_to_tensor(x), key)]
        want = reference.quantize_matrices(x, asked, KEY if at_random else None)
        assert (got[1] != want.scales.astype("float32")).sum() == 0
        assert (got[0] != want.codes.astype("float32")).sum() == 0
        if want.tensor_scale is not None:
            assert (got[2] == want.tensor_scale).all()


@each_form
def test_a_million_scales_are_those_of_the_reference(form):
    scales_are_those_of_the_reference(form)


@pytest.mark.full
@pytest.mark.skipif(BACKEND != "torch", reason="the others compile above")
@COMPILERS
def test_what_inductor_divides_is_divided_as_the_reference_does(way):
    scales_are_those_of_the_reference(way)


def scales_are_those_of_the_reference(way):
    rng = np.random.default_rng(2)
    amax = rng.uniform(1, 2, 2**18) * 2.0 ** rng.integers(-120, 121, 2**18)
    amax = amax.astype("float32")
    blocks = rng.uniform(2.0**-6, 1, 2**18).astype("float32")
    limit = 448.0

    def scales(amax, blocks):
        up = scaling.scale_for_limit(amax, limit, power_of_two=True)
        return (
            scaling.scale_for_limit(amax, limit),
            up,
            scaling.scale_of_multiplier(amax, limit),
            scaling.scale_of_multiplier(amax, limit, margin=3),
            *two_level(blocks, ASKED["nv"])[:2],
        )

    both = [ops.convert_to_tensor(x) for x in (amax, blocks)]
    got = [array(y) for y in compiled(scales, way)(*both)]
    two_levels = two_level_scales(blocks, blocks.max(), E2M1)
    want = (
        reference.scale_from_amax(amax, E4M3),
        reference.scale_from_amax(amax, E4M3, power_of_two=True),
        reference.scale_of_multiplier(amax, E4M3),
        reference.scale_of_multiplier(amax, E4M3, margin=3),
        *(x.astype("float32") for x in two_levels),
    )
    for found, expected in zip(got, want, strict=True):
        assert (found != expected).sum() == 0
