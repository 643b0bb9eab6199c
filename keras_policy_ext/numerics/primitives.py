"""The operations of Keras's backend on which codes and scales rest.

Each is written in `keras.ops` here; a backend replaces those that its compiler
would change, or that take less time otherwise.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor

HALVES = {"float8_e4m3fn": (7, 256.0), "float8_e5m2": (8, 1.0)}
"""By how many bits a code is shifted to be that of a float16 number, and by
what that is multiplied to be the number of the code. Not NaN of e4m3fn, which
stored kernels do not have."""

NAMES = ("tensorflow", "jax", "torch")

_loaded: dict[str, Primitives] = {}


@functools.cache
def numbers_of_codes(format_name: str) -> np.ndarray[Any, Any]:
    """Float32 (256,): the number of each code of a format."""
    codes = np.arange(256, dtype="uint8")
    return codes.view(formats.get(format_name).dtype).astype("float32")


class Primitives:
    """Reshaping and rounding, in `keras.ops`."""

    def reshape(self, x: Tensor, shape: Any) -> Tensor:
        """`ops.reshape`."""
        return ops.reshape(x, shape)

    def permute(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """`ops.transpose`."""
        return ops.transpose(x, axes)

    def repeat(self, x: Tensor, repeats: int, axis: int) -> Tensor:
        """`ops.repeat`."""
        return ops.repeat(x, repeats, axis=axis)

    def stack(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """`ops.stack`."""
        return ops.stack(tensors, axis)

    def known_number(self, x: Tensor) -> float | None:
        """Return a float32 scalar as a float; None where reading it costs."""
        return None

    def abs_or_inf(self, x: Tensor) -> Tensor:
        """Absolute values, with infinity where a number is NaN if needed.

        Where a maximum loses NaN, infinity is in its place.
        """
        return ops.abs(x)

    def numbers(self, codes: Tensor, format_name: str) -> Tensor:
        """Decode codes by a table of all 256.

        Args:
            codes: Uint8 tensor of any shape, of finite numbers.
            format_name: The ml_dtypes name of a format of eight bits.

        Returns:
            Float32 tensor of that shape.
        """
        table = ops.convert_to_tensor(numbers_of_codes(format_name))
        return ops.take(table, ops.cast(codes, "int32"), axis=0)

    def as_float8(self, codes: Tensor, format_name: str) -> Tensor:
        """View codes as a float8 dtype, without changing a byte."""
        return ops.cast(self.numbers(codes, format_name), format_name)

    def as_dtype(self, x: Tensor, dtype: str) -> Tensor:
        """`ops.cast`, from and to formats that Keras does not know."""
        return ops.cast(x, dtype)

    def broadcast_guard(self, x: Tensor, scale: Tensor) -> Tensor:
        """`scale`, of which XLA sees no broadcast; NaN where `x` is.

        XLA for a CPU turns a division by a broadcast scalar into a
        multiplication by its reciprocal, off by one ulp in a quarter of the
        cases (JAX 0.10).

        Args:
            x: Float32, what is to be divided.
            scale: Float32, broadcastable to `x`.
        """
        return ops.where(ops.isnan(x), float("nan"), scale)


def primitives() -> Primitives:
    """Return the primitives of Keras's backend.

    They are found by the name of the backend, so that nothing here imports a
    framework.

    Raises:
        NotImplementedError: If Keras runs on another backend.
    """
    backend = keras.backend.backend()
    # A plain look-up, which torch.compile follows; it breaks on an import.
    if backend not in _loaded:
        _loaded[backend] = _load(backend)
    return _loaded[backend]


def _load(backend: str) -> Primitives:
    if backend not in NAMES:
        raise NotImplementedError(
            f"No float8 kernels for the Keras backend {backend!r}. Allowed: "
            f"{', '.join(NAMES)}. Set KERAS_BACKEND to one of them."
        )
    name = f"keras_policy_ext.backends.{backend}.backend"
    loaded: Primitives = importlib.import_module(name).BACKEND
    return loaded
