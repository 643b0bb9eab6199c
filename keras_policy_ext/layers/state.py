"""The group of a float8 layer in a file: what it says of the layer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_policy_ext import contractions
from keras_policy_ext._keras import built_layers
from keras_policy_ext.files import entries
from keras_policy_ext.files.saved_layers import SavedState, state_for_file
from keras_policy_ext.layers.state_of import StateOf, new_states
from keras_policy_ext.recipes import Recipe


def _no_layer() -> None:
    """Return None, as a weak reference to a deleted layer does."""


_Take = Callable[[Mapping[str, np.ndarray]], None]
"""A function that gets the entries of a state in a file."""


class LastCall:
    """The plan of the last contraction that a layer computed; None before it.

    Apart, since setting attributes of a layer breaks torch.compile's graph.
    """

    plan: contractions.Plan | contractions.FrozenPlan | None = None


class Float8State(keras.layers.Layer):
    """A sublayer that has a group in files, for what they say of a layer.

    It also holds the states of its kernels, if the recipe remembers something.

    Args:
        trainable: Whether that layer is trainable. Keras passes the attribute
            on to existing sublayers only, not to later ones.
    """

    def __init__(self, trainable: bool = True):
        """Make an empty state, whose group in files is `entries.GROUP`."""
        super().__init__(
            name=entries.GROUP, trainable=trainable, dtype="float32"
        )
        # The states of the kernels; None if no recipe has asked for one.
        self.states: StateOf | None = None
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
        built_layers.register_parameters(self)

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
        """Make the state of a kernel, if the recipe remembers something.

        `bank_axis` is that of `Float8Mixin.float8_bank_axis`.

        Raises:
            ValueError: If there is already a kernel with this path.
        """
        if not recipe.remembers:
            return
        if self.states is None:
            self.states = new_states(self, recipe)
        self.states.build(kernel, recipe, bank_axis)

    def of(self, kernel: keras.Variable) -> Any:
        """Return the state variable of a kernel; None if it has none."""
        return None if self.states is None else self.states.of(kernel)

    def owner(self) -> Any:
        """Return the layer that this is in; None without one."""
        # No property: Keras saves the layers that properties return.
        return self._layer()

    @property
    def matrices(self) -> list[Any]:
        """The state variables of this layer, in the order of creation."""
        return [] if self.states is None else self.states.variables

    def fits(self, recipe: Recipe) -> bool:
        """Return True if the states are also those of another recipe."""
        return self.states is None or self.states.fits(recipe)

    def save_own_variables(self, store: Any) -> None:
        """Save the layer's strings, scales and amax histories."""
        layer = self._layer()
        texts = {} if layer is None else layer.texts_for_file()
        memory: dict[str, np.ndarray] = {}
        if self.states is not None:
            # Files then hold another kernel, the one with adapters merged in:
            # what was observed of this one is not written.
            merged = layer is not None and layer.merges_adapters
            memory = self.states.entries(merged)
        for key, value in state_for_file(texts, memory).items():
            store[key] = value

    @property
    def _path_in_messages(self) -> str:
        """The path of this state in messages; Keras gives it none."""
        if self.matrices:
            return str(self.matrices[0].path.rpartition("/")[0])
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
        if self._take is not None:  # Someone only looks at the entries.
            self._take(saved.store)
            return
        layer_loaded, self._layer_loaded = self._layer_loaded, None
        if layer_loaded is False:
            # Keras looks for an object that failed in other places of the
            # file. That it finds nothing there must not hide the error.
            if self._failure is not None:
                raise self._failure
            return
        if self._loaded_with_layer and not saved.store:
            return  # See `load_with_layer`.
        self.policy_in_file = saved.store.get(entries.POLICY)
        assign = None
        try:
            if self.states is not None:
                assign = self.states.load(saved)
            self.given = saved.text(entries.GIVEN) or self.given
        except ValueError as error:
            self._failure = error
            raise
        self._failure = None
        if assign is not None:
            assign()

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
        """Load the entries that were among the layer's own weights, if any."""
        # Such a file has no group for this sublayer. The empty group that
        # Keras's loader passes afterwards leaves the state unchanged.
        if arrays:
            self.load_own_variables(arrays)
        self._loaded_with_layer = True
