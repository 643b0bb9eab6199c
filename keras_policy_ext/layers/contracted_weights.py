"""Which weights of a float8 layer are kernels, and how they are made."""

from __future__ import annotations

import zlib
from typing import Any

import keras
from keras import ops

from keras_policy_ext import _bases
from keras_policy_ext._keras import calls, walking
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers import stored_weights
from keras_policy_ext.layers.operands import is_floating
from keras_policy_ext.layers.state_variable import StateVariable
from keras_policy_ext.numerics.observations import numbered_row
from keras_policy_ext.policies.of_layers import is_frozen
from keras_policy_ext.stored_kernels import Axes

#: Float32 holds all integers below.
_MOST = 2**24

#: The attribute of the root of a call that has the states used so far.
_USED = "_float8_states_used"


def numbered(state: StateVariable, matrix: Tensor) -> Tensor:
    """A state that counts, with the number of its kernel, for one step.

    Args:
        state: The variable.
        matrix: Its value.
    """
    row = numbered_row(matrix.shape[1], number_of(state))
    return ops.add(matrix, ops.convert_to_tensor([row], "float32"))


def number_of(state: StateVariable) -> int:
    """The number of a kernel in the call that is under way."""
    root = calls.root_of_call()
    if root is None:
        return zlib.crc32(state.kernel.path.encode()) % _MOST
    # A tuple: torch.compile lets no dict change here.
    known: tuple[int, ...] = getattr(root, _USED, ())
    if id(state) not in known:
        known = (*known, id(state))
        setattr(root, _USED, known)
    return known.index(id(state))


class ContractedWeights(_bases.MixedInto):
    """The part of `Float8Mixin` about the weights that a layer contracts."""

    float8_policy: Any
    float8_state: Any

    float8_kernels: tuple[str, ...] | None = None

    float8_trains: bool = True
    """Whether it follows policies to train under. Else it can be frozen."""

    _float8_kernel_paths: tuple[str, ...] = ()
    # In the order in which they are made, while kernels are stored.
    _float8_weight_names: tuple[str, ...] = ()

    def add_weight(
        self, *args: Any, float8: bool | None = None, **kwargs: Any
    ) -> keras.Variable:
        """`Layer.add_weight`, which also makes the state of a kernel.

        Args:
            *args: As for `keras.layers.Layer.add_weight`.
            float8: Whether this weight is contracted in float8. None: as
                `float8_kernels` says.
            **kwargs: As for `keras.layers.Layer.add_weight`.

        Returns:
            The variable.
        """
        variable = None
        if self.is_frozen:
            variable = stored_weights.made(self, float8, *args, **kwargs)
        if variable is None:
            variable = super().add_weight(*args, **kwargs)
        if self.is_frozen:
            self._float8_weight_names += (variable.name,)
            return variable
        if float8 is None:
            float8 = self.is_float8_kernel(self, variable)
        if float8:
            self._float8_kernel_paths += (variable.path,)
            policy = self.float8_policy
            if policy is not None:
                self.float8_state.add(variable, policy.recipe)
        return variable

    @property
    def is_frozen(self) -> bool:
        """Return True if kernels are stored in float8, and not trained."""
        return is_frozen(self)

    @property
    def float8_contracted(self) -> list[keras.Variable]:
        """The weights of this layer that are contracted in float8."""
        paths = self._float8_kernel_paths
        return [v for v in self.weights if v.path in paths]

    @classmethod
    def is_float8_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True if a weight is contracted, as far as the class can tell.

        Args:
            layer: A layer of this class, or of the stock class.
            variable: One of its own weights.

        Returns:
            What `float8_kernels` says.
        """
        names = getattr(layer, "float8_kernels", cls.float8_kernels)
        if names is not None:
            return variable.name in names
        return len(variable.shape) >= 2 and is_floating(variable.dtype)

    @classmethod
    def is_stored_kernel(
        cls, layer: keras.Layer, variable: keras.Variable
    ) -> bool:
        """Return True if a weight is stored in float8 when the layer is frozen.

        Args:
            layer: A layer of this class, or of the stock class.
            variable: One of its own weights, or what it is going to be.

        Returns:
            Here: whether it is contracted.
        """
        return cls.is_float8_kernel(layer, variable)

    @classmethod
    def float8_axes(cls, layer: keras.Layer, kernel: keras.Variable) -> Axes:
        """Which axes of a kernel its product sums over, and which it keeps.

        Args:
            layer: A layer of this class, or of the stock class.
            kernel: One of its contracted weights.

        Returns:
            Here: all axes but the last are summed over.
        """
        *summed, free = range(len(kernel.shape))
        return Axes(tuple(summed), (free,))

    def _kernels_to_contract(self) -> list[keras.Variable]:
        if self._float8_kernel_paths:
            return self.float8_contracted
        own = walking.own_weights(self)
        return [v for v in own if self.is_float8_kernel(self, v)]
