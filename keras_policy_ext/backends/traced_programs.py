"""Descriptions of traced programs: their matmuls."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class MatmulSizes(NamedTuple):
    """The size of a matmul or convolution in a traced program.

    Attributes:
        multiplications: The number of multiplications, each with its addition.
        sizes: The number of elements of each operand.
    """

    multiplications: int
    sizes: tuple[int, int]

    def times(self, repeats: int) -> MatmulSizes:
        """Return this matmul's size when it runs `repeats` times."""
        return self._replace(multiplications=repeats * self.multiplications)


class TracedProgram(NamedTuple):
    """The outputs and the matmuls of a traced function.

    Attributes:
        outputs: The outputs, with a `keras.KerasTensor` for each tensor.
        products: The matmuls, in the order of the program.
        is_complete: Whether the number of runs of each is known.
        chooses: Whether the function looks for the largest or smallest entries
            of a tensor, by a top-k, an argmax or a sort.
    """

    outputs: Any
    products: list[MatmulSizes]
    is_complete: bool = True
    chooses: bool = False


def einsum(equation: str, *shapes: Sequence[int]) -> MatmulSizes:
    """Return the size of the matmul of an einsum of two operands."""
    sizes: dict[str, int] = {}
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, after = term.partition("...")
        number = len(shape) - len(before + after)
        # Axes that stand for "..." are counted from the last one on.
        middle = [f"{n}" for n in reversed(range(number))] if dots else []
        for axis, size in zip([*before, *middle, *after], shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 1))
    first, second = map(math.prod, shapes)
    return MatmulSizes(math.prod(sizes.values()), (first, second))


def matmul(first: Sequence[int], second: Sequence[int]) -> MatmulSizes:
    """Return the size of `ops.matmul` of tensors with these shapes."""
    left = "..." + "rk"[-len(first) :]
    right = "...kc" if len(second) > 1 else "...k"
    return einsum(f"{left},{right}", first, second)


def convolution(
    positions: int, inputs: Sequence[int], kernel: Sequence[int]
) -> MatmulSizes:
    """Return the size of a convolution of tensors with these shapes.

    Args:
        positions: How often each kernel element is used: the number of output
            positions of all samples.
        inputs: The shape of the inputs.
        kernel: The shape of the kernel.
    """
    entries = math.prod(kernel)
    return MatmulSizes(positions * entries, (math.prod(inputs), entries))


_SCOPE = "kpe_layer_"


def scope_name(number: int) -> str:
    """Return the name scope of a layer's operations, for `layer_of`."""
    return f"{_SCOPE}{number}"


def layer_of(name: str) -> int | None:
    """Return the number of the innermost layer in a name scope, or None."""
    found = re.findall(rf"{_SCOPE}(\d+)", name)
    return int(found[-1]) if found else None
