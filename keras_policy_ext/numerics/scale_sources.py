"""Sources of scales: a tensor's own amax, or a state that a recipe keeps.

A recipe that remembers something of earlier steps has a source of an
extension, which reads it from the state of a kernel and writes it as the
gradient of that state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from keras_policy_ext import _extensions
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import scaling
from keras_policy_ext.recipes import Quantization, Recipe, check

Slot = int | Tensor
"""The number of a use of a kernel in a step: an int, or an int32 scalar."""


class Reading(Protocol):
    """What was read from a state before a step."""

    def leaves(self) -> list[Tensor]:
        """Return the fields that are tensors, in a fixed order."""

    def known_scale(self, operand: str) -> KnownScale | None:
        """Return the scale of an operand; None if its amax gives that."""


class KnownScale(NamedTuple):
    """The scale of an operand that is known before its amax.

    Attributes:
        scale: Float32 scalar.
        unseen: Bool scalar: whether there is none yet, so that the own amax
            gives it; None if there always is one.
        seen_lately: Whether a device reported some steps ago that there is
            one. `unseen` is then false unless the state has been restored
            since, which is not worth an extra pass over an operand.
    """

    scale: Tensor
    unseen: Tensor | None
    seen_lately: bool = False


ReadingAndRest = tuple[Reading | None, Sequence[Tensor]]


class Amax:
    """The amax of an operand, computed when it is called.

    Args:
        x: The operand, any shape.
        wanted: Whether it is always needed; then it is computed once.
        of: Function that computes it.
        in_branch: Whether to compute it in a branch, so that a compiler does
            not make a known scale wait for it.

    Attributes:
        value: Float32 scalar; None if it is not always needed.
    """

    def __init__(
        self,
        x: Tensor,
        wanted: bool,
        of: Callable[[Tensor], Tensor] = scaling.amax,
        in_branch: bool = False,
    ):
        self._x, self._of, self.in_branch = x, of, in_branch
        self.value: Tensor | None = of(x) if wanted else None

    def __call__(self) -> Tensor:
        """Return the operand's amax, a float32 scalar."""
        return self.anew() if self.value is None else self.value

    def anew(self) -> Tensor:
        """Compute the amax again, for use inside a compiled branch."""
        return self._of(self._x)


class ScaleRule(NamedTuple):
    """The formula of a scale from an amax, as data for fused kernels.

    Attributes:
        by_multiplier: Whether by `scaling.scale_of_multiplier`, otherwise by
            `scaling.scale_for_limit`.
        margin: Powers of two of headroom.
    """

    by_multiplier: bool
    margin: int = 0


class ScaleSource(Protocol):
    """The object that computes the scales of a recipe.

    Attributes:
        state_shape: The shape of a kernel's state; None if there is no state.
        rule: How scales are computed from amaxes; None if not from them.
        observes_amaxes: Whether the state records the amaxes of operands.
        is_straight: Whether lists of kernels run it; see `Engine.straight`.
    """

    recipe: Any
    state_shape: tuple[int, int] | None
    rule: ScaleRule | None
    observes_amaxes: bool
    is_straight: bool

    def read(self, state: Tensor) -> Reading:
        """Read a state before a step."""

    def simplified(self, reading: Any, *state: Tensor) -> Reading:
        """Return what was read from a state, without flags that cannot matter.

        The host knows of some operands that they were observed.
        """

    def reading_of(self, leaves: Sequence[Tensor]) -> ReadingAndRest:
        """Return what was read from a state, or None, and the other tensors.

        `leaves` are saved tensors, those of the reading first.
        """

    def scale(
        self,
        operand: str,
        quantization: Quantization,
        amax: Amax,
        reading: Any,
    ) -> Tensor | None:
        """Return the float32 scale of an operand, a scalar.

        None to compute it from the tensor's own amax. `reading` is what was
        read from the state; None for a source without state.
        """

    def gradient(
        self,
        residuals: Any,
        reading: Any,
        outputs_grad_amax: Tensor | None,
        state: Tensor,
        slot: Slot,
        inference: bool,
    ) -> Tensor:
        """Return the "gradient" of a state: what this use has observed.

        An optimizer then writes it into the state. `reading` is what was read
        from the state, `slot` the number of this use of the kernel in the step.
        """

    def caught_up(self, amax: Tensor, state: Tensor) -> Tensor:
        """Return the state, with a larger scale if the kernel needs one.

        `amax` is that of the kernel now.
        """

    def another_slot(self, slot: Slot) -> Slot:
        """Return another slot, for gradients that are differentiated.

        A slot is the number of a use of a kernel in a step.
        """

    def before_gradients(self, state: Tensor, in_graph: bool = False) -> None:
        """Called before a forward pass whose gradients are taken.

        `in_graph` says that a compiled graph runs the pass.
        """


