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
gradient of what was not used) means "not observed". Replicas whose gradients
are averaged write into columns of their own: `Layout.of_replica`.
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


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things are in a row of the state.

    Attributes:
        length: Length of the amax history.
    """

    length: int

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

    def of_replica(
        self, observation: Tensor, replica: int, replicas: int
    ) -> Tensor:
        """An observation of one replica, so that their mean keeps the largest.

        Where gradients are averaged over replicas, each writes into columns
        of its own, those of scale and history included, and counts as often
        as there are replicas: the mean is then the sum over all of them.
        Exact where each has a column for each of its uses; replicas or uses
        beyond that share columns, as uses beyond 8 do.

        Args:
            observation: Float32 (rows, width), or zeros.
            replica: Number of this replica.
            replicas: How many there are.

        Returns:
            Float32 (rows, width).
        """
        columns = self.width - 1
        own = max(1, min(SLOTS, columns // replicas))
        before = replica * own % columns
        slots = ops.pad(
            observation[:, 1 : 1 + SLOTS], [[0, 0], [0, -SLOTS % own]]
        )
        slots = ops.reshape(slots, (slots.shape[0], -1, own))
        after = columns - before - own
        slots = ops.pad(ops.sum(slots, axis=1), [[0, 0], [before, after]])
        moved = ops.concatenate([observation[:, :1], slots], axis=1)
        return ops.multiply(moved, float(replicas))

    def settled(self, scale: Tensor, history: Tensor) -> Tensor:
        """A state with these scales, (rows,), and histories."""
        rows = history.shape[0]
        return ops.concatenate(
            [
                -ops.ones((rows, 1), "float32"),
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
        """
        uses, amaxes = value[:, :1], value[:, 1:]
        newest = self._newest(uses, amaxes)
        finite = ops.all(ops.isfinite(amaxes), axis=1, keepdims=True)
        history = self.history(previous)
        rolled = _roll(newest, history)
        history = ops.where(finite, rolled, history)
        observed = self.settled(used, history)
        state = value[:, : self.width]
        kept = ops.where(ops.less(uses, 0.0), state, previous)
        return ops.where(ops.greater(uses, 0.0), observed, kept)

    def _newest(self, uses: Tensor, amaxes: Tensor) -> Tensor:
        mean = ops.sum(amaxes, axis=1, keepdims=True) / ops.maximum(uses, 1.0)
        largest = ops.max(amaxes, axis=1, keepdims=True)
        constant = np.array([[operand == "kernel"] for operand in OPERANDS])
        return ops.where(constant, mean, largest)


def _roll(newest: Tensor, history: Tensor) -> Tensor:
    """Enter the newest amax as Keras and Flax do.

    The ring turns left and index 0 is overwritten: index 1 is the oldest
    entry and the last index the one before the newest.
    """
    parts = [newest, history[:, 2:], history[:, :1]]
    return ops.concatenate(parts, axis=1)[:, : history.shape[1]]
