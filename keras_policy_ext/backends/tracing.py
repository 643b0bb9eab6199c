"""Types of traced programs: their matmuls, and the tensors that they save."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from keras_policy_ext._types import Tensor


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


Inside = Callable[[int], AbstractContextManager[Any]]

_SCOPE = "kpe_layer_"


class Kept(NamedTuple):
    """One tensor that the backward pass reads of the forward pass.

    Attributes:
        layer: The number of the layer that keeps it; None if that is unknown.
        bytes: Its size.
        of_weights: Whether it is made of weights, whatever the batch is.
    """

    layer: int | None
    bytes: int
    of_weights: bool


class Measured(NamedTuple):
    """What is kept, and how that was found out."""

    kept: list[Kept]
    by: str


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A forward pass as a function, of which gradients are taken.

    Attributes:
        call: `call(values, batch, inside)`, of a value for each variable, and
            of the batch. Each layer is called in `inside(number)`. Returns a
            list of floating tensors.
        variables: What the forward pass reads and may assign.
        trained: Of which of them a gradient is taken.
        weights: Which of them are weights.
        batch: Nested `keras.KerasTensor`, with all sizes.
        for_xla: Whether XLA compiles it where a framework leaves a choice.
        held: Tensors of the framework that the model holds, its variables
            among them, where the framework knows them.
    """

    call: Callable[[Sequence[Tensor], Any, Inside], list[Tensor]]
    variables: Sequence[Any]
    trained: Sequence[bool]
    weights: Sequence[bool]
    batch: Any
    for_xla: bool = False
    held: Sequence[Tensor] = ()


def scope_name(number: int) -> str:
    """A name for the operations of a layer, which `layer_of` finds again."""
    return f"{_SCOPE}{number}"


def layer_of(name: str) -> int | None:
    """The number of the innermost layer in the name of an operation."""
    found = re.findall(rf"{_SCOPE}(\d+)", name)
    return int(found[-1]) if found else None


class Origin:
    """A tensor, or one that shows the memory of it.

    Attributes:
        bytes: Its size.
        sources: What it is computed of: `"weights"`, `"batch"`, `"others"`.
        is_given: Whether it is there before the step.
    """

    def __init__(
        self, bytes: int, sources: Iterable[str], is_given: bool = False
    ):
        self.bytes = bytes
        self.sources = frozenset(sources)
        self.is_given = is_given


def kept_of(origin: Origin, layer: int | None) -> Kept | None:
    """What is kept of a tensor; None of one that is there anyway.

    Those are weights, the batch, and what a compiler knows without either.
    """
    if origin.is_given or not origin.sources:
        return None
    of_weights = "weights" in origin.sources and "batch" not in origin.sources
    return Kept(layer, origin.bytes, of_weights)


def source_of_variable(is_weight: bool) -> str:
    """What stands in `Origin.sources` for a variable."""
    return "weights" if is_weight else "others"
