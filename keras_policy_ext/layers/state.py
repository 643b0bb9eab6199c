"""The float8 state of a layer: a sub-layer that holds sum-safe matrices."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _keras_compat, kernels
from keras_policy_ext.numerics.rules import rule_of
from keras_policy_ext.recipes import OPERANDS, Recipe

SUFFIX = "_amax"
"""Ends the name of a state variable: a LayoutMap for kernels won't match."""


def _unobserved(shape: tuple[int, ...], dtype: Any = None) -> Any:
    """The settled state of what was never observed."""
    return ops.concatenate(
        [-ops.ones((shape[0], 1), dtype), ops.zeros((shape[0], shape[1] - 1), dtype)],
        axis=1,
    )


class StateVariable(keras.Variable):
    """A variable that Keras overwrites with its "gradient".

    Assigning is where an observation becomes state: see
    `numerics.observations`. Zeros, which JAX hands out as the gradient of
    what was not used, leave it as it was.
    """

    def __init__(self, recipe: Recipe, name: str):
        self.recipe = recipe
        self.uses = 0
        super().__init__(
            initializer=_unobserved,
            shape=rule_of(recipe).state_shape,
            dtype="float32",
            autocast=False,
            aggregation="only_first_replica",
            name=name,
        )
        self.overwrite_with_gradient = True

    def assign(self, value: Any) -> Any:
        """Settle `value`, an observation or a state, and store the result."""
        self.uses = 0
        value = self._convert_to_tensor(value, dtype=self.dtype)
        readable = _keras_compat.has_value(self)
        if readable and tuple(value.shape) == tuple(self.shape):
            value = kernels.engine().combine_replicas(value)
            value = rule_of(self.recipe).settle(value, self.value)
        return super().assign(value)

    def next_slot(self) -> int:
        """Number the uses between two assignments."""
        slot = self.uses
        self.uses = slot + 1
        return slot


class Float8State(keras.layers.Layer):
    """Holds one matrix for each contraction kernel of the layer it is in."""

    def __init__(self, name: str = "float8_state"):
        super().__init__(name=name, dtype="float32")
        self._owners: dict[str, str] = {}
        self.built = True

    def add(self, kernel: keras.Variable, recipe: Recipe) -> None:
        """Create the state of a kernel, where the recipe has state."""
        if rule_of(recipe).state_shape is None or kernel.path in self._owners:
            return
        name = kernel.name + SUFFIX
        with keras.name_scope(self.name):
            setattr(self, name, StateVariable(recipe, name))
        self._owners[kernel.path] = name

    def of(self, kernel: Any) -> StateVariable | None:
        """The state of a kernel, None where it has none."""
        name = self._owners.get(getattr(kernel, "path", None))
        return None if name is None else getattr(self, name)

    @property
    def owners(self) -> list[str]:
        """Paths of the kernels that have a state here."""
        return list(self._owners)

    @property
    def matrices(self) -> list[StateVariable]:
        """All state variables, in the order of creation."""
        return [getattr(self, name) for name in self._owners.values()]

    def save_own_variables(self, store: Any) -> None:
        """Write the scale and the amax history of each operand by name."""
        for variable in self.matrices:
            for key, value in _entries(variable).items():
                store[key] = value

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote, as far as it is there.

        A state that is not in the file starts anew. A history of another
        length is cut or padded with zeros; the newest entries are kept.
        """
        for variable in self.matrices:
            variable.assign(_matrix(variable, store))


def _entries(variable: StateVariable) -> dict[str, np.ndarray]:
    layout = rule_of(variable.recipe).layout
    matrix = keras.ops.convert_to_numpy(variable.value)
    entries = {}
    for row, operand in enumerate(OPERANDS):
        prefix = f"{variable.name}.{operand}"
        entries[f"{prefix}.scale"] = layout.scale(matrix)[row]
        entries[f"{prefix}.amax_history"] = layout.history(matrix)[row]
    return entries


def _matrix(variable: StateVariable, store: Any) -> np.ndarray:
    length = rule_of(variable.recipe).layout.length
    matrix = np.zeros(tuple(variable.shape), "float32")
    matrix[:, 0] = -1.0
    first = matrix.shape[1] - length
    for row, operand in enumerate(OPERANDS):
        prefix = f"{variable.name}.{operand}"
        if f"{prefix}.amax_history" not in store.keys():
            continue
        history = np.asarray(store[f"{prefix}.amax_history"])
        matrix[row, first - 1] = np.asarray(store[f"{prefix}.scale"])
        matrix[row, first:] = _resized(history, length)
    return matrix


def _resized(ring: np.ndarray, length: int) -> np.ndarray:
    """A history cut or padded with zeros, the newest entries kept.

    In the ring index 0 is the newest and the last index the one before it.
    """
    aged = np.concatenate([ring[:1], ring[:0:-1]])[:length]
    aged = np.pad(aged, (0, length - len(aged)))
    return np.concatenate([aged[:1], aged[:0:-1]])
