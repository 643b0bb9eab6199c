"""The state of delayed scaling: one matrix whose gradients can be summed.

On JAX only the gradient can carry the amax of an outputs gradient out of a
backward pass, and automatic differentiation sums gradients over the uses of a
layer. So the state is a variable that Keras overwrites with its "gradient",
and the observation in that gradient survives a sum. The matrix has one row per
operand (of `recipes.OPERANDS`):

| column | settled | observation of one use |
|---|---|---|
| `uses` | -1, or -2 if never observed | `UNIT` |
| 8 `slots` | 0 | amax times `UNIT` in the slot of this use, 0 elsewhere |
| `scale` | last scale used, 0 if none | 0 |
| `history` | amaxes, a ring with the newest at index 0 | 0 |

The sum over the uses of a step has `uses` > 0. The newest amax is the largest
slot: exact up to 8 uses. Later uses share slots. A scanned layer has one slot
for all its steps, which holds their sum, an upper bound. A kernel is the same
in all uses, and its amax is their mean. A row of zeros (JAX's gradient of an
unused variable) means "not observed".

The -1 is also a seal, and so are the zeros in the slots. An optimizer that
treats the state as a weight changes both, the slots by as little as an amax in
`UNIT`. A row with other values there is discarded, as if never observed.

The state of a bank of matrices has a row for each matrix of each operand; see
`sources.DelayedSourceOfBank`.

A row that was never observed has a -2. Its average with an observed row is
between -1 and -2 and is discarded too, since its amaxes are too small. A
moving average is accepted once its unobserved part is below `ROUNDING`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.numerics.scale_sources import Slot
from keras_policy_ext.recipes import OPERANDS

UNIT = 2.0**-24
"""The value of one use, and of an amax of 1, in the gradient of a state.

Training loops measure and clip all gradients, also this one: a thousand layers
with amaxes of 1000 add 0.003 to the global norm. Since it is a power of two,
amaxes from 2^-102 on are exact. Less may become 0.
"""

SLOTS = 8
"""The number of uses of a layer in one step that have separate slots."""

FIRST = 2 + SLOTS
"""The first column of the history."""

VALID_MARK = -1.0
"""The first column of a row that was changed by assignments only."""

UNSEEN = -2.0
"""The first column of a row whose operand was never observed."""

ROUNDING = 2.0**-20
"""The largest distance of an average of sealed rows from the seal.

