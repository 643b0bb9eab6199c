"""Types about the memory of a training step, shared by the frameworks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from keras_policy_ext._types import Tensor

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
