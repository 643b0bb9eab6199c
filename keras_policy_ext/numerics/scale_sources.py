"""Sources of scales: a tensor's own amax, a history of amaxes, or constants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import keras
import numpy as np
from keras import ops

from keras_policy_ext import formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.observations import (
    Counting,
    Slot,
    StateLayout,
    following,
    of_kernel_alone,
)
from keras_policy_ext.numerics.stochastic import key_of_matmul, key_of_use
from keras_policy_ext.recipes import (
    MATMULS,
    OPERANDS,
    CurrentScaling,
    DelayedScaling,
    Quantization,
    Recipe,
    check,
    scales_whole_tensors,
)


@dataclasses.dataclass(frozen=True)
class HistoryScales:
    """The three operands' scales for a step, read from a state.

    Attributes:
        scales: Float32, one per row of the state; 0 for one that was never
            observed if the recipe has no fixed initial scale.
        unseen: Bool, whether each row was never observed; None if the recipe
            has a fixed initial scale.
        seen_lately: Whether a device reported some steps ago that all operands
            were observed. `unseen` is then false unless the state has been
            restored since, which is not worth an extra pass over an operand.
    """

    scales: Tensor
    unseen: Tensor | None
    seen_lately: bool = False

    def leaves(self) -> list[Tensor]:
        """Return the fields that are tensors, in a fixed order."""
        if self.unseen is None:
            return [self.scales]
        return [self.scales, self.unseen]


@dataclasses.dataclass(frozen=True)
class StepCount:
    """The count of steps and the kernel's number, from a counting state.

    Attributes:
        number: Float32 scalar, the number of steps so far.
        kernel: Float32 scalar, the number of the kernel.
    """

    number: Tensor
    kernel: Tensor

    unseen: ClassVar[None] = None  # See `HistoryScales`.

    def leaves(self) -> list[Tensor]:
        """Return the fields that are tensors, in a fixed order."""
        return [self.number, self.kernel]


StateReading = HistoryScales | StepCount
"""The reading of a state before the step: scales, or a count of steps."""

ReadingAndRest = tuple[StateReading | None, Sequence[Tensor]]


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
    """

    recipe: Any
    state_shape: tuple[int, int] | None
    rule: ScaleRule | None
    observes_amaxes: bool

    def history_scales(self, state: Tensor) -> StateReading:
        """Read the scales, or the count of steps, from a state."""

    def reading_of(self, leaves: Sequence[Tensor]) -> ReadingAndRest:
        """Return the reading in saved tensors, perhaps None, and the rest."""

    def scale(
        self,
        operand: str,
        quantization: Quantization,
        amax: Amax,
        reading: StateReading | None,
    ) -> Tensor | None:
        """Return the float32 scale of an operand, a scalar.

        None to compute it from the tensor's own amax. The reading is None for a
        source without state.
        """

    def observed(self, reading: Any, amaxes: list[Tensor]) -> list[Tensor]:
        """Return what one use of a layer reports to its state."""


class StateSource(ScaleSource, Protocol):
    """The object that computes a recipe's scales by a state per kernel.

    Attributes:
        layout: The columns of a row of the state.
    """

    state_shape: tuple[int, int]
    layout: StateLayout

    def observation(self, amaxes: list[Tensor], slot: Slot) -> Tensor:
        """Return what `observed` returns as a gradient of the state."""

    def outgrown(self, amax: Tensor, reading: HistoryScales) -> Tensor:
        """Return True if a finite amax of a kernel outgrew its scale."""

    def caught_up(
        self, amax: Tensor, state: Tensor, beyond: float = 1.0
    ) -> Tensor:
        """Return the state, with a larger scale if the kernel needs one.

        The kernel may exceed what its scale allows by the factor `beyond`. If
        it is larger, its amax is entered into the state.
        """

    def settle(self, value: Tensor, previous: Tensor) -> Tensor:
        """Return the new state after `value` is assigned to it.

        `value` is an observation, a settled state, or zeros; `previous` is the
        settled state before. All are (rows, width).
        """


