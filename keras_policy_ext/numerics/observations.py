"""The state of delayed scaling as one sum-safe matrix.

Only the gradient can carry the amax of an output gradient out of a backward
pass on JAX, and automatic differentiation sums gradients over the uses of a
layer. So the state is a variable that Keras overwrites with its "gradient",
and what travels survives a sum. A row per operand
(of `recipes.OPERANDS`):

| column | settled | observation of one use |
|---|---|---|
| `uses` | -1 | 1 |
| 8 `slots` | 0 | amax in the slot of this use, 0 elsewhere |
| `scale` | last scale used, 0 if none | 0 |
| `history` | amaxes, a ring with the newest at index 0 | 0 |

The sum over the uses of a step has `uses` > 0, and the newest amax is the
largest slot: exact up to 8 uses. Later uses share slots, and a scanned layer
has one for all its steps, so that there it is a sum, an upper bound. A kernel
is the same in all uses, and its amax their mean. A row of zeros (JAX's
gradient of what was not used) means "not observed".

The -1 is also a seal. An optimizer that takes the state for a weight moves
all columns, this one too; a row with any other negative number there is not
believed, and its operand counts as never observed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from keras import ops

from keras_policy_ext.recipes import OPERANDS

Tensor = Any

SLOTS = 8
"""Uses of a layer in one step whose amaxes are told apart."""

MOST_STEPS = 2.0**23
"""Where the count of steps starts anew, so that float32 holds it."""

SEALED = -1.0
"""In the first column of a row that nothing but an assignment has changed."""

ROUNDING = 2.0**-20
"""How far the average of two sealed rows may be from it.

Averages of weights, as loops write them, round four times at most, each by
half a unit in the last place of a number up to 1. An optimizer moves a weight
by about its learning rate in its first step.
"""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things are in a row of the state.

    Attributes:
        length: Length of the amax history.
        constant: Of each row, whether all uses of a step observe the same.
    """

    length: int
    constant: tuple[bool, ...] = tuple(o == "kernel" for o in OPERANDS)

    @property
    def width(self) -> int:
        """Number of columns."""
        return 2 + SLOTS + self.length

    def history(self, state: Tensor) -> Tensor:
        """Amax histories, (rows, length), newest at index 0."""
        return state[:, 2 + SLOTS :]

    def scale(self, state: Tensor) -> Tensor:
        """Scales last used, (rows,); 0 where none was."""
        return state[:, 1 + SLOTS]

    def observation(self, amaxes: Tensor, slot: int) -> Tensor:
        """One use.

        Args:
            amaxes: Float32 (rows,).
            slot: Which use of the step this is; taken modulo 8.

        Returns:
            Float32 (rows, width).
        """
        slot = slot % SLOTS
        column = ops.expand_dims(amaxes, 1)
        rows = column.shape[0]
        after = self.width - 2 - slot
        return ops.concatenate(
            [
                ops.ones((rows, 1), "float32"),
                ops.zeros((rows, slot), "float32"),
                column,
                ops.zeros((rows, after), "float32"),
            ],
            axis=1,
        )

    def is_intact(self, state: Tensor) -> Tensor:
        """Which rows of a settled state nobody has moved, bool (rows,)."""
        return state[:, 0] == SEALED

    def settled(self, scale: Tensor, history: Tensor) -> Tensor:
        """A state with these scales, (rows,), and histories."""
        rows = history.shape[0]
        return ops.concatenate(
            [
                SEALED * ops.ones((rows, 1), "float32"),
                ops.zeros((rows, SLOTS), "float32"),
                ops.expand_dims(scale, 1),
                history,
            ],
            axis=1,
        )

    def settle(self, value: Tensor, previous: Tensor, used: Tensor) -> Tensor:
        """Interpret an assigned value.

        Args:
            value: (rows, width); an observation, a settled state or zeros,
                row by row. More columns hold more amaxes.
            previous: (rows, width), settled.
            used: Float32 (rows,), the scales of the observed step.

        Returns:
            (rows, width), settled. An amax that is not finite is not entered.
            A settled row that is assigned is sealed, unless it was moved.
        """
        uses, amaxes = value[:, :1], value[:, 1:]
        finite = ops.all(ops.isfinite(amaxes), axis=1, keepdims=True)
        intact = ops.expand_dims(self.is_intact(previous), 1)
        history = ops.where(intact, self.history(previous), 0.0)
        newest = self._newest(uses, amaxes, history)
        rolled = _roll(newest, history)
        history = ops.where(finite, rolled, history)
        observed = self.settled(used, history)
        is_rounded = ops.less_equal(ops.abs(uses - SEALED), ROUNDING)
        seal = ops.where(is_rounded, SEALED, uses)
        state = ops.concatenate([seal, value[:, 1 : self.width]], axis=1)
        kept = ops.where(ops.less(uses, 0.0), state, previous)
        return ops.where(self._is_observation(uses, amaxes), observed, kept)

    def _is_observation(self, uses: Tensor, amaxes: Tensor) -> Tensor:
        """Which rows are sums over uses, and nothing else, bool (rows, 1).

        A sum that was scaled, as to clip a norm or to average over batches,
        has a number of uses that is no integer, or more amaxes than uses.
        """
        seen = ops.cast(ops.not_equal(amaxes, 0.0), "float32")
        seen = ops.sum(seen, axis=1, keepdims=True)
        whole = ops.equal(uses, ops.floor(uses))
        counted = ops.logical_and(whole, ops.greater_equal(uses, seen))
        return ops.logical_and(ops.greater(uses, 0.0), counted)

    def _newest(self, uses: Tensor, amaxes: Tensor, history: Tensor) -> Tensor:
        mean = ops.sum(amaxes, axis=1, keepdims=True) / ops.maximum(uses, 1.0)
        largest = ops.max(amaxes, axis=1, keepdims=True)
        constant = np.array(self.constant)[:, np.newaxis]
        return ops.where(constant, mean, largest)


class Counting(Layout):
    """A row whose history is one number, that of the step.

    An observation says that there was a use. What it says of the number is
    not read: the sum over many uses, as of a scan, is beyond what float32
    holds exactly, and the count would stop.
    """

    def _newest(self, uses: Tensor, amaxes: Tensor, history: Tensor) -> Tensor:
        return following(history)


def following(steps: Tensor) -> Tensor:
    """The number of the next step."""
    return ops.where(steps + 1.0 < MOST_STEPS, steps + 1.0, 0.0)


def _roll(newest: Tensor, history: Tensor) -> Tensor:
    """Enter the newest amax as Keras and Flax do.

    The ring turns left and index 0 is overwritten: index 1 is the oldest
    entry and the last index the one before the newest.
    """
    parts = [newest, history[:, 2:], history[:, :1]]
    return ops.concatenate(parts, axis=1)[:, : history.shape[1]]
