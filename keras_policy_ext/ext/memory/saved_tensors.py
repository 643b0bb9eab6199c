"""The tensors that a training step saves, as each framework finds them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_policy_ext._types import Tensor

Inside = Callable[[int], AbstractContextManager[Any]]


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
    """Return a saved tensor as `Kept`; None if it exists without the step."""
    if origin.is_given or not origin.sources:  # weights, batch or constants
        return None
    of_weights = "weights" in origin.sources and "batch" not in origin.sources
    return Kept(layer, origin.bytes, of_weights)


def source_of_variable(is_weight: bool) -> str:
    """Return `"weights"` or `"others"`, a name for `Origin.sources`."""
    return "weights" if is_weight else "others"


class Memory:
    """Measurements of the memory that a training step takes.

    Attributes:
        name: The name of the framework.
    """

    name = ""

    def kept(self, step: MeasuredStep) -> Measured:
        """List the tensors that a step saves for its backward pass.

        The step is not run if the framework can measure it without.
        """
        raise NotImplementedError

    def most_held(
        self, function: Callable[[], Any], given: Sequence[Tensor]
    ) -> int | None:
        """Return the most bytes that the tensors made in a call take at once.

        None for frameworks that compile steps: an eager call does not show
        what a compiled one holds.

        Args:
            function: Computes without gradients.
            given: The tensors that there are before, which it may change.
        """
        return None

    def planned_bytes(self, step: MeasuredStep) -> int:
        """Return the bytes that the compiler plans for a whole training step.

        Raises:
            ValueError: If no compiler plans the memory of a whole step.
        """
        raise ValueError(
            f"On {self.name} no compiler plans the memory of a whole step. "
            "Received: compile=True. Allowed: False, or another backend: set "
            "KERAS_BACKEND=jax."
        )

    def planned_step(
        self, step: MeasuredStep, update: Update | None
    ) -> int | None:
        """Return the bytes planned for a step with its update, or None."""
        return None


def of_backend() -> Memory:
    """Return the measurements of the framework that Keras runs on."""
    name = f"{__package__}.{keras.backend.backend()}.saved_tensors"
    return importlib.import_module(name).MEMORY
