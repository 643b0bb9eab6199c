"""What each framework does with the state variables of recipes.

`current` is that of the running backend, found at its first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import keras
from keras import ops

from keras_policy_ext._types import Tensor

Settle = Callable[[Tensor, Tensor], Tensor]
"""Takes an assigned value and the state before; returns the state after."""


class StateKernels(Protocol):
    """Kernels that compute the scales and states of a scale source.

    Their methods have the names of the source's, and return the same values.
    """

    def supports(self, source: object, state: Tensor) -> str | None:
        """Return why these kernels do not support a source's state, or None."""

    def history_scales(self, source: Any, state: Tensor) -> Any:
        """Read the scales of the coming step from a state."""

    def observation(
        self, source: Any, amaxes: list[Tensor], slot: int
    ) -> Tensor:
        """Return the amaxes of one use of a layer as a state's gradient."""

    def settle(self, source: Any, value: Tensor, previous: Tensor) -> Tensor:
        """Return the new state after `value` is assigned to it."""


class States:
    """State variables, whose "gradients" are observations of amaxes.

    Attributes:
        kernels: Kernels for the arithmetic of states, the best first. The
            source's own arithmetic in `keras.ops` is the fallback.
        steps_take_values: Whether compiled steps are functions of the values
            of variables.
        keeps_variables_in_graphs: Whether compiled steps read variables
            without calling this package.
    """

    kernels: tuple[StateKernels, ...] = ()

    steps_take_values = False

    keeps_variables_in_graphs = False

    def kernels_for(self, source: object, state: Tensor) -> StateKernels | None:
        """Return the first kernels that support a source's state, or None."""
        for kernels in self.kernels:
            if kernels.supports(source, state) is None:
                return kernels
        return None

    def combine_replicas(self, observation: Tensor) -> Tensor:
        """Combine this replica's observation with those of all replicas.

        An observation is (rows, width), or a settled state. The result, the
        same on every replica, is (rows, width or more): `StateLayout.settle`.
        """
        return observation

    def seen_lately(self, state: Tensor) -> bool:
        """Return True if a GPU reported that all operands were observed."""
        return False

    def settle(self, settle: Settle, value: Tensor, previous: Tensor) -> Tensor:
        """Compute a state's new value, equal on every replica.

        `settle` is a function of the assigned value and the state before.
        """
        return self.settle_here(settle, self.combine_replicas(value), previous)

    def settle_here(
        self, settle: Settle, value: Tensor, previous: Tensor
    ) -> Tensor:
        """Return `settle(value, previous)`, without combining replicas."""
        return settle(value, previous)

    def version(self, x: Tensor) -> int | None:
        """Return the count of in-place changes of a tensor; None if unknown."""
        return None

    def as_value_of(self, variable: keras.Variable, value: Tensor) -> Tensor:
        """Return a value as a tensor that can be assigned to a variable."""
        return ops.convert_to_tensor(value, dtype=variable.dtype)

    def assigned(
        self, variable: keras.Variable, value: Tensor
    ) -> Tensor | None:
        """Return the state after `value` is assigned; None if stored here."""
        return self.settle(variable.settling, value, variable.value)

    def keep_observations(
        self, variable: keras.Variable, tensor: Tensor
    ) -> None:
        """Store a state's observations in the variable, not in `.grad`.

        It does nothing on a framework that returns gradients to the caller.
        `variable` was just initialized with `tensor`.
        """

    def earlier_observation(self, variable: keras.Variable) -> Tensor | None:
        """Return the observations of micro-batches since the last update.

        Float32 (operands, width); None if there are none, or if the optimizer
        accumulates them with the gradients.
        """
        return None

    def put_earlier_observation(
        self, variable: keras.Variable, value: Tensor
    ) -> None:
        """Restore into a state what `earlier_observation` returned for it."""

    def known_value(self, variable: keras.Variable) -> Tensor | None:
        """Return a state's value; None while it is traced or slow to read."""
        return None

    def passes(self, source: Any, interpreted: bool) -> Any:
        """Return the kernels of a state for `Engine.straight`."""
        raise NotImplementedError

    number_of_use: Callable[[keras.Variable], int | None] | None = None
    """Returns the number of this use of a kernel in the graph being made.

    It returns None outside of graphs; it is None where a variable counts its
    uses in graphs too.
    """

    def know_replicas(self, state: Tensor, in_graph: bool) -> None:
        """Note the replicas of a state, before gradients are taken."""


if TYPE_CHECKING:
    current: States
else:

    def __getattr__(name):
        if name != "current":
            raise AttributeError(f"module {__name__!r} has no {name!r}")
        home = f"{__package__}.{keras.backend.backend()}"
        globals()["current"] = importlib.import_module(home).STATES
        return globals()["current"]
