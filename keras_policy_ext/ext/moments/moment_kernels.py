"""How a framework quantizes moments and updates weights part by part.

They are written in `keras.ops` here. The module `moments` of a framework
replaces what it can run faster.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor

#: The module of each framework that has the kernels, as `KERNELS`.
_MODULES = {
    "jax": "keras_policy_ext.ext.moments.jax",
    "tensorflow": "keras_policy_ext.ext.moments.tensorflow",
    "torch": "keras_policy_ext.ext.moments.torch.codes",
}


class MomentKernels:
    """The operations of a step with quantized moments, in `keras.ops`."""

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
        part = backends.current.numbers_of_a_part
        count = math.prod(written[0].shape)
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
        """Return what `ext.moments.codes` computes of blocks, or None.

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


def _apart(
    step: Tensor, function: Callable[[], Sequence[Tensor]]
) -> list[Tensor]:
    """Return results of a function that XLA computes only once."""
    # In a branch that is always taken, since `step`, int32, is never negative.
    # XLA does not know it. Otherwise it would compute them again for each use,
    # and copy what a loop changes (JAX 0.10, CPU).

    def zeros() -> list[Tensor]:
        return [ops.zeros_like(x) for x in function()]

    return ops.cond(step >= 0, lambda: list(function()), zeros)


if TYPE_CHECKING:
    current: MomentKernels
    """The kernels of the backend that Keras runs on, found at the first use."""
else:

    def __getattr__(name):
        if name != "current":
            raise AttributeError(f"module {__name__!r} has no {name!r}")
        home = importlib.import_module(_MODULES[keras.backend.backend()])
        globals()[name] = home.KERNELS
        return home.KERNELS
