"""The products of a function, as its program has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Product(NamedTuple):
    """A matrix product or a convolution in a program.

    Attributes:
        multiplications: How many, each with its addition.
        sizes: The number of entries of each operand.
    """

    multiplications: int
    sizes: tuple[int, int]

    def times(self, repeats: int) -> Product:
        """The same product, computed so many times."""
        return self._replace(multiplications=repeats * self.multiplications)


class Traced(NamedTuple):
    """The outputs and the matmuls of a traced function.

    Attributes:
        outputs: Its outputs, with a `keras.KerasTensor` for each tensor.
        products: In the order of the program.
        is_complete: Whether it is known how often each of them is computed.
    """

    outputs: Any
    products: list[Product]
    is_complete: bool = True


def einsum(equation: str, *shapes: Sequence[int]) -> Product:
    """The product of an einsum equation of two operands."""
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
    return Product(math.prod(sizes.values()), (first, second))


def matmul(first: Sequence[int], second: Sequence[int]) -> Product:
    """The product of two tensors, by the rules of `ops.matmul`."""
    left = "..." + "rk"[-len(first) :]
    right = "...kc" if len(second) > 1 else "...k"
    return einsum(f"{left},{right}", first, second)


def convolution(
    positions: int, inputs: Sequence[int], kernel: Sequence[int]
) -> Product:
    """The product of a convolution.

    Args:
        positions: How often each entry of the kernel is multiplied with
            something: positions of the outputs, those of all samples.
        inputs: Their shape.
        kernel: Its shape.
    """
    entries = math.prod(kernel)
    return Product(positions * entries, (math.prod(inputs), entries))
