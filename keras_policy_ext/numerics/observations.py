"""The state of delayed scaling as one sum-safe matrix.

Only the gradient can carry the amax of an output gradient out of a backward
pass on JAX, and automatic differentiation sums gradients over the uses of a
layer. So the state is a variable that Keras overwrites with its "gradient",
and what travels survives a sum. A row per operand
(of `recipes.OPERANDS`):

| column | settled | observation of one use |
|---|---|---|
| `uses` | -1, or -2 if never observed | `UNIT` |
| 8 `slots` | 0 | amax times `UNIT` in the slot of this use, 0 elsewhere |
| `scale` | last scale used, 0 if none | 0 |
| `history` | amaxes, a ring with the newest at index 0 | 0 |

The sum over the uses of a step has `uses` > 0, and the newest amax is the
largest slot: exact up to 8 uses. Later uses share slots, and a scanned layer
has one for all its steps, so that there it is a sum, an upper bound. A kernel
is the same in all uses, and its amax their mean. A row of zeros (JAX's
gradient of what was not used) means "not observed".

An observation travels among gradients, and training loops measure and clip
those: `UNIT` is so small that it counts for nothing in a norm and is below
what values are clipped at.

The -1 is also a seal, and so are the zeros in the slots. An optimizer that
takes the state for a weight moves both, the slots by as little as an amax in
`UNIT`; a row with other numbers there is not believed, and its operand counts
as never observed.

A row that was never observed has a -2, so that an average with one that was
is between the two and not believed either: its amaxes are a fraction of what
they are of. A moving average is believed from where the part in it that was
never observed is below `ROUNDING`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from keras import ops

from keras_policy_ext._types import Tensor
from keras_policy_ext.recipes import OPERANDS

UNIT = 2.0**-24
"""What stands for 1 in the gradient of a state: a use, and an amax of 1.

Training loops measure and clip gradients, this one too. It is so small that a
thousand layers with amaxes of 1000 count as 0.003 in the norm of all. A power
of two, so that amaxes from 2^-102 on lose nothing; smaller ones may count as 0.
"""


SLOTS = 8
"""Uses of a layer in one step whose amaxes are told apart."""

MOST_STEPS = 2.0**23
"""Where the count of steps starts anew, so that float32 holds it."""

_FIRST = 2 + SLOTS
"""Where the history starts."""

VALID_MARK = -1.0
"""The first column of a row that nothing but an assignment has changed."""

UNSEEN = -2.0
"""The first column of a row whose operand was never observed."""

ROUNDING = 2.0**-20
"""How far the average of two sealed rows may be from it.

