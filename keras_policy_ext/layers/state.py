"""The float8 state of a layer: a sublayer with one variable per kernel."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _input_files, backends, contractions
from keras_policy_ext._keras import built_layers, variable_values
from keras_policy_ext.layers.paths import scope_of_path
from keras_policy_ext.layers.state_variable import (
    STEPS_SUFFIX,
    SUFFIX,
    StateVariable,
    is_amax,
    newest_first,
)
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.observations import (
    MOST_STEPS,
    ROUNDING,
    UNIT,
    UNSEEN,
    VALID_MARK,
)
from keras_policy_ext.numerics.scale_sources import source_of, state_source_of
from keras_policy_ext.recipes import OPERANDS, Recipe

FORMAT_VERSION = 1
"""The version of the entries; increased if older readers would misread them."""


VERSION_KEY = "format_version"

POLICY_KEY = "policy"

GIVEN_KEY = "given"

ATTENTION_KEY = "attention"

STEPS = "steps"


def entries_for_file(
    number: int, variable: StateVariable
) -> dict[str, np.ndarray]:
    """Return a kernel's state as the named arrays that a file stores."""
    layout = variable.rows_layout
    matrix = variable.trusted()
    if not variable.observes_amaxes:
        steps = layout.history(matrix)[0, 0].astype("int32")
        return {f"{number}.{STEPS}": steps}
    entries = {}
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        entries[f"{prefix}.scale"] = layout.scale(matrix)[row]
        entries[f"{prefix}.amax_history"] = layout.history(matrix)[row]
        if matrix[row, 0] != _looks(matrix[row]):
            entries[f"{prefix}.observed"] = matrix[row, 0] - UNSEEN
    return entries


