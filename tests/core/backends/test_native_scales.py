"""Native matmuls with scales finer than a tensor give the emulated numbers.

Of all that the backend has on a CPU; `test_torch_finer_scales.py` has those
of PyTorch which want a GPU.
"""

import numpy as np
import pytest
from arithmetic_checks import LOST_BY_ADDING, TOLERANCES
from keras import ops

from conftest import visible_gpus
from finer_scales import MX, PAIRS, ROW, SIZES, SQUARE, THIN, UNIT, matrix
from keras_policy_ext import backends
from keras_policy_ext.backends.matmuls import Request
from keras_policy_ext.numerics.quantized import quantize
from steps import numpy
from ways import BACKEND, array, bits, compiled

KERNELS = {"rows": "OfRows", "MX": "ScaledDot"}
NATIVE = {"jax": ("rows", "MX"), "torch": ("rows",), "tensorflow": ("rows",)}


def select(pair, prefer):
    a, b = PAIRS[pair]
    request = Request("forward", a, b, False, prefer, for_xla=True)
    return backends.engine.select(request)


def product(pair, sizes, dtype, prefer):
    """A product of the two operands of a pair, and its type."""
    kernel, choice = select(pair, prefer)
    engine, (rows, terms, columns) = backends.engine, sizes
    cast = engine.narrow_cast if choice.native else engine.cast

    def multiply(x, y):
        a, b = (
            quantize(each, asked, cast=cast)[0]
            for each, asked in zip((x, y), PAIRS[pair], strict=True)
        )
        return kernel.multiply(a, b, dtype, fast=True)

    x, y = matrix(rows, terms, 0), matrix(columns, terms, 1)
    way = {"jax": "jit", "torch": "eager", "tensorflow": "xla"}[BACKEND]
    found = compiled(multiply, way)(*map(ops.convert_to_tensor, (x, y)))
    return found, choice


def same_products(pair, sizes, dtype, unit):
    """Fail unless the native product is the emulated one, but for its sum."""
    native, choice = product(pair, sizes, dtype, "native")
    assert choice.native
    emulated, choice = product(pair, sizes, "float32", "emulated")
    assert not choice.native
    found, exact = (array(x).astype("float64") for x in (native, emulated))
    assert array(native).dtype.name == dtype
    allowed = np.abs(exact) * UNIT[dtype] + np.abs(exact).max() * unit
    assert (np.abs(found - exact) <= allowed).all()


@pytest.mark.slow_except(
    "rows-(17, 260, 33)-float32",
    "rows with a tensor-(17, 260, 33)-float16",
    "rows after a tensor-(17, 260, 33)-bfloat16",
    "rows, e5m2 first-(17, 260, 33)-float32",
    "rows, e5m2 second-(1, 1, 1)-bfloat16",
    "rows, any scale-(17, 260, 33)-float32",
    "blocks with squares-(17, 260, 33)-float32",
    "blocks-(17, 260, 33)-bfloat16",
    "blocks-(1, 1, 1)-float32",
    "MX-(17, 260, 33)-float32",
    "MX-(1, 1, 1)-float16",
)
@pytest.mark.full_except("rows-(1, 1, 1)-float16")
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("sizes", SIZES[2:4], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.skipif(visible_gpus() > 0, reason="a GPU is there: for CPUs only")
def test_a_native_product_is_the_emulated_one(pair, sizes, dtype):
    kernel, choice = select(pair, "native")
    kind = next((k for k in NATIVE[BACKEND] if pair.startswith(k)), None)
    assert choice.native == (kind is not None)
    if choice.native:
        assert KERNELS[kind] in type(kernel).__name__
        same_products(pair, sizes, dtype, 2.0**-20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_native_product_on_a_gpu_is_the_emulated_one(pair, sizes, dtype):
    choice = select(pair, "auto")[1]
    if not choice.native:
        pytest.skip(choice.reason)
    # Tensor cores add products with some 14 bits: see `test_select.py`. Each 32
    # terms that are added fast, one after the other, lose as much again. On an
    # H200, 1100 terms in PyTorch lost more than 2**-11 of the largest product.
    lost = sizes[1] / 32 * LOST_BY_ADDING
    same_products(pair, sizes, dtype, TOLERANCES["float32"] + lost)


@pytest.mark.parametrize(
    "asked", [ROW, MX, THIN, SQUARE], ids=lambda asked: str(tuple(asked.tile))
)
def test_what_a_native_matmul_reads_are_the_emulated_codes(asked):
    engine, x = backends.engine, ops.convert_to_tensor(matrix(130, 300, 0))
    native, _ = quantize(x, asked, cast=engine.narrow_cast)
    emulated, _ = quantize(x, asked, cast=engine.cast)
    first, second = (
        bits(ops.cast(each.values, "float32")) for each in (native, emulated)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(numpy(native.scale), numpy(emulated.scale))