Averages of weights, as loops write them, round four times at most, each by
half a unit in the last place of a number up to 1. An optimizer that decays
weights moves it by more in its first step.
"""


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Where things are in a row of the state.

    Attributes:
        length: Length of the amax history.
        constant: Of each row, whether all uses of a step observe the same.
        unseen: The first column of a row that was never observed.
    """

    length: int
    constant: tuple[bool, ...] = tuple(o == "kernel" for o in OPERANDS)
    unseen: ClassVar[float] = UNSEEN

    @property
    def width(self) -> int:
        """Number of columns."""
        return _FIRST + self.length

    def never_observed(self) -> np.ndarray:
        """The settled state of what was never observed, (rows, width)."""
        state = np.zeros((len(self.constant), self.width), "float32")
        state[:, 0] = self.unseen
        return state

    def history(self, state: Tensor) -> Tensor:
        """Amax histories, (rows, length), newest at index 0."""
        return state[:, _FIRST:]

    def scale(self, state: Tensor) -> Tensor:
        """Scales last used, (rows,); 0 where none was."""
        return state[:, _FIRST - 1]

    def observation(self, amaxes: Tensor, slot: int) -> Tensor:
        """One use.

        Args:
            amaxes: Float32 (rows,).
            slot: Which use of the step this is; taken modulo 8.

        Returns:
            Float32 (rows, width).
        """
        here = np.arange(_FIRST) == slot % SLOTS
        units = ops.expand_dims(amaxes * UNIT, 1)
        entries = ops.where(here, units, 0.0)
        rows, after = entries.shape[0], self.width - 1 - _FIRST
        use = ops.ones((rows, 1), "float32") * UNIT
        zeros = ops.zeros((rows, after), "float32")
        return ops.concatenate([use, entries, zeros], axis=1)

    def largest(self, state: Tensor) -> Tensor:
        """The largest amax of each row, (rows,); infinite if it was moved.

        Both in one reduction, which compilers make a kernel of.
        """
        columns = self._columns()
        seal = ops.where(columns == 0, VALID_MARK, 0.0)
        is_seal = columns < _FIRST - 1
        moved = ops.logical_and(is_seal, ops.not_equal(state, seal))
        amaxes = ops.where(columns < _FIRST, 0.0, state)
        return ops.max(ops.where(moved, np.inf, amaxes), axis=1)

    def is_intact(self, state: Tensor) -> Tensor:
        """Which rows of a settled state nobody has moved, bool (rows,)."""
        return ops.less(self.largest(state), np.inf)

    def settle(self, value: Tensor, previous: Tensor, used: Tensor) -> Tensor:
        """Interpret an assigned value.

        Chosen column by column and not put together from parts: a compiler
        makes one kernel of that, and there is a state for each layer.

        Args:
            value: (rows, width); an observation, a settled state or zeros,
                row by row. More columns are the observations of more
                replicas, without their uses.
            previous: (rows, width), settled.
            used: Float32 (rows,), the scales of the observed step.

        Returns:
            (rows, width), settled. An amax that is not finite is not entered.
            A settled row that is assigned is sealed, unless it was moved or
            was not observed all along. A
            row counts as never observed after an observation that was scaled:
            a history that stands still would cut a tensor that grows.
        """
        first, entries = value[:, :1], self._entries(value)
        uses, columns = first / UNIT, self._columns()
        is_rounded = ops.less_equal(ops.abs(first - VALID_MARK), ROUNDING)
        seal = ops.where(is_rounded, VALID_MARK, first)
        given = ops.where(columns == 0, seal, value[:, : self.width])
        kept = ops.where(ops.less(uses, 0.0), given, previous)

        unseen = ops.where(columns == 0, self.unseen, 0.0)
        kept = ops.where(ops.greater(uses, 0.0), unseen, kept)
        sealed = ops.where(columns == 0, VALID_MARK, 0.0)
        scale = ops.expand_dims(used, 1)
        sealed = ops.where(columns == _FIRST - 1, scale, sealed)
        history = self._entered(uses, entries, previous)
        observed = ops.where(columns < _FIRST, sealed, history)
        return ops.where(self._is_observation(uses, entries), observed, kept)

    def _columns(self) -> Tensor:
        """The number of each column, (1, width)."""
        return ops.expand_dims(ops.arange(self.width, dtype="int32"), 0)

    def _entries(self, value: Tensor) -> Tensor:
        """The slots, the scale and the newest amax, (rows, replicas, 10).

        The last two are 0 in an observation and not in a state that is in
        use, so that the sum of both is no observation. The other columns are
        left out: to reduce them too takes XLA four steps on a CPU, four times
        for each layer.
        """
        if value.shape[1] == self.width:
            return ops.expand_dims(value[:, 1 : _FIRST + 1], 1)
        shape = (len(self.constant), -1, self.width - 1)
        return ops.reshape(value[:, 1:], shape)[:, :, :_FIRST]

    def _entered(
        self, uses: Tensor, entries: Tensor, previous: Tensor
    ) -> Tensor:
        """The newest amax in the history, whose first column is `_FIRST`.

        As Keras and Flax enter it: the ring turns left and index 0 is
        overwritten, so that index 1 is the oldest entry and the last index
        the one before the newest.
        """
        intact = ops.expand_dims(self.is_intact(previous), 1)
        before = ops.where(intact, previous, 0.0)
        first = before[:, _FIRST : _FIRST + 1]
        columns, last = self._columns(), self.width - 1
        turned = ops.pad(before[:, 1:], ((0, 0), (0, 1)))
        turned = ops.where(columns == last, first, turned)
        newest = self._newest(uses, entries, first)
        rolled = ops.where(columns == _FIRST, newest, turned)
        # Axis by axis: for two PyTorch raises an error (keras 3.12).
        finite = ops.all(ops.all(ops.isfinite(entries), axis=2), axis=1)
        return ops.where(ops.expand_dims(finite, 1), rolled, before)

    def _is_observation(self, uses: Tensor, entries: Tensor) -> Tensor:
        """Which rows are sums over uses, and nothing else, bool (rows, 1).

        A sum that was scaled, as to clip a norm or to average over batches,
        has a number of uses that is no integer, or more amaxes than uses.
        """
        slots = np.arange(_FIRST) < SLOTS
        weights = np.where(slots, 1.0, np.inf).astype("float32")
        seen = ops.where(ops.not_equal(entries, 0.0), weights, 0.0)
        seen = ops.expand_dims(ops.sum(seen, axis=(1, 2)), 1)
        whole = ops.equal(uses, ops.floor(uses))
        counted = ops.logical_and(whole, ops.greater_equal(uses, seen))
        return ops.logical_and(ops.greater(uses, 0.0), counted)

    def _newest(self, uses: Tensor, entries: Tensor, first: Tensor) -> Tensor:
        """What is entered, (rows, 1); `first` is the newest entry so far."""
        total = ops.expand_dims(ops.sum(entries, axis=(1, 2)), 1)
        mean = total / ops.maximum(uses, 1.0)
        largest = ops.expand_dims(ops.max(entries, axis=(1, 2)), 1)
        constant = np.array(self.constant)[:, np.newaxis]
        return ops.where(constant, mean, largest) / UNIT


def of_kernel_alone(observation: Tensor, flag: Tensor) -> Tensor:
    """The row of the kernel in an observation, where a flag holds; else zeros.

    Args:
        observation: (rows, width), those of `OPERANDS`.
        flag: Bool scalar.
    """
    is_kernel = np.array(OPERANDS)[:, np.newaxis] == "kernel"
    return ops.where(ops.logical_and(is_kernel, flag), observation, 0.0)


class Counting(StateLayout):
    """A row whose history is one number, that of the step.

    An observation says that there was a use. What it says of the number is
    not read: the sum over many uses, as of a scan, is beyond what float32
    holds exactly, and the count would stop. One that was scaled counts too.
    A count of 0 is a count, and is sealed.

    In the column of the scale, which it has no use for, a layer puts the
    number of its kernel when it hands the state to a step. What is stored
    has 0 there.
    """

    unseen: ClassVar[float] = VALID_MARK

    def _is_observation(self, uses: Tensor, entries: Tensor) -> Tensor:
        return ops.greater(uses, 0.0)

    def _newest(self, uses: Tensor, entries: Tensor, first: Tensor) -> Tensor:
        return following(first)


def numbered_row(width: int, kernel: int) -> list[int]:
    """What is added to the row of a `Counting` state for a step of a kernel."""
    return [kernel if i == _FIRST - 1 else 0 for i in range(width)]


def following(steps: Tensor) -> Tensor:
    """The number of the next step."""
    return ops.where(steps + 1.0 < MOST_STEPS, steps + 1.0, 0.0)