class CurrentSource:
    """A source that computes scales from a tensor's own amax."""

    observes_amaxes = False

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.state_shape: tuple[int, int] | None = None
        self.rule: ScaleRule | None = ScaleRule(by_multiplier=False)

    def reading_of(self, leaves: Sequence[Tensor]) -> ReadingAndRest:
        """Return None, as there is no state, and all the saved tensors."""
        return None, leaves

    def observed(self, reading: Any, amaxes: list[Tensor]) -> list[Tensor]:
        """Return an empty list: there is no state to report to."""
        return []

    def history_scales(self, state: Tensor) -> StateReading:
        """Raise: current scaling has no state to read."""
        raise ValueError(
            f"Recipe {self.recipe!r} has no state. Received: a state. Allowed: "
            "no state. Pass the inputs and the kernel alone."
        )

    def scale(
        self, operand: str, quantization: Quantization, amax: Amax, reading: Any
    ) -> Tensor | None:
        """Return None: the scale comes from the tensor's own amax."""
        return None


class DelayedSource:
    """A source that computes scales from the amaxes of earlier steps."""

    observes_amaxes = True

    def __init__(self, recipe: Any):
        self.recipe = recipe
        self.layout = StateLayout(recipe.history_length)
        shape = len(OPERANDS), self.layout.width
        self.state_shape: tuple[int, int] | None = shape
        self.starts_from_current = recipe.initial_scale == "current"
        # The scale before the first observation; 0.0 for that of the own amax.
        self.initial = 0.0 if self.starts_from_current else recipe.initial_scale
        self.rule: ScaleRule | None = ScaleRule(
            by_multiplier=True, margin=recipe.margin
        )
        # The largest value of each operand's format.
        self.limits = [formats.get(recipe.format_of(x)).max for x in OPERANDS]
        self.limits_with_margin = [
            scaling.with_margin(limit, recipe.margin) for limit in self.limits
        ]

    def scale(
        self, operand: str, quantization: Quantization, amax: Amax, reading: Any
    ) -> Tensor | None:
        """Return an operand's scale from its history or, at first, its amax."""
        if reading is None:
            return None
        index = OPERANDS.index(operand)
        scale = reading.scales[index]
        if reading.unseen is None:
            return scale
        unseen = reading.unseen[index]
        limit = self.limits[index]
        # The amax counts only for what was never observed. Without a branch
        # XLA waits for it in every step, which for a kernel is a pass over it
        # that nothing else needs. With a branch XLA has to store the operand
        # (JAX 0.10), which most others pay more for. So `Amax.in_branch` says
        # who gets a branch. From CUDA 12.3 XLA records it in a CUDA graph.
        may_wait = not amax.in_branch or keras.backend.backend() != "jax"
        if amax.value is not None and may_wait:
            # An amax of 0 stands for none: the result is the known scale.
            amax_of_now = ops.where(unseen, amax.value, 0.0)
            known_scale = ops.where(unseen, 1.0, scale)
            return self._scale(amax_of_now, limit, known_scale)
        return ops.cond(
            unseen, lambda: self._scale(amax.anew(), limit, 1.0), lambda: scale
        )

    def reading_of(self, leaves: Sequence[Tensor]) -> ReadingAndRest:
        """Take `HistoryScales` from saved tensors; return the rest too."""
        # They are the scales, perhaps `unseen`, and then two amaxes or none.
        if len(leaves) % 2:
            return HistoryScales(leaves[0], unseen=None), leaves[1:]
        return HistoryScales(leaves[0], leaves[1]), leaves[2:]

    def observed(self, reading: Any, amaxes: list[Tensor]) -> list[Tensor]:
        """Return the amaxes: a delayed-scaling state records them."""
        return amaxes

    def observation(self, amaxes: list[Tensor], slot: Slot) -> Tensor:
        """Return the amaxes of one use of a layer as a state's gradient."""
        return self.layout.observation(ops.stack(amaxes), slot)

    def outgrown(self, amax: Tensor, reading: HistoryScales) -> Tensor:
        """Return True if a kernel's amax is too large for the stored scale."""
        # A kernel that was never observed is scaled by its own amax already,
        # unless the recipe starts from a fixed scale.
        index = OPERANDS.index("kernel")
        known = reading.scales[index]
        needed = self._scale(amax, self.limits[index], previous=0.0)
        return ops.logical_and(known > 0.0, needed > known)

    def caught_up(
        self, amax: Tensor, state: Tensor, beyond: float = 1.0
    ) -> Tensor:
        """Return the state, with a larger scale if the kernel needs one."""
        # The kernel may exceed what its scale allows by the factor `beyond`.
        outgrown = self.outgrown(amax / beyond, self.history_scales(state))
        # Of the amaxes only that of the kernel counts, in any slot.
        observation = self.observation([amax] * len(OPERANDS), slot=0)
        return self.settle(of_kernel_alone(observation, outgrown), state)

    def settle(self, value: Tensor, previous: Tensor) -> Tensor:
        """Return the new state after `value` is assigned to it."""
        # The scales that the step has used.
        scales = self.history_scales(previous).scales
        return self.layout.settle(value, previous, scales)

    def history_scales(self, state: Tensor) -> HistoryScales:
        """Compute the operands' scales from a state's amax histories."""
        largest = self.layout.largest(state)
        intact = ops.less(largest, np.inf)
        stored = ops.where(intact, self.layout.scale(state), 0.0)
        previous = ops.where(stored > 0.0, stored, self.initial)
        newest_only = self.recipe.amax_compute == "most_recent"
        reduced = self.layout.history(state)[:, 0] if newest_only else largest
        reduced = ops.where(intact, reduced, 0.0)
        limits = ops.convert_to_tensor(self.limits, "float32")
        scales = self._scale(reduced, limits, previous)
        # Not found in the state, which a compiler would read for each use.
        unseen = scales == 0.0 if self.starts_from_current else None
        return HistoryScales(scales, unseen)

    def _scale(
        self, amax: Tensor, limit: float | Tensor, previous: Tensor
    ) -> Tensor:
        margin = self.recipe.margin
        return scaling.scale_of_multiplier(amax, limit, margin, previous)


