"""The Triton kernels of one-byte moments have the bits of the reference."""

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

from keras_policy_ext.ext.moments.torch import codes as moments
from keras_policy_ext.ext.moments.torch import triton_codes as triton_moments
from keras_policy_ext.ext.reference import moments as reference


def hostile(size):
    rng = np.random.default_rng(0)
    exponents = rng.integers(-140, 127, (40, size))
    x = np.float32(rng.normal(size=(40, size)) * 0.3 * 2.0**exponents)
    x[0] = 0
    x[1, :4] = np.nan, np.inf, -np.inf, -np.nan
    x[2:4] = np.float32([[1e-42], [2.0**-126]])
    x[4:] = x[4:].clip(-1e-3, 1e-3)
    return x


@pytest.mark.parametrize("key", [None, 12345, -77])
@pytest.mark.parametrize("form", reference.BLOCKS)
@pytest.mark.parametrize("kind", reference.KINDS)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_codes_scales_and_numbers_are_those_of_the_reference(kind, form, key):
    x = hostile(reference.BLOCKS[form])
    expected = reference.quantize_moments(x, kind, form, key)
    if key is not None:
        key = torch.tensor(key, dtype=torch.int32)
    found = triton_moments.quantized(torch.tensor(x), kind, form, key)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    numbers = triton_moments.numbers(*found, kind, form)
    exact = reference.dequantize_moments(*expected, kind, form)
    np.testing.assert_array_equal(
        numbers.numpy().view("int32"), exact.view("int32")
    )


@pytest.mark.parametrize("number", [0, 1, 70])
@pytest.mark.parametrize("step", [0, 1, 99999])
def test_a_key_is_that_of_the_reference(step, number):
    found = triton_moments.moment_key(
        torch.tensor(step, dtype=torch.int32), number
    )
    assert int(found) == reference.moment_key(step, number)


def test_the_check_before_the_first_use_sees_a_wrong_bit(monkeypatch):
    triton_moments.check("cpu", moments.quantized, moments.numbers)
    right = triton_moments.numbers
    monkeypatch.setattr(
        triton_moments, "numbers", lambda *args: right(*args) * 1.0000002
    )
    with pytest.raises(ValueError, match="Bits of first moments"):
        triton_moments.check("cpu", moments.quantized, moments.numbers)