Loops that average weights round at most four times, each by half a unit in the
last place of a number up to 1. Weight decay changes the seal by more in a step.
"""


def newest_first(ring: np.ndarray) -> np.ndarray:
    """Sort an amax history from newest to oldest, from its ring order."""
    return np.concatenate([ring[:1], ring[:0:-1]])


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The columns of a delayed-scaling state, and its arithmetic.

    Attributes:
        length: The number of amaxes in a history.
        constant: For each row, whether all uses of a step observe one value.
        unseen: The first column of a row that was never observed.
    """

    length: int
    constant: tuple[bool, ...] = tuple(o == "kernel" for o in OPERANDS)
    unseen: ClassVar[float] = UNSEEN

    @property
    def width(self) -> int:
        """The number of columns of a state."""
        return FIRST + self.length

    def never_observed(self) -> np.ndarray:
        """Return an initial state, with no observation, (rows, width)."""
        state = np.zeros((len(self.constant), self.width), "float32")
        state[:, 0] = self.unseen
        return state

    def history(self, state: Tensor) -> Tensor:
        """Return the amax histories, rings with the newest at index 0."""
        return state[:, FIRST:]

    def scale(self, state: Tensor) -> Tensor:
        """Return the scale that each row used last, (rows,); 0 for none."""
        return state[:, FIRST - 1]

    def observation(self, amaxes: Tensor, slot: Slot) -> Tensor:
        """Return the amaxes of one use of a layer as a gradient of the state.

        The amaxes are float32 (rows,), the result (rows, width). A slot is
        taken modulo 8; as a tensor it is an int32 scalar below 8.
        """
        # Without the column `uses`, so that a slot is its own index.
        columns = np.arange(FIRST, dtype="int32")
        if isinstance(slot, int):
            here: Any = columns == slot % SLOTS
        else:
            here = ops.equal(columns, slot)
        units = ops.expand_dims(amaxes * UNIT, 1)
        entries = ops.where(here, units, 0.0)
        rows, columns_left = entries.shape[0], self.width - 1 - FIRST
        uses = ops.ones((rows, 1), "float32") * UNIT
        zeros = ops.zeros((rows, columns_left), "float32")
        return ops.concatenate([uses, entries, zeros], axis=1)

    def largest(self, state: Tensor) -> Tensor:
        """Return each row's largest amax; infinity for one not `is_intact`."""
        columns = self._columns()
        # The mark and slots of a settled row. One reduction, of which compilers
        # make one kernel, finds others and the largest amax.
        seal = ops.where(columns == 0, VALID_MARK, 0.0)
        is_seal = columns < FIRST - 1
        moved = ops.logical_and(is_seal, ops.not_equal(state, seal))
        amaxes = ops.where(columns < FIRST, 0.0, state)
        return ops.max(ops.where(moved, np.inf, amaxes), axis=1)

    def is_intact(self, state: Tensor) -> Tensor:
        """Return True for each observed row that no other code changed."""
        return ops.less(self.largest(state), np.inf)  # Infinite in others.

    def settle(
        self, value: Tensor, previous: Tensor, used_scales: Tensor
    ) -> Tensor:
        """Return the new state after `value` is assigned to it.

        It is computed column by column, so that a compiler makes one kernel of
        it. `used_scales`, (rows,), are those of the step that ends. An amax
        that is not finite is not entered.
        """
        mark, entries = value[:, :1], self._entries(value)
        uses, columns = mark / UNIT, self._columns()
        # A settled row is assigned, and sealed again if only rounding moved it.
        is_rounded = ops.less_equal(ops.abs(mark - VALID_MARK), ROUNDING)
        seal = ops.where(is_rounded, VALID_MARK, mark)
        given = ops.where(columns == 0, seal, value[:, : self.width])
        # Zeros, which JAX gives an unused variable, change nothing.
        unobserved = ops.where(ops.less(uses, 0.0), given, previous)
        # A scaled observation makes its row one that was never observed: an
        # old history would clip a growing tensor.
        unseen = ops.where(columns == 0, self.unseen, 0.0)
        unobserved = ops.where(ops.greater(uses, 0.0), unseen, unobserved)
        # Any other observation is entered.
        sealed = ops.where(columns == 0, VALID_MARK, 0.0)
        scale = ops.expand_dims(used_scales, 1)
        sealed = ops.where(columns == FIRST - 1, scale, sealed)
        history = self._with_newest(uses, entries, previous)
        observed = ops.where(columns < FIRST, sealed, history)
        return ops.where(
            self._is_observation(uses, entries), observed, unobserved
        )

    def _columns(self) -> Tensor:
        """Return the index of each column, (1, width)."""
        return ops.expand_dims(ops.arange(self.width, dtype="int32"), 0)

    def _entries(self, value: Tensor) -> Tensor:
        """Return slots, scale and newest amax of replicas, (rows, n, 10)."""
        # An observation has zeros for the last two, and a state in use has not:
        # so `_is_observation` is False for the sum of both.
        # XLA on a CPU reduces more columns in four steps, four times a layer.
        if value.shape[1] == self.width:
            return ops.expand_dims(value[:, 1 : FIRST + 1], 1)
        # `uses`, then the other columns of each replica.
        shape = (len(self.constant), -1, self.width - 1)
        return ops.reshape(value[:, 1:], shape)[:, :, :FIRST]

    def _with_newest(
        self, uses: Tensor, entries: Tensor, previous: Tensor
    ) -> Tensor:
        """Return rows with the newest amax in the history; only that counts."""
        intact = ops.expand_dims(self.is_intact(previous), 1)
        before = ops.where(intact, previous, 0.0)
        newest_before = before[:, FIRST : FIRST + 1]
        columns, last_column = self._columns(), self.width - 1
        # As in Keras and Flax, the ring turns left and index 0 is overwritten.
        # So index 1 is the oldest, and the last index the second newest.
        turned = ops.pad(before[:, 1:], ((0, 0), (0, 1)))
        turned = ops.where(columns == last_column, newest_before, turned)
        newest = self._newest(uses, entries, newest_before)
        rolled = ops.where(columns == FIRST, newest, turned)
        # One axis at a time: PyTorch raises an error for two (keras 3.12).
        finite = ops.all(ops.all(ops.isfinite(entries), axis=2), axis=1)
        return ops.where(ops.expand_dims(finite, 1), rolled, before)

    def _is_observation(self, uses: Tensor, entries: Tensor) -> Tensor:
        """Return True for each row that is an unscaled sum of observations."""
        # A sum that was scaled, as by clipping a norm or averaging batches, has
        # a fractional number of uses, or more amaxes than uses.
        is_slot = np.arange(FIRST) < SLOTS
        # `entries`, (rows, replicas, 10), are 8 slots, the scale and the newest
        # amax. In an observation the last two are zeros.
        needed = np.where(is_slot, 1.0, np.inf).astype("float32")
        uses_needed = ops.where(ops.not_equal(entries, 0.0), needed, 0.0)
        uses_needed = ops.expand_dims(ops.sum(uses_needed, axis=(1, 2)), 1)
        whole = ops.equal(uses, ops.floor(uses))
        counted = ops.logical_and(whole, ops.greater_equal(uses, uses_needed))
        return ops.logical_and(ops.greater(uses, 0.0), counted)

    def _newest(self, uses: Tensor, entries: Tensor, before: Tensor) -> Tensor:
        """Return each row's newly observed amax, (rows, 1)."""
        # A kernel has one amax in all uses, the mean. `Counting` alone needs
        # `before`, the newest number in the history so far.
        total = ops.expand_dims(ops.sum(entries, axis=(1, 2)), 1)
        mean = total / ops.maximum(uses, 1.0)
        largest = ops.expand_dims(ops.max(entries, axis=(1, 2)), 1)
        constant = np.array(self.constant)[:, np.newaxis]
        return ops.where(constant, mean, largest) / UNIT


def of_kernel_alone(observation: Tensor, flag: Tensor) -> Tensor:
    """Return an observation that is zero in all rows but the kernel's.

    It is (rows, width), with as many rows for each of `OPERANDS`. The flag, a
    bool scalar or one for each matrix of a bank, says whether its rows stay.
    """
    is_kernel = np.array(OPERANDS)[:, np.newaxis] == "kernel"
    if len(flag.shape):
        is_kernel = is_kernel.repeat(flag.shape[0], axis=0)
        flag = ops.expand_dims(ops.tile(flag, len(OPERANDS)), 1)
    return ops.where(ops.logical_and(is_kernel, flag), observation, 0.0)
