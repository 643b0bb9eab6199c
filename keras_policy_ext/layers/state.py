"""The float8 state of a layer: a sub-layer that holds sum-safe matrices."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, contractions
from keras_policy_ext._keras import built_layers, variable_values
from keras_policy_ext.layers.paths import scope_of_path
from keras_policy_ext.layers.state_files import (
    FORMAT_VERSION,
    GIVEN_KEY,
    POLICY_KEY,
    VERSION_KEY,
    earlier_for_file,
    earlier_key,
    earlier_of_file,
    entries_for_file,
    entries_of,
    matrices_from,
    text_in,
)
from keras_policy_ext.layers.state_variable import (
    STEPS_SUFFIX,
    SUFFIX,
    StateVariable,
)
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import Recipe


def _no_layer() -> None:
    """A reference to nothing."""


_Take = Callable[[dict[str, np.ndarray]], None]


def has_state(recipe: Recipe) -> bool:
    """Return True if a kernel has a state under a recipe."""
    return source_of(recipe).state_shape is not None


class LastCall:
    """The plan of the last contraction of a layer.

    An object of its own: torch.compile stops where a call changes the
    attributes of a layer.

    Attributes:
        plan: Its plan; None before the first one.
    """

    plan: contractions.Plan | contractions.FrozenPlan | None = None


class Float8State(keras.layers.Layer):
    """Holds one matrix for each contraction kernel of the layer it is in.

    Args:
        trainable: Whether that layer is. Keras sets it on sub-layers when it
            is set on a layer, but not on a sub-layer that comes later.
    """

    def __init__(self, trainable: bool = True):
        super().__init__(
            name="float8_state", trainable=trainable, dtype="float32"
        )
        self._owners: dict[str, str] = {}
        self.last_call = LastCall()
        # The layer that this is in, which files get to know more of.
        self._layer: Callable[[], Any] = _no_layer
        # The full name of the policy that `convert` was given for the layer;
        # None for a layer that was made under its policy.
        self.given: str | None = None
        # The policy that the file last read had: `load_model` looks at it.
        self.policy_in_file: np.ndarray | None = None
        self._take: _Take | None = None
        self._layer_loaded: bool | None = None
        self._stock_loaded = False
        self._failure: ValueError | None = None
        self.built = True

    def belong_to(self, layer: Any) -> None:
        """Let files say what a layer tells of itself.

        Asked when this is saved, since a layer may save its weights itself.

        Args:
            layer: One with `texts_for_file` and `merges_adapters`.
        """
        self._layer = weakref.ref(layer)

    def add(self, kernel: keras.Variable, recipe: Recipe) -> None:
        """Create the state of a kernel, where the recipe has state.

        Raises:
            ValueError: If there is a kernel of this path already.
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
        # Beside the kernel, wherever this is called. So the paths of states
        # are as distinct as those of their kernels, which PyTorch needs: it
        # keeps parameters by path.
        beside = scope_of_path(kernel.path.rpartition("/")[0])
        with beside, keras.name_scope(self.name):
            variable = StateVariable(recipe, kernel, name)
            # Tracked while it is trainable, so that Keras counts it among the
            # trainable variables whenever the layer becomes trainable.
            setattr(self, name, variable)
        variable.trainable = self.trainable
        self._owners[kernel.path] = name
        built_layers.track_again([self])

    def observe(self, kernels: list[keras.Variable]) -> None:
        """Enter the amax of each kernel that has a state."""
        for kernel in kernels:
            variable = self.of(kernel)
            if variable is not None and variable.observes_amaxes:
                variable.observe("kernel", self.amax(kernel))

    def amax(self, kernel: keras.Variable) -> np.float32:
        """The amax of a kernel, as it is now."""
        value = variable_values.value_without_autocast(kernel)
        return np.float32(ops.convert_to_numpy(scaling.amax(value)))

    def of(self, kernel: Any) -> StateVariable | None:
        """The state of a kernel, None where it has none."""
        name = self._owners.get(getattr(kernel, "path", ""))
        return None if name is None else getattr(self, name)

    @property
    def owners(self) -> list[str]:
        """Paths of the kernels that have a state here."""
        return list(self._owners)

    @property
    def matrices(self) -> list[StateVariable]:
        """All state variables, in the order of creation."""
        return [getattr(self, name) for name in self._owners.values()]

    def fits(self, recipe: Recipe) -> bool:
        """Return True if these matrices can be the state of a recipe."""
        shape = source_of(recipe).state_shape
        return shape is None or all(
            tuple(variable.shape) == shape for variable in self.matrices
        )

    def follow(self, recipe: Recipe) -> None:
        """Go on under another recipe, one that `fits`."""
        if has_state(recipe):
            for variable in self.matrices:
                variable.recipe = recipe

    def save_own_variables(self, store: Any) -> None:
        """Write the texts, and scale and amax history of each operand."""
        layer = self._layer()
        texts = {} if layer is None else layer.texts_for_file()
        # Files then hold another kernel, the one with adapters merged in:
        # what was observed of this one is not written.
        merged = layer is not None and layer.merges_adapters
        if self.matrices or texts:
            store[VERSION_KEY] = np.array(FORMAT_VERSION, "int32")
        for key, text in texts.items():
            store[key] = np.frombuffer(text.encode(), "uint8")
        for number, variable in enumerate(self.matrices):
            for key, value in entries_for_file(number, variable).items():
                other_kernel = merged and ".kernel." in key
                store[key] = np.zeros_like(value) if other_kernel else value
            earlier = backends.current().earlier_observation(variable)
            if earlier is not None:
                store[earlier_key(number)] = earlier_for_file(earlier)

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote, as far as it is there.

        A state that is not in the file starts anew. A history of another
        length is cut or padded with zeros; the newest entries are kept. All
        matrices are assigned or, on an error, none. Where the layer's own
        weights were not loaded, its state stays as it was.

        Raises:
            ValueError: If the entries are incomplete, of wrong shapes or
                values, or written by a newer version of this package.
        """
        if self._take is not None:
            self._take(entries_of(store))
            return
        layer_loaded, self._layer_loaded = self._layer_loaded, None
        if layer_loaded is False:
            # Keras looks for an object that failed in other places of the
            # file; finding nothing there must not end the failure.
            if self._failure is not None:
                raise self._failure
            return
        entries = entries_of(store)
        if self._stock_loaded and not entries:
            return
        self.policy_in_file = entries.get(POLICY_KEY)
        try:
            matrices = matrices_from(self.matrices, entries)
            self.given = text_in(entries, GIVEN_KEY, self.path) or self.given
        except ValueError as error:
            self._failure = error
            raise
        self._failure = None
        self._assign(matrices, entries)

    @contextlib.contextmanager
    def capture_entries(self, take: _Take) -> Iterator[None]:
        """Hand on what a file has for this state, instead of reading it.

        Args:
            take: Called with the entries.
        """
        self._take = take
        try:
            yield
        finally:
            self._take = self._layer_loaded = None
            self._stock_loaded = False

    def _assign(
        self, matrices: list[np.ndarray], entries: dict[str, np.ndarray]
    ) -> None:
        pairs = zip(self.matrices, matrices, strict=True)
        for number, (variable, matrix) in enumerate(pairs):
            variable.enter(matrix)
            earlier = entries.get(earlier_key(number))
            # A state of another history length has another shape.
            if earlier is not None and earlier.shape == matrix.shape:
                earlier = earlier_of_file(earlier)
                framework = backends.current()
                framework.put_earlier_observation(variable, earlier)

    def layer_loads(self, store: Any) -> None:
        """The layer calls this before it loads its weights."""
        self._layer_loaded = False
        self._stock_loaded = False
        if len(store.keys()):
            self._failure = None

    def layer_has_loaded(self) -> None:
        """The layer calls this once it has loaded its weights."""
        self._layer_loaded = True

    def load_stock(self, entries: dict[str, np.ndarray]) -> None:
        """Read the state that Keras's own float8 keeps among the weights.

        Such a file has no group for this sub-layer: what Keras's loader finds
        for it afterwards, nothing, leaves the state as it then is.

        Args:
            entries: From `stock_state.checked`; none to leave the state.
        """
        if entries:
            version = np.array(FORMAT_VERSION, "int32")
            self.load_own_variables({VERSION_KEY: version, **entries})
        self._stock_loaded = True
