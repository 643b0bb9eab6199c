"""A state that counts steps, for recipes that round at random."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

from keras import ops

from keras_policy_ext._keras import calls
from keras_policy_ext._types import Tensor
from keras_policy_ext.ext.delayed import frameworks
from keras_policy_ext.ext.delayed.entries import MOST_STEPS
from keras_policy_ext.ext.delayed.observations import (
    FIRST,
    SLOTS,
    VALID_MARK,
    StateLayout,
)
from keras_policy_ext.ext.stochastic.rounding import (
    key_of_matmul,
    key_of_use,
)
from keras_policy_ext.numerics.scale_sources import (
    Amax,
    CurrentSource,
    ReadingAndRest,
    Slot,
    register_finder,
)
from keras_policy_ext.recipes import MATMULS, Recipe
from keras_policy_ext.recipes.recipe import quantizations_of

#: Float32 holds all integers below this number.
_EXACT_INTEGERS = 2**24

#: An attribute of `calls.root_of_call()`: the ids of states used so far.
_STATES_USED = "_float8_states_used"


@dataclasses.dataclass(frozen=True)
class StepCount:
    """The count of steps and the kernel's number, from a counting state.

    Attributes:
        number: Float32 scalar, the number of steps so far.
        kernel: Float32 scalar, the number of the kernel.
    """

    number: Tensor
    kernel: Tensor

    def known_scale(self, operand: str) -> None:
        """Return None: the amax of the operand gives the scale."""

    def leaves(self) -> list[Tensor]:
        """Return the fields that are tensors, in a fixed order."""
        return [self.number, self.kernel]


class Counting(StateLayout):
    """A state of one row that counts steps instead of recording amaxes.

    An observation only says that there was a use. The count in it is ignored,
    since its sum over many uses, as in a scan, is not exact in float32, and
    the count would stop. A scaled observation counts too. 0 is a valid count.

    A layer puts the number of its kernel into the unused scale column when it
    passes the state to a step. The stored state has 0 there.
    """

    unseen: ClassVar[float] = VALID_MARK

    def _is_observation(self, uses: Tensor, entries: Tensor) -> Tensor:
        return ops.greater(uses, 0.0)

    def _newest(self, uses: Tensor, entries: Tensor, before: Tensor) -> Tensor:
        return following(before)


def numbered(matrix: Tensor, state: Any) -> Tensor:
    """Return a copy of a counting state that has the number of its kernel.

    Kernels of a call have numbers, to round differently.
    """
    kernel, width = number_in_call(state), matrix.shape[1]
    row = [kernel if i == FIRST - 1 else 0 for i in range(width)]
    return ops.add(matrix, ops.convert_to_tensor([row], "float32"))


def number_in_call(state: Any) -> int:
    """Return how many other kernels were used before in this call.

    Outside of a call, return a hash of the kernel's path.
    """
    root = calls.root_of_call()
    if root is None:
        return zlib.crc32(state.kernel.path.encode()) % _EXACT_INTEGERS
    # A tuple: torch.compile does not follow a dict that changes here.
    used: tuple[int, ...] = getattr(root, _STATES_USED, ())
    if id(state) not in used:
        used = (*used, id(state))
        setattr(root, _STATES_USED, used)
    return used.index(id(state))


class CountingSource(CurrentSource):
    """A source that uses a tensor's own amax, and a state that counts steps.

    The count seeds the rounding; each use reports that of the next step.
    """

    is_straight = False
    numbered = staticmethod(numbered)

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.layout = Counting(length=1, constant=(True,))
        self.state_shape = (1, self.layout.width)
        self.seed = int(getattr(recipe, "seed", 0))

    def simplified(self, reading: Any, *state: Tensor) -> Any:
        """Return the reading: all of it counts."""
        return reading

    def read(self, state: Tensor) -> StepCount:
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

    def gradient(
        self,
        residuals: Any,
        reading: Any,
        outputs_grad_amax: Tensor | None,
        state: Tensor,
        slot: Slot,
        inference: bool,
    ) -> Tensor:
        """Return the number of the next step; zeros outside of training."""
        if inference:
            return ops.zeros_like(state)
        return self.observation([following(reading.number)], slot)

    def caught_up(self, amax: Tensor, state: Tensor) -> Tensor:
        """Return the state: it has no scale."""
        return state

    def another_slot(self, slot: Slot) -> Slot:
        """Return the slot: a state that counts steps has none."""
        return slot % SLOTS

    def before_gradients(self, state: Tensor, in_graph: bool = False) -> None:
        """Note the replicas that are to exchange the counts."""
        frameworks.current.know_replicas(state, in_graph)

    def observation(self, numbers: list[Tensor], slot: Slot) -> Tensor:
        """Pack the number of the next step into the gradient of a state."""
        return self.layout.observation(ops.stack(numbers), slot)

    def settle(self, value: Tensor, previous: Tensor) -> Tensor:
        """Return the new state after `value` is assigned to it."""
        no_scale = ops.zeros((1,), "float32")
        return self.layout.settle(value, previous, no_scale)


def counts_steps(recipe: Recipe) -> bool:
    """Return True if a recipe rounds at random, or after some steps."""
    quantizations = quantizations_of(recipe)
    at_random = any(q and q.rounding == "stochastic" for q in quantizations)
    return at_random or (recipe.grid is not None and recipe.grid.delay > 0)


def find(recipe: Recipe, matrices: int) -> CountingSource | None:
    """Return the source of a recipe that counts steps, or None."""
    return CountingSource(recipe) if counts_steps(recipe) else None


def following(steps: Tensor) -> Tensor:
    """Return the step number after `steps`; 0 after the largest."""
    return ops.where(steps + 1.0 < MOST_STEPS, steps + 1.0, 0.0)


register_finder(find)