def entries_of(store: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Read all arrays that a file has for a layer's state, by name."""
    return {
        key: _input_files.array_in("float8_state", store[key])
        for key in sorted(store.keys())
    }


def text_in(entries: dict[str, np.ndarray], key: str, path: str) -> str:
    """Return a string that a file stores about a layer; "" if it has none.

    Args:
        entries: The entries of the file for the state of the layer.
        key: `POLICY_KEY`, `GIVEN_KEY` or `ATTENTION_KEY`.
        path: The path of the state, for messages.

    Raises:
        ValueError: If the entry is not text, or the file has a newer format.
    """
    if key not in entries:
        return ""
    _check_version(entries, path)
    value = entries[key]
    if value.ndim == 1 and value.dtype == "uint8" and value.size:
        with contextlib.suppress(UnicodeDecodeError):
            return value.tobytes().decode()
    found = f"{key!r} is {value.dtype} of shape {value.shape}"
    raise ValueError(_damaged(path, found))


def matrices_in(
    entries: dict[str, np.ndarray], recipe: Recipe, count: int, path: str
) -> list[np.ndarray]:
    """Convert a file's named arrays to states, one per kernel of a layer.

    Args:
        entries: The entries of the file for the state of the layer.
        recipe: The recipe that the layer follows or is going to follow.
        count: The number of kernels.
        path: The path of the state, for messages.

    Returns:
        One settled matrix per kernel; none if the recipe has no state. Missing
        entries start anew.

    Raises:
        ValueError: If the entries are incomplete, of wrong shapes or values,
            or written by a newer version of this package.
    """
    if source_of(recipe).state_shape is None or not count:
        return []
    if not entries:
        layout = state_source_of(recipe).layout
        return [layout.never_observed() for _ in range(count)]
    _check_version(entries, path)
    return [_matrix(i, recipe, entries, path) for i in range(count)]


def matrices_from(
    variables: list[StateVariable], entries: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """Convert a file's named arrays to a state for each variable.

    An unobserved state replaces a missing one.
    """
    if not variables:
        return []
    path = variables[0].path.rpartition("/")[0]
    return matrices_in(entries, variables[0].recipe, len(variables), path)


def _check_version(entries: dict[str, np.ndarray], path: str) -> None:
    if VERSION_KEY not in entries:
        raise ValueError(_damaged(path, f"it lacks {VERSION_KEY!r}"))
    version = entries[VERSION_KEY]
    if version.shape or version.dtype.kind != "i" or version < 1:
        raise ValueError(_damaged(path, f"{VERSION_KEY!r} is {version!r}"))
    if version > FORMAT_VERSION:
        raise ValueError(
            f"The float8 state of {path!r} was written by a newer version of "
            f"keras_policy_ext. Received: format {version}. Allowed: up to "
            f"{FORMAT_VERSION}. Update keras_policy_ext, or load the weights "
            "without float8 state: into the model with a plain policy."
        )


def _matrix(
    number: int, recipe: Recipe, entries: dict[str, np.ndarray], path: str
) -> np.ndarray:
    source = state_source_of(recipe)
    matrix = source.layout.never_observed()
    if not source.observes_amaxes:
        steps = _steps_in(number, entries, path)
        source.layout.history(matrix)[0, 0] = steps
        return matrix
    names = [
        f"{n}.{kind}" for n in OPERANDS for kind in ("scale", "amax_history")
    ]
    wanted = {f"{number}.{name}" for name in names}
    if wanted.isdisjoint(entries):
        return matrix
    if not wanted <= entries.keys():
        lacking = ", ".join(sorted(wanted - entries.keys()))
        raise ValueError(_damaged(path, f"it lacks {lacking}"))
    _check_earlier(number, entries, path)
    layout, damaged = source.layout, functools.partial(_damaged, path)
    scales, histories = layout.scale(matrix), layout.history(matrix)
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        ring = amaxes_in(entries, f"{prefix}.amax_history", damaged)
        scales[row] = amaxes_in(entries, f"{prefix}.scale", damaged)
        histories[row] = _resized(ring, layout.length)
        matrix[row, 0] = _looks(matrix[row])
        if f"{prefix}.observed" in entries:
            matrix[row, 0] = UNSEEN + _part_in(entries, prefix, damaged)
    return matrix


def _looks(row: np.ndarray) -> float:
    """Return -1 for an observed row of a state, -2 for an unobserved one."""
    return VALID_MARK if row[1:].any() else UNSEEN


def _part_in(
    entries: Mapping[str, np.ndarray],
    prefix: str,
    damaged: Callable[[str], str],
) -> np.ndarray:
    """Return the fraction (0 to 1) of an averaged row that was observed."""
    key = f"{prefix}.observed"
    part = entries[key]
    is_part = not part.shape and part.dtype.kind == "f"
    if not is_part or not abs(part - 0.5) <= 0.5 + ROUNDING:
        raise ValueError(damaged(f"{key!r} is {part!r}"))
    return part.astype("float32")


def _steps_in(
    number: int, entries: dict[str, np.ndarray], path: str
) -> np.ndarray:
    """Return the count of steps that a file has; 0 if it has none."""
    key = f"{number}.{STEPS}"
    steps = entries.get(key, np.array(0, "int32"))
    is_count = not steps.shape and steps.dtype.kind in "iu"
    if not is_count or not 0 <= steps < MOST_STEPS:
        raise ValueError(_damaged(path, f"{key!r} is {steps!r}"))
    _check_earlier(number, entries, path)
    return steps


def amaxes_in(
    entries: Mapping[str, np.ndarray], key: str, damaged: Callable[[str], str]
) -> np.ndarray:
    """Return a scale or an amax history from a file, in float32.

    Raises:
        ValueError: If the entry is malformed; `damaged` makes the message.
    """
    value = entries[key]
    rank = 1 if key.endswith("amax_history") else 0
    if value.ndim != rank or not value.size or value.dtype.kind != "f":
        found = f"{key!r} is {value.dtype} of shape {value.shape}"
        raise ValueError(damaged(found))
    with np.errstate(over="ignore"):
        value = value.astype("float32")
    if not is_amax(value):
        raise ValueError(damaged(f"{key!r} is {value}"))
    return value


def earlier_key(number: int) -> str:
    """Return the name under which a kernel's pending observation is saved."""
    return f"{number}.observed"


def earlier_for_file(observation: Any) -> np.ndarray:
    """Convert an observation to a file's units: divide it by `UNIT`.

    NaN becomes infinity.
    """
    array = ops.convert_to_numpy(observation) / np.float32(UNIT)
    return np.nan_to_num(array, nan=np.inf, posinf=np.inf)


def earlier_of_file(array: np.ndarray) -> np.ndarray:
    """Convert an array of `earlier_for_file` back to an observation."""
    return array * np.float32(UNIT)


def _check_earlier(
    number: int, entries: dict[str, np.ndarray], path: str
) -> None:
    key = earlier_key(number)
    if key not in entries:
        return
    value = entries[key]
    shaped = value.ndim == 2 and value.dtype == "float32"
    if not shaped or not np.all(value >= 0):
        found = f"{key!r} is {value.dtype} of shape {value.shape}: {value}"
        raise ValueError(_damaged(path, found))


def _damaged(path: str, found: str) -> str:
    keys = "i.<operand>.scale and i.<operand>.amax_history"
    return (
        f"The float8 state of {path!r} in this file is damaged; the layer's "
        f"state was not changed. Received: {found}. Allowed: {VERSION_KEY!r}, "
        f"{POLICY_KEY!r} and {ATTENTION_KEY!r} (UTF-8, may be missing), and, "
        f"for each kernel i and each of {', '.join(OPERANDS)}, a float scalar "
        f"and a float vector ({keys}), finite and >= 0, and maybe a float from "
        f"0 to 1 (i.<operand>.observed), or an integer (i.{STEPS}), from 0 to "
        f"{MOST_STEPS - 1:.0f}. Save the model again, or delete the group from "
        "the file; the layer then begins with an empty state."
    )


def _resized(ring: np.ndarray, length: int) -> np.ndarray:
    """Crop an amax history, or pad it with zeros; keep the newest.

    In the ring index 0 is the newest, and the last index the second newest.
    """
    aged = newest_first(ring)[:length]
    aged = np.pad(aged, (0, length - len(aged)))
    return np.concatenate([aged[:1], aged[:0:-1]])


def _no_layer() -> None:
    """Return None, as a weak reference to a deleted layer does."""


_Take = Callable[[dict[str, np.ndarray]], None]


def has_state(recipe: Recipe) -> bool:
    """Return True if kernels have a state under this recipe."""
    return source_of(recipe).state_shape is not None


class LastCall:
    """The plan of the last contraction that a layer computed.

    It is a separate object, since torch.compile breaks the graph if a call
    sets attributes of a layer.

    Attributes:
        plan: Its plan; None before the first one.
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

    def belong_to(self, layer: keras.Layer) -> None:
        """Set the layer of this state, whose policy names files store with it.

        The texts are saved here, since a layer may override how it saves its
        weights.

        Args:
            layer: A layer with `texts_for_file` and `merges_adapters`.
        """
        self._layer = weakref.ref(layer)

    def add(self, kernel: keras.Variable, recipe: Recipe) -> None:
        """Create the state variable of a kernel, if the recipe has state.

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
        """Enter the current amaxes of kernels into their state variables."""
        for kernel in kernels:
            variable = self.of(kernel)
            if variable is not None and variable.observes_amaxes:
                variable.observe("kernel", self.amax(kernel))

    def amax(self, kernel: keras.Variable) -> np.float32:
        """Return the amax of a kernel's current value, on the host."""
        value = variable_values.value_without_autocast(kernel)
        return np.float32(ops.convert_to_numpy(scaling.amax(value)))

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
        shape = source_of(recipe).state_shape
        return shape is None or all(
            tuple(variable.shape) == shape for variable in self.matrices
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
        if self.matrices or texts:
            store[VERSION_KEY] = np.array(FORMAT_VERSION, "int32")
        for key, text in texts.items():
            store[key] = np.frombuffer(text.encode(), "uint8")
        for number, variable in enumerate(self.matrices):
            for key, value in entries_for_file(number, variable).items():
                other_kernel = merged and ".kernel." in key
                store[key] = np.zeros_like(value) if other_kernel else value
            earlier = backends.current.earlier_observation(variable)
            if earlier is not None:
                store[earlier_key(number)] = earlier_for_file(earlier)

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
        """In the block, pass loaded arrays to `take` instead of assigning them.

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
                framework = backends.current
                framework.put_earlier_observation(variable, earlier)

    def layer_loads(self, store: Any) -> None:
        """Record that the layer is about to load its own weights."""
        self._layer_loaded = False
        self._stock_loaded = False
        if len(store.keys()):
            self._failure = None

    def layer_has_loaded(self) -> None:
        """Record that the layer has loaded its own weights."""
        self._layer_loaded = True

    def load_stock(self, entries: dict[str, np.ndarray]) -> None:
        """Load the scales and histories that a file of Keras's float8 has.

        Such a file has no group for this sublayer. The empty group that
        Keras's loader passes afterwards leaves the state unchanged.

        Args:
            entries: From `stock_state.checked`; empty to leave the state
                unchanged.
        """
        if entries:
            version = np.array(FORMAT_VERSION, "int32")
            self.load_own_variables({VERSION_KEY: version, **entries})
        self._stock_loaded = True
