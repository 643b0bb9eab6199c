"""The states of a layer's kernels: a `layers.state_of.StateOf`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends
from keras_policy_ext._keras import built_layers, variable_values
from keras_policy_ext._keras.built_layers import scope_of_path
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import EinsumOfBank, bank_axis
from keras_policy_ext.ext.delayed import (
    entries,
    frameworks,
    sources,
)
from keras_policy_ext.ext.delayed.variable import (
    STEPS_SUFFIX,
    SUFFIX,
    StateVariable,
)
from keras_policy_ext.files.saved_layers import SavedState
from keras_policy_ext.layers import state_of
from keras_policy_ext.numerics import scale_sources
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import Recipe


class States:
    """The state variables of a layer's kernels, attributes of its group.

    Args:
        group: The sublayer `float8_state`, which tracks the variables.
    """

    def __init__(self, group: keras.layers.Layer):
        self._group = group
        # The attribute of each state variable, by the path of the kernel.
        self._owners: dict[str, str] = {}
        self.have_banks = False

    def build(
        self, kernel: keras.Variable, recipe: Recipe, bank_axis: int | None
    ) -> None:
        """Create the state variable of a kernel.

        Raises:
            ValueError: If there is already a kernel with this path.
        """
        if kernel.path in self._owners:
            raise ValueError(
                "Two float8 kernels of a layer have the same name, and would "
                f"share one state. Received: {kernel.path!r} twice. Allowed: "
                "any other name. Pass `name=` to `add_weight`."
            )
        group, amaxes = self._group, source_of(recipe).observes_amaxes
        name = kernel.name + (SUFFIX if amaxes else STEPS_SUFFIX)
        # Beside the kernel, so that paths of states are as distinct as those
        # of kernels: PyTorch keeps parameters by path.
        scope_of_kernel = scope_of_path(kernel.path.rpartition("/")[0])
        with scope_of_kernel, keras.name_scope(group.name):
            variable = StateVariable(recipe, kernel, name, bank_axis)
            # Another layer's kernel has this name too.
            if hasattr(group, name):
                name = f"{name}_{len(self._owners)}"
            # Tracked while it is trainable, so that Keras counts it among the
            # trainable variables whenever the layer becomes trainable.
            setattr(group, name, variable)
        variable.trainable = group.trainable
        self._owners[kernel.path] = name
        self.have_banks |= self.scales_each_matrix(kernel)
        built_layers.register_parameters(group)

    def of(self, kernel: keras.Variable) -> StateVariable | None:
        """Return the state variable of a kernel; None if it has none."""
        name = self._owners.get(getattr(kernel, "path", ""))
        return None if name is None else getattr(self._group, name)

    @property
    def owners(self) -> list[str]:
        """The paths of the kernels that have a state variable here."""
        return list(self._owners)

    @property
    def variables(self) -> list[StateVariable]:
        """The state variables of this layer, in the order of creation."""
        return [getattr(self._group, name) for name in self._owners.values()]

    def operands(
        self,
        kernel: keras.Variable,
        value: Tensor,
        training: bool | None,
        compiling: bool,
    ) -> tuple[tuple[Tensor, ...], int]:
        """Return a kernel's state for one use of it, and the slot of that."""
        variable = self.of(kernel)
        if variable is None:
            raise ValueError(self._unknown_kernel(kernel))
        if not compiling:
            variable.look_at(value)
        matrix = variable.matrix()
        variable.warn_if_moved()
        # No optimizer updates the state with the kernel: correct a copy.
        if variable.left_out and frameworks.current.steps_take_values:
            matrix = variable.kept_up(value, matrix)
        if not backends.current.may_take_gradients() or training is False:
            return (matrix,), 0  # Nothing is observed: any slot will do.
        if variable.numbered is not None:
            matrix = variable.numbered(matrix, variable)
        return (matrix,), variable.next_slot()

    def matrices_of(self, kernel: keras.Variable) -> int:
        """Return how many matrices of a kernel have a history each."""
        variable = self.of(kernel)
        return 1 if variable is None else variable.matrix_count

    def scales_each_matrix(self, kernel: keras.Variable) -> bool:
        """Return True if each matrix of a bank may have a scale."""
        variable = self.of(kernel)
        if variable is None:
            return False
        # With histories only if the state has one for each matrix.
        return variable.counts_steps or variable.matrix_count > 1

    def check_bank(self, kernel: keras.Variable, contraction: Any) -> None:
        """Raise ValueError if the histories are not along a bank's axis."""
        variable = self.of(kernel)
        if variable is None or variable.matrix_count == 1:
            return
        is_bank = isinstance(contraction, EinsumOfBank)
        axis = bank_axis(contraction.equation) if is_bank else None
        if axis != variable.bank_axis:
            raise ValueError(
                f"The kernel {kernel.path!r} is no bank of matrices in this "
                f"product. Received: {contraction!r}; the layer has a history "
                f"for each of {variable.matrix_count} matrices, along axis "
                f"{variable.bank_axis}. Allowed: an equation in which inputs "
                "and outputs have this axis too, such as 'eti,eio->eto' for "
                "axis 0. Change the equation, or what the layer's "
                "`float8_bank_axis` returns."
            )

    def settle(self, kernels: Sequence[keras.Variable]) -> None:
        """Enter the current amaxes of kernels into their state variables."""
        for kernel in kernels:
            variable = self.of(kernel)
            if variable is not None and variable.observes_amaxes:
                variable.observe("kernel", self.amax(kernel))

    def amax(self, kernel: keras.Variable) -> Any:
        """Return a kernel's amax on the host: float32, () or (matrices,)."""
        variable: Any = self.of(kernel)
        value = variable_values.value_without_autocast(kernel)
        return np.float32(ops.convert_to_numpy(variable.amax_of(value)))

    def entries(self, merged: bool) -> dict[str, np.ndarray]:
        """Return the scales and amax histories, or the counts, for a file."""
        observed_earlier = frameworks.current.earlier_observation
        kernels = [(each, observed_earlier(each)) for each in self.variables]
        return entries.arrays_for_file(kernels, merged)

    def load(self, saved: SavedState) -> Callable[[], None]:
        """Read states from a file; return a function that assigns them.

        A state that is not in the file starts anew. A history of another
        length is cut or padded with zeros; the newest entries are kept.

        Raises:
            ValueError: If the entries are incomplete, of wrong shapes or
                values, or written by a newer version of this package.
        """
        variables = self.variables
        recipes = [each.recipe for each in variables]
        counts = [each.matrix_count for each in variables]
        kernels = entries.kernels(saved, recipes, counts)

        def assign() -> None:
            for variable, kernel in zip(variables, kernels, strict=True):
                variable.enter(kernel.matrix)
                earlier = kernel.earlier
                # A state of another history length has another shape.
                if earlier is not None and earlier.shape == kernel.matrix.shape:
                    framework = frameworks.current
                    framework.put_earlier_observation(variable, earlier)

        return assign

    def fits(self, recipe: Recipe) -> bool:
        """Return True if these state variables have the shape of a recipe's."""
        return not recipe.remembers or all(
            tuple(each.shape)
            == source_of(recipe, each.matrix_count).state_shape
            for each in self.variables
        )

    def follow(self, recipe: Recipe) -> None:
        """Set another recipe in all state variables; it must pass `fits`."""
        if recipe.remembers:
            for variable in self.variables:
                variable.recipe = recipe

    def _unknown_kernel(self, kernel: keras.Variable) -> str:
        """Return an error message: the layer has no state for a kernel."""
        owners = ", ".join(self.owners) or "none"
        got = getattr(
            kernel, "path", f"a tensor of shape {tuple(kernel.shape)}"
        )
        layer: Any = self._group.owner()
        return (
            f"Layer {layer.name!r} has no float8 state for this kernel, "
            f"which the policy {layer.dtype_policy!r} needs. Received: "
            f"{got}. Weights with state: {owners}. Pass a weight which this "
            "layer made with `add_weight(..., float8=True)`, not a tensor "
            "computed from it; for a transposed kernel change the equation."
        )


class Memory:
    """What this extension registers; see `layers.state_of.Memory`."""

    def states(self, group: keras.layers.Layer) -> States:
        """Return an empty `States`."""
        return States(group)

    def check(self, saved: SavedState, recipes: Sequence[Recipe]) -> None:
        """Raise ValueError if a file has damaged states of kernels."""
        entries.kernels(saved, recipes)


scale_sources.register_finder(sources.find)
state_of.register(Memory())
