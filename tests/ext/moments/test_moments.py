"""Codes of moments: bits as in NumPy, and no loss of what is small."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_policy_ext import reference
from keras_policy_ext.ext.moments import codes as moments
from keras_policy_ext.ext.reference import moments as judge
from keras_policy_ext.ext.reference.moments import moment_key
from keras_policy_ext.ext.stochastic.rounding import key_of_use
from steps import numpy

FORMS = ("float8", "mx")
KINDS = ("first", "second")


def hostile(kind, count=1000):
    """Numbers over many powers of two, of which some are hostile."""
    random = np.random.default_rng(0)
    x = random.standard_normal(count) * np.exp(
        4 * random.standard_normal(count)
    )
    x[:6] = 0, 1e-40, -1e-40, np.inf, 3e38, np.nan
    x[-256:] = 0
    x = x.astype("float32")
    with np.errstate(over="ignore"):
        return np.square(x) if kind == "second" else x


def compiled(function):
    """The function as a training step runs it."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    return function


def tensor(x):
    return ops.convert_to_tensor(x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [None, 3])
def test_codes_scales_and_numbers_are_those_of_numpy(kind, form, step):
    x = hostile(kind)

    def quantized(x):
        key = (
            None if step is None else key_of_use(ops.cast(step, "int32"), 0, 7)
        )
        codes, scale = moments.quantize_moments(x, kind, form, key)
        numbers = moments.dequantize_moments(codes, scale, kind, form)
        return codes, scale, numbers

    found = [numpy(each) for each in compiled(quantized)(tensor(x))]
    key = None if step is None else moment_key(step, 7)
    codes, scale = reference.quantize_moments(x, kind, form, key)
    numbers = reference.dequantize_moments(codes, scale, kind, form)
    np.testing.assert_array_equal(found[0], codes)
    np.testing.assert_array_equal(found[1], scale)
    np.testing.assert_array_equal(found[2], numbers)
    assert np.all(np.isfinite(numbers))


@pytest.mark.any_backend
@pytest.mark.parametrize("form", FORMS)
def test_a_number_is_off_by_half_a_code_at_most(form):
    x = np.exp(np.random.default_rng(0).uniform(-3, 0, 4096)).astype("float32")
    for kind, bits in (("first", 3), ("second", 4)):
        stored = reference.quantize_moments(x, kind, form)
        found = reference.dequantize_moments(*stored, kind, form)
        error = np.abs(np.sqrt(found) / np.sqrt(x) - 1)
        if kind == "first":
            error = np.abs(found / x - 1)
        assert np.max(error) <= 2.0 ** -(bits + 1)


@pytest.mark.any_backend
def test_a_second_moment_above_0_never_becomes_0():
    x = np.array([1.0, 1e-30, 0.0], "float32")
    for key in (None, 5):
        stored = reference.quantize_moments(x, "second", "float8", key)
        found = reference.dequantize_moments(*stored, "second", "float8")
        assert found[1] > 0 and found[2] == 0


@pytest.mark.any_backend
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_at_random_is_right_on_average(kind):
    x = np.linspace(0.5, 1, 64, dtype="float32")
    total = np.zeros(64)
    steps = 2000
    for step in range(steps):
        stored = reference.quantize_moments(
            x, kind, "float8", moment_key(step, 1)
        )
        found = reference.dequantize_moments(*stored, kind, "float8")
        total += np.sqrt(found) if kind == "second" else found
    wanted = np.sqrt(x) if kind == "second" else x
    # Each is one of two neighbours, at most 1/16 of 1 apart.
    room = 5 * (1 / 16) / 2 / np.sqrt(steps)
    assert np.max(np.abs(total / steps - wanted)) < room


def test_blocks_that_a_tensor_does_not_fill_are_counted():
    assert moments.blocks_of((3, 100), "float8") == 2
    assert moments.blocks_of((3, 100), "mx") == 10


@pytest.mark.any_backend
def test_the_reference_has_the_same_constants():
    names = (
        "BLOCKS",
        "GOLDEN",
        "LARGEST",
        "OFFSET",
        "SMALLEST",
        "SMALLEST_NORMAL",
    )
    for name in names:
        assert getattr(moments, name) == getattr(judge, name)
    for kind in KINDS:
        ours, theirs = moments.KINDS[kind], judge.KINDS[kind]
        assert tuple(ours) == tuple(theirs)
        assert ours.dropped == theirs.dropped
        assert ours.largest == theirs.largest


@pytest.mark.any_backend
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_in_a_file_are_those_of_the_reference(kind, form):
    codes = np.arange(768, dtype="uint8").reshape(3, 256)[:, :250]
    blocks = moments.blocks_of(codes.shape, form)
    if form == "mx":
        scale = np.linspace(1, 254, blocks).astype("uint8")
    else:
        scale = np.geomspace(2.0**-100, 2.0**100, blocks).astype("float32")
    with np.errstate(over="ignore", under="ignore"):
        found = moments.numbers_in_file(codes, scale, kind, form)
        expected = reference.dequantize_moments(codes, scale, kind, form)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view("int32"), expected.view("int32"))
