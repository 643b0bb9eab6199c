"""Delayed scaling: scales from a history of amaxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, formats
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.observations import (
    SLOTS,
    StateLayout,
    of_kernel_alone,
)
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.scale_sources import (
    Amax,
    KnownScale,
    ReadingAndRest,
    ScaleRule,
    Slot,
    source_of,
)
from keras_policy_ext.recipes import (
    OPERANDS,
    DelayedScaling,
    Quantization,
    Recipe,
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

    def known_scale(self, operand: str) -> KnownScale:
        """Return the scale of an operand of a kernel with one history."""
        row = OPERANDS.index(operand)
        unseen = None if self.unseen is None else self.unseen[row]
        return KnownScale(self.scales[row], unseen, self.seen_lately)

    def leaves(self) -> list[Tensor]:
        """Return the fields that are tensors, in a fixed order."""
        if self.unseen is None:
            return [self.scales]
        return [self.scales, self.unseen]


class DelayedSource:
    """A source that computes scales from the amaxes of earlier steps."""

    observes_amaxes = True
    is_straight = True
    numbered = None  # One kernel's state is as good as another's.

    def __init__(self, recipe: Any):
        self.recipe = recipe
        self.layout = StateLayout(recipe.amax_history_length)
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

    def observation(self, amaxes: list[Tensor], slot: Slot) -> Tensor:
        """Return the amaxes of one use of a layer as a state's gradient."""
        return self.layout.observation(ops.stack(amaxes), slot)

    def read(self, state: Tensor) -> HistoryScales:
        """Read the scales of the coming step."""
        kernels = frameworks.current.kernels_for(self, state)
        if kernels is not None:
            return kernels.history_scales(self, state)
        return self.history_scales(state)

    def simplified(self, reading: Any, *state: Tensor) -> Any:
        """Return a reading without flags that are all False.

        If the host knows that all operands were observed, the flags of
        unobserved operands are dropped. If a device reported so lately,
        `seen_lately` is set.
        """
        if reading.unseen is None:
            return reading
        # None: not known.
        if backends.current.known_any(reading.unseen) is False:
            return HistoryScales(reading.scales, unseen=None)
        seen = bool(state) and frameworks.current.seen_lately(*state)
        if seen:
            return dataclasses.replace(reading, seen_lately=seen)
        return reading

    def gradient(
        self,
        residuals: Any,
        reading: Any,
        outputs_grad_amax: Tensor | None,
        state: Tensor,
        slot: Slot,
        inference: bool,
    ) -> Tensor:
        """Return an observation as the "gradient" of the state, or zeros."""
        if residuals.amaxes is None:  # They were not asked for.
            return ops.zeros_like(state)
        inputs_amax, kernel_amax = residuals.amaxes
        if not inference:
            amaxes = [inputs_amax, kernel_amax, outputs_grad_amax]
            return self._observed(amaxes, state, slot)
        outgrown = self.outgrown(kernel_amax, residuals.reading)
        # None: not known.
        if backends.current.known_any(outgrown) is False:
            return ops.zeros_like(state)
        # Of the amaxes only that of the kernel stays.
        amaxes = [kernel_amax] * len(OPERANDS)
        observation = self._observed(amaxes, state, slot)
        return of_kernel_alone(observation, outgrown)

    def _observed(self, amaxes: list[Any], state: Tensor, slot: Slot) -> Tensor:
        """Return amaxes, one for each row, as the gradient of the state."""
        kernels = frameworks.current.kernels_for(self, state)
        if kernels is not None:
            return kernels.observation(self, amaxes, slot)
        return self.observation(self._of_operands(amaxes), slot)

    def _of_operands(self, amaxes: list[Any]) -> list[Tensor]:
        """Return one amax for each operand."""
        # A cast may have found an amax for each part of an operand.
        return [ops.max(n) if len(n.shape) else n for n in amaxes]

    def another_slot(self, slot: Slot) -> Slot:
        """Return the slot farthest from a slot.

        For gradients that are differentiated, as in a gradient penalty. They
        may be much larger or smaller than gradients of the loss. Up to 4 uses
        of a layer in a step have other slots than theirs.
        """
        return (slot + SLOTS // 2) % SLOTS

    def passes(self, interpreted: bool) -> Any:
        """Return the kernels of the state for `Engine.straight`."""
        return frameworks.current.passes(self, interpreted)

    def before_gradients(self, state: Tensor, in_graph: bool = False) -> None:
        """Note the replicas that are to exchange what they observe."""
        frameworks.current.know_replicas(state, in_graph)

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

    is_straight = False

    def __init__(self, recipe: Any, matrices: int):
        super().__init__(recipe)
        self.matrices = matrices
        constant = np.repeat(self.layout.constant, matrices).tolist()
        self.layout = StateLayout(recipe.amax_history_length, tuple(constant))
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

    def _of_operands(self, amaxes: list[Any]) -> list[Tensor]:
        """Return the amaxes: one for each matrix of each operand."""
        return amaxes

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


def find(recipe: Recipe, matrices: int) -> DelayedSource | None:
    """Return the source of a recipe of delayed scaling; None for another."""
    if not isinstance(recipe, DelayedScaling):
        return None
    if matrices > 1:
        return DelayedSourceOfBank(recipe, matrices)
    return DelayedSource(recipe)


def has_history_per_matrix(recipe: Recipe) -> bool:
    """Return True if matrices of a bank can have a history each."""
    of_tensors = scales_whole_tensors(recipe)
    return of_tensors and type(source_of(recipe)) is DelayedSource


@dataclasses.dataclass(frozen=True)
class Settling:
    """A function that turns a value assigned to a state into a state.

    It is `settle` of the source, by a kernel of the framework where there is
    one. It is data, so that a graph can name it.

    Attributes:
        recipe: The recipe.
        matrices: The number of matrices of the layer's kernel that have a
            history each.
    """

    recipe: Recipe
    matrices: int = 1

    def __call__(self, value: Tensor, previous: Tensor) -> Any:
        """Return the new state after `value` is assigned to `previous`."""
        source = source_of(self.recipe, self.matrices)
        kernels = frameworks.current.kernels_for(source, previous)
        # An observation of several replicas is wider than the state.
        if kernels is None or value.shape != previous.shape:
            return source.settle(value, previous)
        return kernels.settle(source, value, previous)


@dataclasses.dataclass(frozen=True)
class CatchingUp:
    """A function that raises a state's scale to fit a larger kernel.

    Attributes:
        recipe: The recipe.
        matrices: As for `Settling`.
        beyond: As for `DelayedSource.caught_up`.
    """

    recipe: Recipe
    matrices: int = 1
    beyond: float = 1.0

    def __call__(self, amax: Tensor, previous: Tensor) -> Any:
        """Return the state after the amax of the kernel is looked at."""
        source = source_of(self.recipe, self.matrices)
        return source.caught_up(amax, previous, self.beyond)
