"""The backend operations with which codes and scales are computed.

They are written in `keras.ops` here. A backend replaces those that its
compiler would change, or that it can run faster.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Size, Tensor

HALVES = {"float8_e4m3fn": (7, 256.0), "float8_e5m2": (8, 1.0)}
"""How to decode a format by way of float16: a shift and a factor.

A code is shifted left by this many bits to a float16, which is multiplied by
the factor. It does not hold for NaN of e4m3fn, which no stored kernel has.
"""

FLOAT4 = "float4_e2m1fn"

DECODED = {
    **HALVES,
    "float8_e4m3fnuz": (7, 128.0),
    FLOAT4: (9, 16384.0),
    **dict.fromkeys(formats.INTEGERS, (0, 1.0)),
}
"""The same for all formats that are decoded by way of float16.

Integers are the bits of int8, and are cast. `float8_e5m2fnuz` is none of them:
float16 has infinities where it has numbers.
"""

NAMES = ("tensorflow", "jax", "torch")


class Primitives:
    """Reshaping, table look-ups and casts, in `keras.ops`.

    Attributes:
        numbers_of_a_part: The numbers of a part where a tensor is computed in
            parts: a power of two, so that a part is whole blocks.
    """

    numbers_of_a_part = 1 << 16

    def reshape(self, x: Tensor, shape: Sequence[Size]) -> Tensor:
        """Reshape a tensor as `ops.reshape` does."""
        return ops.reshape(x, shape)

    def permute(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Transpose a tensor as `ops.transpose` does."""
        return ops.transpose(x, axes)

    def repeat(self, x: Tensor, repeats: int, axis: int) -> Tensor:
        """Repeat each entry along an axis as `ops.repeat` does."""
        return ops.repeat(x, repeats, axis=axis)

    def stack(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """Stack tensors along a new axis as `ops.stack` does."""
        return ops.stack(tensors, axis)

    def by_rows(
        self, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return `function(0, *tensors)`, in parts if that is faster.

        Args:
            function: It treats each row alike. It gets the number of elements
                of the first tensor that are before its part, and parts of the
                tensors. It returns tensors with as many rows.
            *tensors: All have as many rows, along their first axis.
        """
        return function(0, *tensors)

    def known_number(self, x: Tensor) -> float | None:
        """Return a float32 scalar as a float; None if reading it is slow."""
        return None

    def abs_or_inf(self, x: Tensor) -> Tensor:
        """Return absolute values; infinity for NaN where `max` can lose NaN."""
        return ops.abs(x)

    def sqrt(self, x: Tensor) -> Tensor:
        """Return the square roots of float32 values, rounded correctly."""
        return ops.sqrt(x)

    def numbers(self, codes: Tensor, format_name: str) -> Tensor:
        """Convert uint8 codes of a format in `DECODED` to float32 values.

        A code has the bits of a narrow value. There are no codes of NaN or
        infinity among them.
        """
        # By way of float16, which has every number of these formats: half the
        # time of a table (JAX 0.10, TF 2.21, CPU).
        _, factor = DECODED[format_name]
        return ops.cast(halves(codes, format_name), "float32") * factor

    def as_float8(self, codes: Tensor, format_name: str) -> Tensor:
        """Reinterpret uint8 codes as a float8 dtype."""
        return ops.cast(self.numbers(codes, format_name), format_name)

    def as_dtype(self, x: Tensor, dtype: str) -> Tensor:
        """Cast a tensor; a backend overrides it for formats Keras lacks."""
        return ops.cast(x, dtype)

    def before_cast(self, x: Tensor, dtype: str) -> Tensor:
        """Return values that a cast to a format does not change.

        Some compilers drop a cast to float8 if the result is cast back, and so
        would drop the rounding. There the values, float32 and no larger than
        the format's largest, are rounded in float32.
        """
        return x

    def before_widening(self, x: Tensor) -> Tensor:
        """Return float8 values in a form that a compiler casts to float32.

        Some compilers drop that cast together with the one to float8. They
        cannot if it is behind a barrier, or if `before_cast` has rounded.
        """
        return x

    def divided(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `x / y` of normal float32 numbers, correctly rounded."""
        return ops.divide(x, y)

    def broadcast_guard(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return `scale`, float32, in a form by which XLA divides correctly.

        The result has the shape of `x`, and is NaN where `x` is. XLA for a CPU
        multiplies by the reciprocal of a divisor that it knows for a broadcast
        scalar. That differs by one ulp in a quarter of cases (JAX 0.10).
        """
        return ops.where(ops.isnan(x), float("nan"), scale)


def view(x: Tensor, dtype: str) -> Tensor:
    """Reinterpret a tensor's bits as a dtype of the same size.

    It also works for a last axis of unknown size on TensorFlow, where
    `ops.view` fails (keras 3.15; for a scalar keras 3.12).
    """
    is_size_known = len(x.shape) > 0 and x.shape[-1] is not None
    if is_size_known or keras.backend.backend() != "tensorflow":
        return ops.view(x, dtype)
    return ops.squeeze(ops.view(ops.expand_dims(x, -1), dtype), -1)


def halves(codes: Tensor, format_name: str) -> Tensor:
    """Return codes as float16: their values divided by the factor of `DECODED`.

    A code has the bits of a narrow value, and none is NaN. Codes that are in
    float16 already are unchanged.
    """
    if keras.backend.standardize_dtype(codes.dtype) == "float16":
        return codes
    shift, _ = DECODED[format_name]
    if shift == 0:
        return ops.cast(view(codes, "int8"), "float16")
    if format_name == FLOAT4:
        # Shifted left, the sign is that of float16. Shifted right, it stays
        # there, and its copies before the exponent are cleared.
        bits = ops.left_shift(ops.cast(codes, "int16"), np.int16(12))
        bits = ops.right_shift(bits, np.int16(12 - shift))
        return view(ops.bitwise_and(bits, np.int16(~0x7000)), "float16")
    # A conversion from int8 repeats the sign bit in all higher bits, so that
    # the sign of the shifted code is where float16 has it. The bit below is
    # cleared: a shift by 7 makes it equal to the sign.
    bits = ops.cast(view(codes, "int8"), "int16")
    bits = ops.left_shift(bits, np.int16(shift))
    if shift == 7:
        bits = ops.bitwise_and(bits, np.int16(~0x4000))
    return view(bits, "float16")


if TYPE_CHECKING:
    current: Primitives
    """The `Primitives` of the backend that Keras runs on.

    They are found by the name of the backend, so that this module imports no
    framework, and once, at the first use: a process has one backend. Their
    look-up raises NotImplementedError if it is another one.
    """
else:

    def __getattr__(name):
        """Import the primitives of Keras's backend at their first use."""
        if name != "current":
            raise AttributeError(f"module {__name__!r} has no {name!r}")
        globals()[name] = found = _load(keras.backend.backend())
        return found


def _load(backend: str) -> Primitives:
    """Import and return the `Primitives` of a backend."""
    if backend not in NAMES:
        raise NotImplementedError(
            f"No float8 kernels for the Keras backend {backend!r}. Allowed: "
            f"{', '.join(NAMES)}. Set KERAS_BACKEND to one of them."
        )
    name = f"keras_policy_ext.backends.{backend}.backend"
    return importlib.import_module(name).BACKEND
