"""The protocol of the arithmetic of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.observations import StateLayout
from keras_policy_ext.recipes import Quantization


@dataclasses.dataclass(frozen=True)
class HistoryScales:
    """The scales of the operands, read from the state before the step.

    Attributes:
        scales: Float32 (3,), one scale per operand; 0 for one that was never
            observed, where the recipe has no fixed scale to start from.
        unseen: Bool (3,), whether the operand was never observed; None where
            the recipe starts from a fixed scale.
        seen_lately: Whether all operands had been observed when a device last
            said so, some steps ago. `unseen` is then false, unless the state
            has been put back since: no pass over an operand is worth it.
    """

    scales: Tensor
    unseen: Tensor | None
    seen_lately: bool = False

    def leaves(self) -> list[Tensor]:
        """The tensors, in a fixed order."""
        if self.unseen is None:
            return [self.scales]
        return [self.scales, self.unseen]


@dataclasses.dataclass(frozen=True)
class StepCount:
    """The count of steps and the kernel number, read from a counting state.

    Attributes:
        number: Float32 scalar, how many steps there were.
        kernel: Float32 scalar, the number of the kernel.
    """

    number: Tensor
    kernel: Tensor

    unseen: ClassVar[None] = None

    def leaves(self) -> list[Tensor]:
        """The tensors, in a fixed order."""
        return [self.number, self.kernel]


StateReading = HistoryScales | StepCount
"""The reading of a state before the step: scales, or a count of steps."""


class Amax:
    """The amax of an operand, computed when it is asked for.

    Args:
        x: The operand, any shape.
        wanted: Whether it is needed in any case; then it is computed once.
        of: Computes it.
        apart: Whether a scale that is known should not wait for it, where a
            compiler would have it wait.

    Attributes:
        known: Float32 scalar; None where it is not wanted.
        apart: See above.
    """

    def __init__(
        self,
        x: Tensor,
        wanted: bool,
        of: Any = scaling.amax,
        apart: bool = False,
    ):
        self._x, self._of, self.apart = x, of, apart
        self.known: Tensor | None = of(x) if wanted else None

    def __call__(self) -> Tensor:
        """The amax, float32 scalar."""
        return self.anew() if self.known is None else self.known

    def anew(self) -> Tensor:
        """The same, computed where this is called, as in a branch."""
        return self._of(self._x)


class ScaleRule(NamedTuple):
    """How a scale comes from an amax, for kernels that compute it themselves.

    Attributes:
        inverted: By `scaling.scale_of_multiplier`, otherwise by
            `scaling.scale_for_limit`.
        margin: Powers of two of headroom.
    """

    inverted: bool
    margin: int = 0


class ScaleSource(Protocol):
    """The arithmetic of a recipe.

    Attributes:
        recipe: The recipe.
        state_shape: Of the state of a kernel; None for a source without.
        rule: How scales come from amaxes; None for one of another kind.
        observes_amaxes: Whether the state is told the amaxes of operands.
    """

    recipe: Any
    state_shape: tuple[int, int] | None
    rule: ScaleRule | None
    observes_amaxes: bool

    def history_scales(self, state: Tensor) -> StateReading:
        """Read a state before the step: scales, or a count of steps."""

    def known_of(
        self, leaves: Sequence[Tensor]
    ) -> tuple[StateReading | None, Any]:
        """Rebuild the reading of a state from tensors that start with it.

        Returns:
            That, None for a source without state; and the other tensors.
        """

    def scale(
        self,
        operand: str,
        quantization: Quantization,
        amax: Amax,
        known: StateReading | None,
    ) -> Tensor | None:
        """The scale of an operand.

        Args:
            operand: `"inputs"`, `"kernel"` or `"outputs_grad"`.
            quantization: What becomes of it.
            amax: That of the operand.
            known: What the state says; None for a source without state.

        Returns:
            Float32 scalar; None to find the scales of the tiles from the
            tensor itself.
        """

    def observed(self, known: Any, amaxes: list[Tensor]) -> list[Tensor]:
        """Return what a use reports to the state, one number for each row.

        Args:
            known: What the state said.
            amaxes: Of the operands, in the order of `OPERANDS`.
        """


class StateSource(ScaleSource, Protocol):
    """The arithmetic of a recipe whose kernels have a state.

    Attributes:
        layout: Where things are in a row of the state.
    """

    state_shape: tuple[int, int]
    layout: StateLayout

    def observation(self, amaxes: list[Tensor], slot: int) -> Tensor:
        """The gradient of the state: see `observations`.

        Args:
            amaxes: Float32 scalars, one for each row of the state: what
                `observed` returned.
            slot: Which use of the layer in this step this is.

        Returns:
            Float32 (rows, width).
        """

    def outgrown(self, amax: Tensor, known: Any) -> Tensor:
        """Whether a kernel is larger than the scale that it has allows.

        Args:
            amax: Float32 scalar, that of the kernel.
            known: What the state said.

        Returns:
            Bool scalar; False for an amax that is not finite.
        """

    def caught_up(
        self, amax: Tensor, state: Tensor, beyond: float = 1.0
    ) -> Tensor:
        """A state whose scale is large enough for a kernel.

        Args:
            amax: Float32 scalar, that of the kernel.
            state: (rows, width), settled.
            beyond: How many times as large as its scale allows it may be.

        Returns:
            (rows, width): with the amax entered where the kernel is larger,
            otherwise the same.
        """

    def settle(self, value: Tensor, previous: Tensor) -> Tensor:
        """Return the new state when `value` is assigned to it.

        Args:
            value: (rows, width): an observation, a settled state, or zeros.
            previous: (rows, width): the settled state before.

        Returns:
            (rows, width), settled.
        """
