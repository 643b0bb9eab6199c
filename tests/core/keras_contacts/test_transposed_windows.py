"""Why `_keras/transposed_windows.py` is needed. See `_keras/__init__.py`."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_policy_ext as kpe
from keras_policy_ext._keras import transposed_windows
from keras_policy_ext.contractions.kinds import ConvTranspose
from steps import gradients, numpy

EXACT = "float8/current(power_of_two=True)_from_float32"
CASES = [
    (kernel, stride, padding, more)
    for kernel, stride, padding, more in itertools.product(
        (2, 3, 4), (1, 2, 3), ("same", "valid"), (None, 1)
    )
    if more is None or more < stride
]


@pytest.mark.full
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.slow_except("valid")
def test_float8_keeps_the_outputs_that_keras_keeps(padding):
    """Of numbers that float8 holds exactly."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (1, 5, 1)).astype("float32")
    for kernel, stride, _, more in (c for c in CASES if c[2] == padding):
        layer = keras.layers.Conv1DTranspose(
            1, kernel, stride, padding, output_padding=more
        )
        try:
            layer(x)
        except ValueError:  # Keras 3.12 on PyTorch has none for this case
            continue
        layer.kernel.assign(rng.integers(-4, 5, layer.kernel.shape))
        model = keras.Sequential([keras.Input((5, 1)), layer])
        expected = numpy(model(x))
        kpe.convert(model, EXACT)
        np.testing.assert_array_equal(numpy(model(x)), expected, str(more))


@pytest.mark.full_except("2-3-valid")
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(3, 2, "same"), (4, 3, "same"), (2, 3, "valid")],
)
def test_its_gradients_are_those_of_keras(kernel, stride, padding):
    """Of numbers that float8 holds exactly."""
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (2, 5, 3)).astype("float32")
    layer = keras.layers.Conv1DTranspose(
        4, kernel, stride, padding, use_bias=False
    )
    model = keras.Sequential([keras.Input((5, 3)), layer])
    layer.kernel.assign(rng.integers(-4, 5, layer.kernel.shape))
    g = rng.integers(-4, 5, numpy(model(x)).shape).astype("float32")

    def found():
        def loss(y):
            return ops.sum(ops.multiply(y, g))

        y, dx, (dkernel, *_) = gradients(model, x, loss, compiled=True)
        return [numpy(each) for each in (y, dx, dkernel)]

    expected = found()
    kpe.convert(model, EXACT)
    for of_float8, of_keras in zip(found(), expected, strict=True):
        np.testing.assert_array_equal(of_float8, of_keras)


@pytest.mark.skipif(
    not transposed_windows.are_own(),
    reason="the outputs are those of JAX and TensorFlow here",
)
def test_before_keras_3_15_pytorch_had_other_outputs(monkeypatch):
    conv = ConvTranspose((2,), "same", (1,), "channels_last")
    own = conv.around((3,))
    monkeypatch.setattr(transposed_windows, "are_own", lambda: False)
    assert conv.around((3,)) != own
