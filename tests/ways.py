"""Eager and compiled ways to run a function, and the bits of what it returns.

`WAYS` parametrizes a test over what the backend in use offers; `COMPILERS`
over the compiler alone, which for torch takes seconds.
"""

import shutil

import keras
import numpy as np
import pytest
from keras import ops

BACKEND = keras.backend.backend()

_NAMES = {
    "jax": ["eager", "jit"],
    "tensorflow": ["eager", "graph", "xla"],
    "torch": ["eager"],
}

_COMPILERS = {"jax": ["jit"], "tensorflow": ["xla"], "torch": ["inductor"]}

FASTEST = {"jax": "jit", "tensorflow": "graph", "torch": "eager"}[BACKEND]
"""For many small calls."""

WAYS = pytest.mark.parametrize("way", _NAMES[BACKEND])

COMPILERS = pytest.mark.parametrize("way", _COMPILERS[BACKEND])


def compiled(function, way):
    """`function` of tensors, run in one of the ways of `WAYS`."""
    if way == "eager":
        return function
    if way == "jit":
        import jax

        return jax.jit(function)
    if way == "inductor":
        if not any(map(shutil.which, ("g++", "clang++", "c++"))):
            pytest.skip("torch.compile needs a C++ compiler, and none is here")
        import torch

        return torch.compile(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=way == "xla")


def run(function, way, *arrays):
    """Call `function` with NumPy arrays as tensors."""
    return compiled(function, way)(*map(ops.convert_to_tensor, arrays))


def array(x):
    """A tensor or array of any dtype as a NumPy array."""
    if not isinstance(x, np.ndarray | np.generic):
        x = {"torch": _torch_array, "tensorflow": _tf_array}.get(
            BACKEND, np.asarray
        )(x)
    return np.asarray(x)


def bits(x):
    """The bits of a float8 or float32 tensor or array; every NaN alike.

    Returns:
        uint8 or uint32 array.
    """
    x = array(x)
    unsigned = x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.itemsize])
    is_nan = np.isnan(x.astype(np.float32))
    return np.where(is_nan, np.iinfo(unsigned.dtype).max, unsigned)


def same_bits(actual, expected):
    """Fail unless both have the same shape, dtype and bits."""
    got, wanted = bits(actual), bits(expected)
    assert got.dtype == wanted.dtype, f"{got.dtype} is not {wanted.dtype}"
    np.testing.assert_array_equal(got, wanted)


def _tf_array(x):
    return x.numpy()


def _torch_array(x):
    import ml_dtypes
    import torch

    x = x.detach().cpu()
    name = str(x.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        integer = torch.uint8 if x.element_size() == 1 else torch.int16
        return x.view(integer).numpy().view(getattr(ml_dtypes, name))
    return x.numpy()