class CurrentSource:
    """A source that computes scales from a tensor's own amax."""

    observes_amaxes = False
    is_straight = True

    def __init__(self, recipe: Recipe):
        """Keep the recipe; there is no state."""
        self.recipe = recipe
        self.state_shape: tuple[int, int] | None = None
        self.rule: ScaleRule | None = ScaleRule(by_multiplier=False)

    def read(self, state: Tensor) -> Reading:
        """Raise: there is no state to read."""
        raise ValueError(
            f"Recipe {self.recipe!r} has no state. Received: a state. Allowed: "
            "no state. Pass the inputs and the kernel alone."
        )

    def reading_of(self, leaves: Sequence[Tensor]) -> ReadingAndRest:
        """Return None, as there is no state, and all the saved tensors."""
        return None, leaves

    def scale(
        self, operand: str, quantization: Quantization, amax: Amax, reading: Any
    ) -> Tensor | None:
        """Return None: the scale comes from the tensor's own amax."""
        return None

    def another_slot(self, slot: Slot) -> Slot:
        """Return the same slot: without state no use is told apart."""
        return slot


_SOURCES: dict[type[Recipe], Callable[[Recipe], Any]] = {Recipe: CurrentSource}

_FINDERS: list[Callable[[Recipe, int], Any]] = []
"""Each returns the source of a recipe that remembers, or None."""


@functools.cache
def source_of(recipe: Recipe, matrices: int = 1) -> Any:
    """Return the `ScaleSource` of a recipe, from a cache.

    Args:
        recipe: Any recipe; an unregistered one is scaled by tensors' amaxes.
        matrices: The number of matrices of a kernel that have a state each; 1
            for one state.

    Raises:
        TypeError: If this is not a recipe.
        ValueError: If the recipe is not supported, or remembers something
            that nothing keeps.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"`recipe` is not a recipe. Received: {recipe!r} (of type "
            f"{type(recipe).__name__}). Allowed: a `recipes.Recipe`. Pass "
            "what `recipes.get` returns."
        )
    check(recipe)
    if recipe.remembers:
        for what in ("memory", "counting"):
            _extensions.import_for(what)
        for find in _FINDERS:
            source = find(recipe, matrices)
            if source is not None:
                return source
    base = next(b for b in type(recipe).__mro__ if b in _SOURCES)
    source = _SOURCES[base](recipe)
    if recipe.remembers and source.state_shape is None:
        raise ValueError(
            f"Nothing keeps what {recipe!r} remembers. Received: a recipe "
            "with `remembers=True` that is not installed as a whole. Allowed: "
            "a recipe that remembers nothing, or one derived from "
            "`recipes.DelayedScaling`, with the whole package installed. "
            "Derive from it, or register a class with "
            "`numerics.scale_sources.register`."
        )
    return source


def register(
    recipe_class: type[Recipe], source_class: Callable[[Recipe], Any]
) -> None:
    """Register the class that computes scales for a class of recipes.

    Args:
        recipe_class: A subclass of `Recipe`.
        source_class: Makes a `ScaleSource` from the recipe.
    """
    _SOURCES[recipe_class] = source_class


def register_finder(find: Callable[[Recipe, int], Any]) -> None:
    """Register a function that finds the sources of recipes that remember.

    It takes a recipe and the number of matrices with a state each, and returns
    a `ScaleSource`, or None for a recipe that is not its own.
    """
    _FINDERS.append(find)