class DelayedSourceOfBank(DelayedSource):
    """Delayed scaling of a bank, with a history for each of its matrices.

    A state has a row for each matrix of the inputs, then of the kernel, then of
    the outputs gradient. Amaxes are float32 (matrices, 1, 1). An amax of 0 is
    not observed: so a row of an expert that gets no token stays as it is.
    """

    def __init__(self, recipe: Any, matrices: int):
        super().__init__(recipe)
        self.matrices = matrices
        constant = np.repeat(self.layout.constant, matrices).tolist()
        self.layout = StateLayout(recipe.history_length, tuple(constant))
        self.state_shape = len(constant), self.layout.width
        self.limits = np.repeat(self.limits, matrices).tolist()

    def scale(
        self, operand: str, quantization: Quantization, amax: Amax, reading: Any
    ) -> Tensor | None:
        """Return a scale for each matrix of an operand, (matrices, 1, 1)."""
        if reading is None:
            return None
        first = OPERANDS.index(operand) * self.matrices
        rows = slice(first, first + self.matrices)
        scale = ops.reshape(reading.scales[rows], (-1, 1, 1))
        if reading.unseen is None:
            return scale
        unseen = ops.reshape(reading.unseen[rows], (-1, 1, 1))
        amax_of_now = ops.where(unseen, amax(), 0.0)
        known_scale = ops.where(unseen, 1.0, scale)
        return self._scale(amax_of_now, self.limits[first], known_scale)

    def observation(self, amaxes: list[Tensor], slot: Slot) -> Tensor:
        """Return the amaxes of one use of a layer as a state's gradient."""
        flat = ops.concatenate([ops.reshape(x, (-1,)) for x in amaxes])
        observation = self.layout.observation(flat, slot)
        is_used = ops.expand_dims(ops.not_equal(flat, 0.0), 1)
        return ops.where(is_used, observation, 0.0)

    def outgrown(self, amax: Tensor, reading: HistoryScales) -> Tensor:
        """Return, for each matrix of a kernel, whether it outgrew its scale."""
        first = OPERANDS.index("kernel") * self.matrices
        known = reading.scales[first : first + self.matrices]
        amax = ops.reshape(amax, (-1,))
        needed = self._scale(amax, self.limits[first], previous=0.0)
        return ops.logical_and(known > 0.0, needed > known)


