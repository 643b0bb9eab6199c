"""The seam for recipes that remember: the states of a layer's kernels.

The core has no state. A recipe that `remembers` something of earlier steps has
a class of an extension that keeps it, a `StateOf`: it makes the variables,
passes them to each contraction, and writes them into files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import keras
import numpy as np

from keras_policy_ext import _extensions
from keras_policy_ext._types import Tensor
from keras_policy_ext.files.saved_layers import SavedState
from keras_policy_ext.recipes import Recipe


class NoWeight:
    """A variable of a layer that is no weight, such as a scale or a state."""

    def check(self, value: Any) -> None:
        """Raise ValueError if an array cannot be the value of this variable."""

    def set_with_weights(self) -> None:
        """Called after all weights of the layer were set, this one too."""

    def memory(self) -> Callable[[], None]:
        """Return a function that puts this back as it is, but for its value.

        It is called once this variable and the weights have their old values.
        """
        return _nothing


def _nothing() -> None:
    """Do nothing."""


class StateOf(Protocol):
    """The states of the kernels of one layer.

    Attributes:
        have_banks: Whether `scales_each_matrix` is True for any kernel.
    """

    have_banks: bool

    @property
    def variables(self) -> list[Any]:
        """The variables of the states, in the order of the kernels."""

    @property
    def owners(self) -> list[str]:
        """The paths of the kernels that have a state."""

    def build(
        self, kernel: keras.Variable, recipe: Recipe, bank_axis: int | None
    ) -> None:
        """Make the state of a kernel.

        `bank_axis` is that of `Float8Mixin.float8_bank_axis`.

        Raises:
            ValueError: If there is already a kernel with this path.
        """

    def of(self, kernel: keras.Variable) -> Any:
        """Return the state variable of a kernel; None if it has none."""

    def operands(
        self,
        kernel: keras.Variable,
        value: Tensor,
        training: bool | None,
        compiling: bool,
    ) -> tuple[tuple[Tensor, ...], int]:
        """Return what a contraction reads of a state, and the slot of this use.

        Args:
            kernel: A kernel of the layer.
            value: Its tensor.
            training: As for the layer; None if it is not known.
            compiling: Whether a compiler traces this call.

        Raises:
            ValueError: If the kernel has no state.
        """

    def matrices_of(self, kernel: keras.Variable) -> int:
        """Return how many matrices of a kernel have a state each."""

    def scales_each_matrix(self, kernel: keras.Variable) -> bool:
        """Return True if each matrix of a bank may have a scale."""

    def check_bank(self, kernel: keras.Variable, contraction: Any) -> None:
        """Raise ValueError if a contraction is not of the kernel's bank."""

    def settle(self, kernels: Sequence[keras.Variable]) -> None:
        """Enter what the kernels are now into their states."""

    def entries(self, merged: bool) -> dict[str, np.ndarray]:
        """Return what a file has of the states.

        `merged` says that the file has kernels with LoRA adapters added.
        """

    def load(self, saved: SavedState) -> Callable[[], None]:
        """Read states from a file; return a function that assigns them.

        Raises:
            ValueError: If the entries are incomplete, of wrong shapes or
                values, or written by a newer version of this package.
        """

    def fits(self, recipe: Recipe) -> bool:
        """Return True if these states are also those of another recipe."""

    def follow(self, recipe: Recipe) -> None:
        """Set another recipe, which passes `fits`."""


class Memory(Protocol):
    """What an extension registers for recipes that remember."""

    def states(self, group: keras.layers.Layer) -> StateOf:
        """Return an empty `StateOf`, whose variables `group` tracks."""

    def check(self, saved: SavedState, recipes: Sequence[Recipe]) -> None:
        """Raise ValueError if a file has no states for kernels of recipes."""


_memories: list[Memory] = []


def register(memory: Memory) -> None:
    """Register what keeps the states of recipes that remember."""
    _memories.append(memory)


def new_states(group: keras.layers.Layer, recipe: Recipe) -> StateOf:
    """Return an empty `StateOf` for kernels under a recipe that remembers."""
    return _memory(recipe).states(group)


def check_saved(saved: SavedState, recipes: Sequence[Recipe]) -> None:
    """Raise ValueError if a file has damaged states of kernels."""
    for recipe in recipes:
        if recipe.remembers:
            _memory(recipe).check(saved, recipes)
            return


def _memory(recipe: Recipe) -> Memory:
    """Return what keeps the states of a recipe; raise if nothing does."""
    _extensions.import_for("memory")
    if not _memories:
        _raise_missing(recipe)
    return _memories[0]


def _raise_missing(recipe: Recipe) -> NoReturn:
    """Raise: what keeps the states of a recipe is not installed."""
    raise ValueError(
        f"The recipe {recipe.name!r} keeps a state of each kernel, and what "
        "keeps it is not installed here. Received: the core alone, without "
        "`keras_policy_ext.ext`. Allowed: a recipe without state, such as "
        "'current'. Install the whole package, or choose another recipe."
    )


def is_state(variable: object) -> bool:
    """Return True if a variable holds scales or a state, and is no weight."""
    return isinstance(variable, NoWeight)
