"""The backend operations with which codes and scales are computed.

They are written in `keras.ops` here. A backend replaces those that its
compiler would change, or that it can run faster.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor

HALVES = {"float8_e4m3fn": (7, 256.0), "float8_e5m2": (8, 1.0)}
"""How to decode a format by way of float16: a shift and a factor.

A code is shifted left by this many bits to a float16, which is multiplied by
the factor. This does not hold for NaN of e4m3fn, which stored kernels do not
have.
"""

NAMES = ("tensorflow", "jax", "torch")


@functools.cache
def numbers_of_codes(format_name: str) -> np.ndarray[Any, Any]:
    """Return a table of the values of all 256 codes, float32 (256,)."""
    codes = np.arange(256, dtype="uint8")
    return codes.view(formats.get(format_name).dtype).astype("float32")


class Primitives:
    """Reshaping, table look-ups and casts, in `keras.ops`.

    Attributes:
        numbers_of_a_part: The numbers of a part in `updated_in_parts`, a
            multiple of the sizes of blocks.
    """

    numbers_of_a_part = 1 << 16

    def reshape(self, x: Tensor, shape: Any) -> Tensor:
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

    def updated_in_parts(
        self,
        update: Callable[..., Sequence[Tensor]],
        store: Callable[..., Sequence[Tensor]],
        block: int,
        step: Tensor,
        read: Tensor,
        written: Sequence[Tensor],
    ) -> Sequence[Tensor] | None:
        """Change tensors part by part, so that a part stays in the cache.

        Args:
            update: `update(read, *written)` gets parts (numbers,), and returns
                what is to be stored.
            store: `store(first, *updated)` returns what becomes of the parts
                that are written; `first` numbers are before them.
            block: Tensors have one entry for a number, or for so many.
            step: Int32 scalar, never negative.
            read: A tensor with an entry for each number.
            written: Tensors, first one with an entry for each number.

        Returns:
            The changed tensors; None if they are not worth parts, or cannot
            be cut here.
        """
        part, count = self.numbers_of_a_part, math.prod(written[0].shape)
        # Places are counted in int32. A gradient may be broadcast. XLA takes
        # longer for a loop over few parts than for the whole.
        fits = 16 * part <= count < 1 << 31
        fits = fits and tuple(read.shape) == tuple(written[0].shape)
        if not fits or not self.loops_over_parts(read):
            return None
        flat = ops.reshape(read, (-1,))

        def changed(
            first: Tensor | int, size: int, whole: list[Tensor]
        ) -> list[Tensor]:
            places = [
                (first, size)
                if x.shape[0] == count
                else (first // block, -(-size // block))
                for x in (flat, *whole)
            ]
            old = [
                ops.slice(x, [start], [length])
                for x, (start, length) in zip(
                    (flat, *whole), places, strict=True
                )
            ]
            updated = _apart(step, lambda: update(*old))
            new = _apart(step, lambda: store(first, *updated))
            return [
                ops.slice_update(x, [start], y)
                for x, y, (start, _) in zip(whole, new, places[1:], strict=True)
            ]

        found = ops.fori_loop(
            0,
            count // part,
            lambda number, whole: changed(number * part, part, whole),
            [ops.reshape(x, (-1,)) for x in written],
        )
        if count % part:
            found = changed(count - count % part, count % part, found)
        return [
            ops.reshape(x, y.shape) for x, y in zip(found, written, strict=True)
        ]

    def loops_over_parts(self, x: Tensor) -> bool:
        """Return True if `updated_in_parts` has a loop for a tensor here.

        XLA has to compile it, for a CPU. XLA fuses a maximum of blocks with
        nothing, and so would write whole moments in float32. A GPU would be
        idle in parts that are so small.
        """
        return False

    def in_place(self) -> AbstractContextManager[Any]:
        """Return a scope in which tensors of variables may be changed."""
        return contextlib.nullcontext()

    def quantize_blocks(
        self, rows: Tensor, kind: str, form: str, key: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Return what `numerics.moments` computes of blocks, or None.

        Args:
            rows: Float32 (blocks, numbers).
            kind: The kind of moments.
            form: The form of the scales.
            key: Int32 scalar, or None to round to nearest.

        Returns:
            Uint8 codes of that shape and scales (blocks,).
        """
        return None

    def dequantize_blocks(
        self, codes: Tensor, scale: Tensor, kind: str, form: str
    ) -> Tensor | None:
        """Return the float32 numbers of `quantize_blocks`, or None."""
        return None

    def moment_key(self, step: Tensor, number: int) -> Tensor | None:
        """Return the key of a slot in a step, an int32 scalar, or None.

        Args:
            step: Int32 scalar.
            number: The place of the slot among the optimizer's variables.
        """
        return None

    def known_number(self, x: Tensor) -> float | None:
        """Return a float32 scalar as a float; None if reading it is slow."""
        return None

    def abs_or_inf(self, x: Tensor) -> Tensor:
        """Return absolute values; some backends turn NaN into infinity.

        A backend does so if its maximum can lose NaN.
        """
        return ops.abs(x)

    def sqrt(self, x: Tensor) -> Tensor:
        """Return the square roots of float32 values, rounded correctly."""
        return ops.sqrt(x)

    def numbers(self, codes: Tensor, format_name: str) -> Tensor:
        """Convert codes to float32 values by a table of 256 values.

        Args:
            codes: Uint8 tensor of any shape, without codes of NaN or infinity.
            format_name: The ml_dtypes name of a format of eight bits.

        Returns:
            Float32 tensor of that shape.
        """
        table = ops.convert_to_tensor(numbers_of_codes(format_name))
        return ops.take(table, ops.cast(codes, "int32"), axis=0)

    def as_float8(self, codes: Tensor, format_name: str) -> Tensor:
        """Reinterpret uint8 codes as a float8 dtype."""
        return ops.cast(self.numbers(codes, format_name), format_name)

    def as_dtype(self, x: Tensor, dtype: str) -> Tensor:
        """Cast a tensor, also to and from formats Keras does not know."""
        return ops.cast(x, dtype)

    def before_cast(self, x: Tensor, dtype: str) -> Tensor:
        """Return values that a cast to a format does not change.

        Some compilers drop a cast to float8 if the result is cast back, and
        so would drop the rounding. There the values are rounded in float32.

        Args:
            x: Float32, no larger than the format's largest value.
            dtype: The ml_dtypes name of the format.
        """
        return x

    def before_widening(self, x: Tensor) -> Tensor:
        """Return float8 values in a form that a compiler casts to float32.

        Some compilers drop that cast and the one to float8. Where casts to
        float8 are not rounded by `before_cast`, the values are stored.
        """
        return x

    def divided(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `x / y`, correctly rounded.

        Args:
            x: Float32, normal numbers.
            y: Float32, normal numbers, broadcastable to `x`.
        """
        return ops.divide(x, y)

    def broadcast_guard(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return `scale` in a form by which XLA really divides.

        XLA must not see a broadcast scalar.

        It is NaN where `x` is. XLA for a CPU turns a division by a broadcast
        scalar into a multiplication by its reciprocal, which differs by one
        ulp in a quarter of the cases (JAX 0.10).

        Args:
            x: Float32, the tensor to divide.
            scale: Float32, broadcastable to `x`.
        """
        return ops.where(ops.isnan(x), float("nan"), scale)


def _apart(
    step: Tensor, function: Callable[[], Sequence[Tensor]]
) -> list[Tensor]:
    """Return results that XLA computes once, in a branch that is always taken.

    Otherwise it would compute them again for each use, and copy what a loop
    changes (JAX 0.10, CPU).

    Args:
        step: Int32 scalar, never negative, which XLA does not know.
        function: It returns tensors.
    """

    def zeros() -> list[Tensor]:
        return [ops.zeros_like(x) for x in function()]

    found: list[Tensor] = ops.cond(step >= 0, lambda: list(function()), zeros)
    return found


if TYPE_CHECKING:
    current: Primitives
    """The `Primitives` of the backend that Keras runs on.

    They are found by the name of the backend, so that this module imports no
    framework, and once, at the first use: a process has one backend. Their
    look-up raises NotImplementedError if it is another one.
    """
else:

    def __getattr__(name):
        if name != "current":
            raise AttributeError(f"module {__name__!r} has no {name!r}")
        globals()[name] = found = _load(keras.backend.backend())
        return found


def _load(backend: str) -> Primitives:
    if backend not in NAMES:
        raise NotImplementedError(
            f"No float8 kernels for the Keras backend {backend!r}. Allowed: "
            f"{', '.join(NAMES)}. Set KERAS_BACKEND to one of them."
        )
    name = f"keras_policy_ext.backends.{backend}.backend"
    loaded: Primitives = importlib.import_module(name).BACKEND
    return loaded
