"""Descriptions of traced programs: their matmuls, and the tensors they save."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from keras_policy_ext._types import Tensor


class Product(NamedTuple):
    """The size of a matmul or convolution in a traced program.

    Attributes:
        multiplications: The number of multiplications, each with its addition.
        sizes: The number of elements of each operand.
    """

    multiplications: int
    sizes: tuple[int, int]

    def times(self, repeats: int) -> Product:
        """Return this matmul's size when it runs `repeats` times."""
        return self._replace(multiplications=repeats * self.multiplications)


class Traced(NamedTuple):
    """The outputs and the matmuls of a traced function.

    Attributes:
        outputs: The outputs, with a `keras.KerasTensor` for each tensor.
        products: The matmuls, in the order of the program.
        is_complete: Whether the number of runs of each is known.
        chooses: Whether the function looks for the largest or smallest entries
            of a tensor, by a top-k, an argmax or a sort.
    """

    outputs: Any
    products: list[Product]
    is_complete: bool = True
    chooses: bool = False


def einsum(equation: str, *shapes: Sequence[int]) -> Product:
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
    return Product(math.prod(sizes.values()), (first, second))


def matmul(first: Sequence[int], second: Sequence[int]) -> Product:
    """Return the size of `ops.matmul` of tensors with these shapes."""
    left = "..." + "rk"[-len(first) :]
    right = "...kc" if len(second) > 1 else "...k"
    return einsum(f"{left},{right}", first, second)


def convolution(
    positions: int, inputs: Sequence[int], kernel: Sequence[int]
) -> Product:
    """Return the size of a convolution of tensors with these shapes.

    Args:
        positions: How often each kernel element is used: the number of output
            positions of all samples.
        inputs: The shape of the inputs.
        kernel: The shape of the kernel.
    """
    entries = math.prod(kernel)
    return Product(positions * entries, (math.prod(inputs), entries))


Inside = Callable[[int], AbstractContextManager[Any]]

_SCOPE = "kpe_layer_"


class Kept(NamedTuple):
    """A tensor of the forward pass that the backward pass reads.

    Attributes:
        layer: The number of the layer that saves it; None if unknown.
        bytes: The size in bytes.
        of_weights: Whether it depends on weights only, not on the batch.
    """

    layer: int | None
    bytes: int
    of_weights: bool


class Measured(NamedTuple):
    """The tensors that a step saves, and how they were found.

    Attributes:
        kept: Those that the backward pass reads.
        by: How they were found.
        forward: The most bytes that tensors of the forward pass take at one
            time, saved or not; None if unknown.
    """

    kept: list[Kept]
    by: str
    forward: int | None = None


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """The forward pass of a model, as a function to differentiate and measure.

    Attributes:
        call: `call(values, batch, inside)`, with a value for each variable. It
            calls each layer in `inside(number)` and returns a list of
            floating-point tensors.
        variables: The variables that the forward pass reads and may assign.
        trained: For each variable, whether its gradient is taken.
        weights: For each variable, whether it is a weight.
        batch: Nested `keras.KerasTensor` without unknown sizes.
        for_xla: Whether XLA compiles it, if the framework has a choice.
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


class Update(NamedTuple):
    """The update of weights by an optimizer, as a function.

    Attributes:
        call: `call(slots, gradients, values)`; returns new values and slots.
        weights: The variables that it updates.
        slots: The variables of the optimizer.
    """

    call: Callable[..., tuple[list[Tensor], list[Tensor]]]
    weights: Sequence[Any]
    slots: Sequence[Any]


def scope_name(number: int) -> str:
    """Return the name scope of a layer's operations, for `layer_of`."""
    return f"{_SCOPE}{number}"


def layer_of(name: str) -> int | None:
    """Return the number of the innermost layer in a name scope, or None."""
    found = re.findall(rf"{_SCOPE}(\d+)", name)
    return int(found[-1]) if found else None


class Origin:
    """The memory of a tensor: the size, and what it is computed from.

    Attributes:
        bytes: The size in bytes.
        sources: What it is computed from: `"weights"`, `"batch"`, `"others"`.
        is_given: Whether it exists before the step.
    """

    def __init__(
        self, bytes: int, sources: Iterable[str], is_given: bool = False
    ):
        self.bytes = bytes
        self.sources = frozenset(sources)
        self.is_given = is_given


def kept_of(origin: Origin, layer: int | None) -> Kept | None:
    """Return a saved tensor as `Kept`; None if it exists without the step.

    Weights, the batch and constants exist anyway.
    """
    if origin.is_given or not origin.sources:
        return None
    of_weights = "weights" in origin.sources and "batch" not in origin.sources
    return Kept(layer, origin.bytes, of_weights)


def source_of_variable(is_weight: bool) -> str:
    """Return `"weights"` or `"others"`, a name for `Origin.sources`."""
    return "weights" if is_weight else "others"