class CountingSource(CurrentSource):
    """A source that uses a tensor's own amax, and a state that counts steps.

    The count seeds the rounding; each use reports that of the next step.
    """

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.layout = Counting(length=1, constant=(True,))
        self.state_shape = (1, self.layout.width)
        self.seed = int(getattr(recipe, "seed", 0))

    def history_scales(self, state: Tensor) -> StepCount:
        """Read the step count and the kernel's number from a state."""
        steps = self.layout.history(state)[:, 0]
        steps = ops.where(self.layout.is_intact(state), steps, 0.0)
        return StepCount(steps[0], self.layout.scale(state)[0])

    def reading_of(self, leaves: Sequence[Tensor]) -> ReadingAndRest:
        """Take a `StepCount` from saved tensors; return the rest too."""
        return StepCount(leaves[0], leaves[1]), leaves[2:]

    def key(
        self, reading: StepCount, slot: Slot, amax: Amax, matmul: str
    ) -> Tensor:
        """Return the int32 random key to round an operand of a matmul."""
        step = ops.cast(reading.number, "int32")
        kernel = ops.cast(reading.kernel, "int32")
        key = key_of_use(step, self.seed, slot, kernel)
        return key_of_matmul(key, amax(), list(MATMULS).index(matmul))

    def observed(self, reading: Any, amaxes: list[Tensor]) -> list[Tensor]:
        """Return the number of the next step, for the state to record."""
        return [following(reading.number)]

    def observation(self, numbers: list[Tensor], slot: Slot) -> Tensor:
        """Pack the number of the next step into the gradient of a state."""
        return self.layout.observation(ops.stack(numbers), slot)

    def settle(self, value: Tensor, previous: Tensor) -> Tensor:
        """Return the new state after `value` is assigned to it."""
        no_scale = ops.zeros((1,), "float32")
        return self.layout.settle(value, previous, no_scale)


_SOURCES: dict[type[Recipe], Callable[[Recipe], Any]] = {
    Recipe: CurrentSource,
    CurrentScaling: CurrentSource,
    DelayedScaling: DelayedSource,
}


@functools.cache
def source_of(recipe: Recipe, matrices: int = 1) -> ScaleSource:
    """Return the object that computes a recipe's scales, from a cache.

    Args:
        recipe: Any recipe; an unregistered one is scaled by tensors' amaxes.
        matrices: The number of matrices of a kernel that have a history each,
            under delayed scaling; 1 for one history.

    Raises:
        TypeError: If this is not a recipe.
        ValueError: If the recipe is not supported, or has a history that no
            registered class stores.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"`recipe` is not a recipe. Received: {recipe!r} (of type "
            f"{type(recipe).__name__}). Allowed: a `recipes.Recipe`. Pass "
            "what `recipes.get` returns."
        )
    check(recipe)
    if recipe.is_stochastic:
        return CountingSource(recipe)
    base = next(b for b in type(recipe).__mro__ if b in _SOURCES)
    source = _SOURCES[base](recipe)
    if matrices > 1 and type(source) is DelayedSource:
        return DelayedSourceOfBank(recipe, matrices)
    if recipe.history_length and source.state_shape is None:
        raise ValueError(
            f"Nothing keeps the history of {recipe!r}. Received: a history "
            f"of {recipe.history_length}. Allowed: 0, or a recipe derived "
            "from `recipes.DelayedScaling`. Derive from it, or register a "
            "class with `numerics.scale_sources.register`."
        )
    return source


def state_source_of(recipe: Recipe, matrices: int = 1) -> StateSource:
    """Return the `StateSource` of a recipe whose kernels have a state."""
    return cast(StateSource, source_of(recipe, matrices))


def has_history_per_matrix(recipe: Recipe) -> bool:
    """Return True if matrices of a bank can have a history each."""
    of_tensors = scales_whole_tensors(recipe)
    return of_tensors and type(source_of(recipe)) is DelayedSource


def register(
    recipe_class: type[Recipe], source_class: Callable[[Recipe], Any]
) -> None:
    """Register the class that computes scales for a class of recipes.

    Args:
        recipe_class: A subclass of `Recipe`.
        source_class: Makes a `ScaleSource` from the recipe; a `StateSource` if
            kernels have a state.
    """
    _SOURCES[recipe_class] = source_class
