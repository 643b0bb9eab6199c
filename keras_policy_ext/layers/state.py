"""The float8 state of a layer: a sublayer with one variable per kernel."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions
from keras_policy_ext._keras import built_layers, variable_values
from keras_policy_ext._keras.built_layers import scope_of_path
from keras_policy_ext.layers import entries
from keras_policy_ext.layers.saved_layers import SavedState, state_for_file
from keras_policy_ext.layers.state_variable import (
    STEPS_SUFFIX,
    SUFFIX,
    StateVariable,
)
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import Recipe


def _no_layer() -> None:
    """Return None, as a weak reference to a deleted layer does."""


_Take = Callable[[Mapping[str, np.ndarray]], None]
"""A function that gets the entries of a state in a file."""


def has_state(recipe: Recipe) -> bool:
    """Return True if kernels have a state under this recipe."""
    return source_of(recipe).state_shape is not None


class LastCall:
    """The plan of the last contraction that a layer computed; None before it.

    Apart, since setting attributes of a layer breaks torch.compile's graph.
    """

    plan: contractions.Plan | contractions.FrozenPlan | None = None


class Float8State(keras.layers.Layer):
    """A sublayer that holds one state variable per kernel of a float8 layer.

    Args:
        trainable: Whether that layer is trainable. Keras passes the attribute
            on to existing sublayers only, not to later ones.
    """

    def __init__(self, trainable: bool = True):
        super().__init__(
            name=entries.GROUP, trainable=trainable, dtype="float32"
        )
        # The attribute of each state variable, by the path of the kernel.
        self._owners: dict[str, str] = {}
        self.last_call = LastCall()
        # The layer that this is in, which files get to know more of.
        self._layer: Callable[[], Any] = _no_layer
        # The full name of the policy that `convert` was given for the layer;
        # None for a layer that was made under its policy.
        self.given: str | None = None
        # The policy that the file last read had: `load_model` looks at it.
        self.policy_in_file: np.ndarray | None = None
        # While a file is read: what gets the entries in place of this state;
        # whether the layer's own weights are loaded, None if it is not asked;
        # whether its entries came with these weights; and the error.
        self._take: _Take | None = None
        self._layer_loaded: bool | None = None
        self._loaded_with_layer = False
        self._failure: ValueError | None = None
        self.built = True
        # A state without variables would otherwise add its dict of parameters
        # when PyTorch first asks for them, which `fully_shard` refuses.
        built_layers.track_again([self])

    def belong_to(self, layer: keras.Layer) -> None:
        """Set the layer, whose texts files store with this state."""
        # Not with the weights, since a layer may override how it saves these.
        self._layer = weakref.ref(layer)

    def add(
        self,
        kernel: keras.Variable,
        recipe: Recipe,
        bank_axis: int | None = None,
    ) -> None:
        """Create the state variable of a kernel, if the recipe has state.

        `bank_axis` is that of `Float8Mixin.float8_bank_axis`.

        Raises:
            ValueError: If there is already a kernel with this path.
        """
        if not has_state(recipe):
            return
        if kernel.path in self._owners:
            raise ValueError(
                "Two float8 kernels of a layer have the same name, and would "
                f"share one state. Received: {kernel.path!r} twice. Allowed: "
                "any other name. Pass `name=` to `add_weight`."
            )
        amaxes = source_of(recipe).observes_amaxes
        name = kernel.name + (SUFFIX if amaxes else STEPS_SUFFIX)
        # Beside the kernel, so that paths of states are as distinct as those
        # of kernels: PyTorch keeps parameters by path.
        scope_of_kernel = scope_of_path(kernel.path.rpartition("/")[0])
        with scope_of_kernel, keras.name_scope(self.name):
            variable = StateVariable(recipe, kernel, name, bank_axis)
            if hasattr(self, name):  # Another layer's kernel has this name too.
                name = f"{name}_{len(self._owners)}"
            # Tracked while it is trainable, so that Keras counts it among the
            # trainable variables whenever the layer becomes trainable.
            setattr(self, name, variable)
        variable.trainable = self.trainable
        self._owners[kernel.path] = name
        built_layers.track_again([self])

    def observe(self, kernels: list[keras.Variable]) -> None:
        """Enter the current amaxes of kernels into their state variables."""
        for kernel in kernels:
            variable = self.of(kernel)
            if variable is not None and variable.observes_amaxes:
                variable.observe("kernel", self.amax(kernel))

    def amax(self, kernel: keras.Variable) -> Any:
        """Return a kernel's amax on the host: float32, () or (matrices,)."""
        value = variable_values.value_without_autocast(kernel)
        variable = self.of(kernel)
        amax_of = scaling.amax if variable is None else variable.amax_of
        return np.float32(ops.convert_to_numpy(amax_of(value)))

    def of(self, kernel: keras.Variable) -> StateVariable | None:
        """Return the state variable of a kernel; None if it has none."""
        name = self._owners.get(getattr(kernel, "path", ""))
        return None if name is None else getattr(self, name)

    @property
    def owners(self) -> list[str]:
        """The paths of the kernels that have a state variable here."""
        return list(self._owners)

    @property
    def matrices(self) -> list[StateVariable]:
        """The state variables of this layer, in the order of creation."""
        return [getattr(self, name) for name in self._owners.values()]

    def fits(self, recipe: Recipe) -> bool:
        """Return True if these state variables have the shape of a recipe's."""
        return not has_state(recipe) or all(
            tuple(each.shape)
            == source_of(recipe, each.matrix_count).state_shape
            for each in self.matrices
        )

    def follow(self, recipe: Recipe) -> None:
        """Set another recipe in all state variables; it must pass `fits`."""
        if has_state(recipe):
            for variable in self.matrices:
                variable.recipe = recipe

    def save_own_variables(self, store: Any) -> None:
        """Save the layer's strings, scales and amax histories."""
        layer = self._layer()
        texts = {} if layer is None else layer.texts_for_file()
        # Files then hold another kernel, the one with adapters merged in:
        # what was observed of this one is not written.
        merged = layer is not None and layer.merges_adapters
        observed_earlier = backends.current.earlier_observation
        kernels = [(each, observed_earlier(each)) for each in self.matrices]
        for key, value in state_for_file(texts, kernels, merged).items():
            store[key] = value

    @property
    def _path_in_messages(self) -> str:
        """The path of this state in messages; Keras gives it none."""
        if self.matrices:
            return self.matrices[0].path.rpartition("/")[0]
        return f"{getattr(self._layer(), 'path', None)}/{self.name}"

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` saved; reset states not in the file.

        A state that is not in the file starts anew. A history of another
        length is cut or padded with zeros; the newest entries are kept. Either
        all matrices are assigned or, on an error, none. If the layer's own
        weights were not loaded, its state is unchanged.

        Raises:
            ValueError: If the entries are incomplete, of wrong shapes or
                values, or written by a newer version of this package.
        """
        saved = SavedState.of(store, self._path_in_messages)
        if self._take is not None:
            self._take(saved.store)
            return
        layer_loaded, self._layer_loaded = self._layer_loaded, None
        if layer_loaded is False:
            # Keras looks for an object that failed in other places of the
            # file; finding nothing there must not end the failure.
            if self._failure is not None:
                raise self._failure
            return
        if self._loaded_with_layer and not saved.store:
            return  # See `load_with_layer`.
        self.policy_in_file = saved.store.get(entries.POLICY)
        variables = self.matrices
        try:
            recipes = [each.recipe for each in variables]
            counts = [each.matrix_count for each in variables]
            kernels = saved.kernels(recipes, counts)
            self.given = saved.text(entries.GIVEN) or self.given
        except ValueError as error:
            self._failure = error
            raise
        self._failure = None
        for variable, kernel in zip(variables, kernels, strict=True):
            variable.enter(kernel.matrix)
            earlier = kernel.earlier
            # A state of another history length has another shape.
            if earlier is not None and earlier.shape == kernel.matrix.shape:
                framework = backends.current
                framework.put_earlier_observation(variable, earlier)

    @contextlib.contextmanager
    def capture_entries(self, take: _Take) -> Iterator[None]:
        """In the block, pass loaded entries to `take`; assign none."""
        self._take = take
        try:
            yield
        finally:
            self._take = self._layer_loaded = None
            self._loaded_with_layer = False

    def note_layer_loading(self, store: Any) -> None:
        """Record that the layer is about to load its own weights."""
        self._layer_loaded = False
        self._loaded_with_layer = False
        if len(store.keys()):  # Not where Keras looks further after a failure.
            self._failure = None

    def note_layer_loaded(self) -> None:
        """Record that the layer has loaded its own weights."""
        self._layer_loaded = True

    def load_with_layer(self, arrays: dict[str, np.ndarray]) -> None:
        """Load the entries that came with the layer's own weights, if any."""
        # Such a file has no group for this sublayer. The empty group that
        # Keras's loader passes afterwards leaves the state unchanged.
        if arrays:
            self.load_own_variables(arrays)
        self._loaded_with_layer = True
