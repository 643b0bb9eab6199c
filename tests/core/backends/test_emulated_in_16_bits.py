"""Emulated products in bfloat16 and float16 are those in float32.

On a CPU, as if a device were here that multiplies 16 bits faster.
"""

import keras
import numpy as np
import pytest
from keras import ops

from finer_scales import ANY_ROW, MX, ROW, SQUARE, THIN, WHOLE, asked, matrix
from keras_policy_ext import backends, formats
from keras_policy_ext.backends import devices, emulated
from keras_policy_ext.numerics.quantized import quantize
from keras_policy_ext.recipes import Tile
from steps import numpy
from ways import compiled

BACKEND = keras.backend.backend()
if BACKEND == "jax":
    from jax import lax

    PRODUCT = lax, "dot_general"
elif BACKEND == "tensorflow":
    import tensorflow as tf

    PRODUCT = tf.raw_ops, "BatchMatMulV3"
else:
    import torch

    from keras_policy_ext.backends.torch import backend as torch_devices
    from keras_policy_ext.backends.torch import engine as torch_kernels

    PRODUCT = torch, "mm"

EMULATED = backends.engine.matmuls[-1]
NARROW = {"a100": "bfloat16", "v5e": "bfloat16", "t4": "float16"}
if BACKEND != "jax":
    del NARROW["v5e"]
SIZES = (64, 256, 48)
XLA = {"jax": "jit", "tensorflow": "xla", "torch": "eager"}[BACKEND]
NEAREST = asked(Tile(1, 128), scale_rounding="nearest")
E5M2 = asked(WHOLE.tile, "float8_e5m2")
NVFP4 = asked(
    Tile(1, 16),
    "float4_e2m1fn",
    scale_format="float8_e4m3fn",
    scale_rounding="nearest",
)
FNUZ = asked(WHOLE.tile, "float8_e4m3fnuz")
PAIRS = {  # Two quantizations, and whether float16 has their products.
    "tensors": (WHOLE, WHOLE, True),
    "hybrid": (E5M2, WHOLE, True),
    "fnuz": (FNUZ, FNUZ, True),
    "rows": (ROW, ROW, True),
    "rows of any scale": (ANY_ROW, WHOLE, True),
    "blocks": (THIN, SQUARE, False),
    "MX": (MX, MX, False),
    "NVFP4": (NVFP4, NVFP4, False),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """PyTorch has matmuls of 16 bits with float32 sums on CUDA alone."""
    if BACKEND != "torch":
        return

    def product(x, y, out_dtype):
        return (x.float() @ y.float()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "bmm", product)
    monkeypatch.setattr(torch_kernels, "_is_cuda", lambda x: True)
    monkeypatch.setattr(torch_devices, "sums_in_float32", lambda dtype: True)


def operands(pair, batch=1):
    """As a plan hands them to an emulated kernel, from float32."""
    rows, terms, columns = SIZES
    for number, (size, how) in enumerate(
        zip((rows, columns), PAIRS[pair][:2], strict=True)
    ):
        x = np.concatenate(
            [matrix(size, terms, number + 2 * i) for i in range(batch)]
        )
        found = quantize(ops.convert_to_tensor(x), how)[0]
        yield emulated.folded(found, across=False)


def product_on(device, pair, dtype, batch=1):
    """The emulated product that is chosen for a device."""
    a, b = operands(pair, batch)

    def multiply(x, y, *scales):
        scaled = (
            each.with_values(v) for each, v in zip((a, b), (x, y), strict=True)
        )
        return EMULATED.multiply(*scaled, dtype, fast=False)

    with devices.pretend(device):
        return compiled(multiply, XLA)(a.values, b.values)


def dtypes_of_products(monkeypatch):
    """What is multiplied from here on."""
    seen, (owner, name) = [], PRODUCT
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        first = args[0] if args else kwargs["x"]
        seen.append(keras.backend.standardize_dtype(first.dtype))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)
    return seen


@pytest.mark.slow_except(
    "MX-t4",
    "NVFP4-a100",
    "blocks-t4",
    "fnuz-a100",
    "hybrid-t4",
    "rows-a100",
    "tensors-a100",
)
@pytest.mark.full
@pytest.mark.parametrize("device", NARROW)
@pytest.mark.parametrize("pair", PAIRS)
def test_products_are_those_of_float32(monkeypatch, pair, device):
    expected = {
        dtype: numpy(ops.cast(product_on("cpu", pair, dtype), "float32"))
        for dtype in ("bfloat16", "float32")
    }
    seen = dtypes_of_products(monkeypatch)
    for dtype, wanted in expected.items():
        found = product_on(device, pair, dtype)
        assert keras.backend.standardize_dtype(found.dtype) == dtype
        found = numpy(ops.cast(found, "float32"))
        if dtype == "bfloat16":
            np.testing.assert_array_equal(found, wanted)
        error = np.abs(found - wanted)
        assert (error <= np.abs(wanted).max() * 2.0**-20).all()
    fits = PAIRS[pair][2] or NARROW[device] == "bfloat16"
    assert (NARROW[device] in seen) == fits
    assert fits or "bfloat16" not in seen


@pytest.mark.parametrize("device", NARROW)
def test_products_with_a_batch_are_too(device):
    if BACKEND == "jax":
        pytest.skip("XLA has no such product of bfloat16 on a CPU (JAX 0.10)")
    wanted, found = (
        numpy(product_on(name, "tensors", "float32", batch=3))
        for name in ("cpu", device)
    )
    atol = np.abs(wanted).max() * 2.0**-20
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
    assert found.shape == (3, 64, 48)


@pytest.mark.full
def test_scales_that_are_no_powers_of_two_stay_in_float32():
    x = ops.convert_to_tensor(matrix(4, 256, 0))
    folded = emulated.folded(quantize(x, NEAREST)[0], across=False)
    for dtype in ("bfloat16", "float16", "float32"):
        assert not emulated.exact_in(dtype, folded, folded)
    rows = quantize(x, ROW)[0]
    assert emulated.exact_in("float16", rows, rows)
    assert not emulated.exact_in("float32", rows, rows)
    assert not emulated.exact_in("bfloat16", rows, folded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_the_formats_is_one_of_16_bits(dtype):
    signed = [f for f in map(formats.get, formats.names()) if f.has_sign]
    for fmt in signed:
        every = np.arange(2**fmt.bits, dtype="uint8").view(fmt.dtype)
        numbers = every.astype("float32")
        numbers = numbers[np.isfinite(numbers)]
        narrow = ops.cast(ops.convert_to_tensor(numbers), dtype)
        again = numpy(ops.cast(narrow, "float32"))
        np.testing.assert_array_equal(again, numbers)
