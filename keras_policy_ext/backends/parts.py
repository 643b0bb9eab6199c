"""Products with a stored kernel on a CPU, by parts of the kernel.

The codes of a part and their floats stay in the cache of a core, so nothing of
the size of the kernel is written in floats. The sizes of parts were measured
for kernels of 512 to 8192 rows and columns, with one thread and two; see
`integration/benchmarks/served.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.stored_kernels import BLOCK

Decode = Callable[[Tensor, Any, int], Tensor]
"""Takes a matrix of codes, the first row and a count; returns float32."""

Loop = Callable[[int, int, Callable[[Any, Tensor], Tensor], Tensor], Tensor]
"""Takes the first number, the one after the last, a function, and a start."""


class StoredMatrix(NamedTuple):
    """Describes how a product reads the codes of a kernel.

    Attributes:
        format: The name of the format of the codes.
        shape: `(matrices, m, n)`; the codes have this shape in memory.
        sums: True if the product adds up over `m`: rows `(matrices, rows, m)`
            give outputs `(matrices, rows, n)`. False if it adds up over `n`,
            and the outputs are `(matrices, rows, m)`.
    """

    format: str
    shape: tuple[int, int, int]
    sums: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A rule of a framework: how many of the `m` rows of codes are in a part.

    Attributes:
        numbers: The numbers of a part for a few rows of inputs.
        threaded: The same for each thread, where several share a part.
        one_row: The `m` of a part for a single row that sums over them; None
            for as many as `numbers` gives.
        depth: The least `m` of a part for more rows than a few.
        few: Up to this many rows are few.
    """

    numbers: int = 1 << 17
    threaded: int = 1 << 19
    one_row: int | None = None
    depth: int = 256
    few: int = 16

    def size(
        self, rows: int, matrix: StoredMatrix, threads: int, in_blocks: bool
    ) -> int:
        """Return how many of the `m` are in a part.

        Args:
            rows: The rows of inputs, of each matrix.
            matrix: The stored kernel.
            threads: The threads that share a part.
            in_blocks: Whether blocks of 128 have scales of their own.
        """
        _, m, n = matrix.shape
        numbers = self.numbers if threads == 1 else threads * self.threaded
        size = _power_of_two(numbers // n)
        if rows > self.few:
            size = max(size, self.depth)
        elif rows == 1 and matrix.sums and self.one_row is not None:
            size = self.one_row
        return min(size, BLOCK if in_blocks else m, m)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is no larger; 1 for 0."""
    return 1 << max(number.bit_length() - 1, 0)


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_loops(
    x: Tensor,
    codes: Tensor,
    matrix: StoredMatrix,
    size: int,
    blocks: Tensor | None,
    decode: Decode,
    loop: Loop,
) -> Tensor:
    """Multiply by parts, in loops that XLA compiles, or TensorFlow runs.

    Args:
        x: See `Arithmetic.product_by_parts`, as for `codes` and `blocks`.
        codes: In the shape of `matrix`.
        matrix: How to read them.
        size: The `m` of a part.
        blocks: Their scales, or None.
        decode: Decodes a part.
        loop: The framework's, which can be differentiated.
    """
    matrices, m, _ = matrix.shape

    def of_matrix(number: Any) -> Tensor:
        operand, some = x[0 if x.shape[0] == 1 else number], codes[number]

        def part(start: Any, count: int = size) -> Tensor:
            """Multiply by `count` rows of the matrix, from `start` on."""
            wide = decode(some, start, count)
            scale = 1.0 if blocks is None else blocks[start // BLOCK]
            if not matrix.sums:
                return ops.matmul(operand * scale, ops.transpose(wide))
            rows = operand.shape[0]
            if rows is None:  # In a graph of TensorFlow.
                rows = -1
            columns = ops.slice(operand, (0, start), (rows, count))
            return ops.matmul(columns, wide) * scale

        parts, rest = divmod(m, size)
        if matrix.sums:
            # The first part is in the loop too. XLA for a CPU decodes what is
            # in no loop for all layers before it multiplies (JAX 0.10).
            zeros = ops.zeros((ops.shape(operand)[0], some.shape[1]))
            y = loop(0, parts, lambda i, y: y + part(i * size), zeros)
            return y + part(m - rest, rest) if rest else y
        joined = [part(0)]
        if parts > 1:
            y = ops.map(lambda i: part(i * size), ops.arange(parts))
            y = ops.transpose(y, (1, 0, 2))
            joined = [ops.reshape(y, (-1, parts * size))]
        if rest:
            joined.append(part(m - rest, rest))
        return ops.concatenate(joined, axis=1) if rest else joined[0]

    if matrices == 1:
        return of_matrix(0)[None]
    # One after the other, so that no two are in floats at once.
    return ops.map(of_matrix, ops.arange(matrices))
