"""Products with a stored kernel on a CPU, by parts of the kernel.

The codes of a part and their floats stay in the cache of a core, so nothing of
the size of the kernel is written in floats. The sizes of parts were measured
for kernels of 512 to 8192 rows and columns, with one thread and two; see
`integration/benchmarks/served.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops
from keras.backend import standardize_dtype

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.primitives import DECODED, halves
from keras_policy_ext.stored_kernels import BLOCK

LARGE = 1 << 17
"""Kernels of more numbers are multiplied by parts, which have about so many."""

FEW = 16
"""Up to this many rows of inputs are few."""


class StoredMatrix(NamedTuple):
    """A stored kernel as a product reads it.

    Attributes:
        codes: The codes in the kernel's own axes, uint8; or their numbers in
            float16.
        blocks: None, or scales: one row for each `rows` of `m`, and one column
            for each of `n`.
        format: The name of the format of the codes.
        shape: `(matrices, m, n)`; the codes have this shape in memory.
        sums: True if the product adds up over `m`: rows `(matrices, rows, m)`
            give outputs `(matrices, rows, n)`. False if it adds up over `n`,
            and the outputs are `(matrices, rows, m)`.
        rows: How many of `m` share a row of `blocks`.
    """

    codes: Tensor
    blocks: Tensor | None
    format: str
    shape: tuple[int, int, int]
    sums: bool
    rows: int = BLOCK

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the tensors; hashable."""
        return self[2:]

    @property
    def factor(self) -> float:
        """What products by codes are multiplied by; see `DECODED`."""
        has_codes = standardize_dtype(self.codes.dtype) == "uint8"
        return DECODED[self.format][1] if has_codes else 1.0

    def size(
        self,
        rows: int,
        threads: int,
        threaded: int = 1 << 19,
        one_row: int | None = None,
    ) -> int:
        """Return how many of the `m` rows of a matrix are in a part.

        Args:
            rows: The rows of inputs, of each matrix.
            threads: The threads that share a part.
            threaded: The numbers of a part for each of several threads.
            one_row: The size for one row that is summed; None for no other.
        """
        _, m, n = self.shape
        numbers = LARGE if threads == 1 else threads * threaded
        size = 1 << max((numbers // n).bit_length() - 1, 0)
        if rows > FEW:
            size = max(size, 256)
        elif rows == 1 and self.sums:
            size = one_row or size
        return min(size, m if self.blocks is None else self.rows, m)


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_loops(
    x: Tensor, kernel: StoredMatrix, size: int, loop: Callable[..., Tensor]
) -> Tensor:
    """Multiply by a stored kernel, `size` rows of it at a time, in XLA's loops.

    It returns the product without its factor. `loop(first, end, function,
    start)` calls `function(i, x)` for each number, from `start` on, and returns
    the last result.
    """
    matrices, m, n = kernel.shape
    codes = ops.reshape(kernel.codes, kernel.shape)

    def of_matrix(number: Any) -> Tensor:
        """Multiply the rows by one of the kernel's matrices."""
        operand, matrix = x[0 if x.shape[0] == 1 else number], codes[number]
        rows = ops.shape(operand)[0]

        def part(start: Any, count: int = size) -> Tensor:
            """Multiply by `count` rows of the matrix, from `start` on."""
            some = ops.slice(matrix, (start, 0), (count, n))
            wide = ops.cast(halves(some, kernel.format), "float32")
            if kernel.blocks is not None:
                wide = wide * kernel.blocks[start // kernel.rows]
            if not kernel.sums:
                return ops.matmul(operand, ops.transpose(wide))
            columns = ops.slice(operand, (0, start), (rows, count))
            return ops.matmul(columns, wide)

        parts, rest = divmod(m, size)
        if kernel.sums:
            # The first part is in the loop too. XLA for a CPU decodes what is
            # in no loop for all layers before it multiplies (JAX 0.10).
            zeros = ops.zeros((rows, n))
            y = loop(0, parts, lambda i, y: y + part(i * size), zeros)
            return y + part(m - rest, rest) if rest else y
        y = ops.map(lambda i: part(i * size), ops.arange(parts))
        y = ops.reshape(ops.transpose(y, (1, 0, 2)), (-1, parts * size))
        return ops.concatenate([y, part(m - rest, rest)], 1) if rest else y

    if matrices == 1:
        return of_matrix(0)[None]
    # One after the other, so that no two are in floats at once.
    return ops.map(of_matrix, ops.arange(matrices))
