"""The float8 state of a layer: a sub-layer that holds sum-safe matrices.

In a file it is a group of its own beside the weights of the layer, which
stock layers don't look at. For the kernel that was made as number `i`:

| key | shape | value |
|---|---|---|
| `format_version` | () | 1; once in the group |
| `i.<operand>.scale` | () | last scale used, 0 if none |
| `i.<operand>.amax_history` | (length,) | the ring of amaxes |

The ring is that of `numerics.observations`. Kernels have numbers and not
names, as weights have in Keras: a weight that was not given a name is called
differently in each model.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _keras_compat, kernels
from keras_policy_ext.numerics.observations import SLOTS
from keras_policy_ext.numerics.rules import rule_of
from keras_policy_ext.recipes import OPERANDS, Recipe

FORMAT_VERSION = 1
"""Of the entries in a file; one more when older readers would misread it."""

VERSION_KEY = "format_version"

SUFFIX = "_amax"
"""Ends the name of a state variable: a LayoutMap for kernels won't match."""


def _unobserved(shape: tuple[int, ...], dtype: Any = None) -> Any:
    """The settled state of what was never observed."""
    return ops.concatenate(
        [
            -ops.ones((shape[0], 1), dtype),
            ops.zeros((shape[0], shape[1] - 1), dtype),
        ],
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

    def assign(self, value: Any) -> Any:
        """Settle `value`, an observation or a state, and store the result.

        Raises:
            ValueError: If `value` is a NumPy array, as in `set_weights`, that
                is no observation and no state.
        """
        self.check(value)
        self.uses = 0
        value = self._convert_to_tensor(value, dtype=self.dtype)
        readable = _keras_compat.has_value(self)
        if readable and tuple(value.shape) == tuple(self.shape):
            engine = kernels.engine()
            value = engine.settle(self.recipe, value, self.value)
        return super().assign(value)

    def check(self, value: Any) -> None:
        """Raise if an array is no observation and no state.

        Raises:
            ValueError: If so; tensors are not looked at.
        """
        if isinstance(value, np.ndarray):
            _check_rows(self, value)

    @property
    def overwrite_with_gradient(self) -> bool:
        """Always true, to an optimizer that asks."""
        _keras_compat.spare_from_averaging(self)
        return True

    def next_slot(self) -> int:
        """Number the uses between two assignments, modulo `SLOTS`.

        More numbers would mean more plans, each compiled for itself.
        """
        slot = self.uses
        self.uses = (slot + 1) % SLOTS
        return slot


class Float8State(keras.layers.Layer):
    """Holds one matrix for each contraction kernel of the layer it is in."""

    def __init__(self, name: str = "float8_state"):
        super().__init__(name=name, dtype="float32")
        self._owners: dict[str, str] = {}
        # Whether files hold another kernel, the one with adapters merged in:
        # what was observed of this one is then not written.
        self.merged = False
        self._layer_loaded: bool | None = None
        self._failure: ValueError | None = None
        self.built = True

    def add(self, kernel: keras.Variable, recipe: Recipe) -> None:
        """Create the state of a kernel, where the recipe has state.

        Raises:
            ValueError: If there is a kernel of this path already.
        """
        if rule_of(recipe).state_shape is None:
            return
        if kernel.path in self._owners:
            raise ValueError(
                "Two float8 kernels of a layer must have different names, or "
                f"they would share one state. Received: {kernel.path!r} "
                "twice. Allowed: any other name. Pass `name=` to `add_weight`."
            )
        name = kernel.name + SUFFIX
        with keras.name_scope(self.name):
            setattr(self, name, StateVariable(recipe, name))
        self._owners[kernel.path] = name

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
        """Whether these matrices can be the state of a recipe."""
        shape = rule_of(recipe).state_shape
        return shape is None or all(
            tuple(variable.shape) == shape for variable in self.matrices
        )

    def follow(self, recipe: Recipe) -> None:
        """Go on under another recipe, one that `fits`."""
        if rule_of(recipe).state_shape is not None:
            for variable in self.matrices:
                variable.recipe = recipe

    def save_own_variables(self, store: Any) -> None:
        """Write the scale and the amax history of each operand."""
        if self.matrices:
            store[VERSION_KEY] = np.array(FORMAT_VERSION, "int32")
        for number, variable in enumerate(self.matrices):
            for key, value in _entries(number, variable).items():
                other_kernel = self.merged and ".kernel." in key
                store[key] = np.zeros_like(value) if other_kernel else value

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
        layer_loaded, self._layer_loaded = self._layer_loaded, None
        if layer_loaded is False:
            # Keras looks for an object that failed in other places of the
            # file; finding nothing there must not end the failure.
            if self._failure is not None:
                raise self._failure
            return
        try:
            matrices = _read(self.matrices, store)
        except ValueError as error:
            self._failure = error
            raise
        self._failure = None
        for variable, matrix in zip(self.matrices, matrices, strict=True):
            variable.assign(matrix)

    def layer_loads(self, store: Any) -> None:
        """Be told that the layer is about to load its weights."""
        self._layer_loaded = False
        if len(store.keys()):
            self._failure = None

    def layer_has_loaded(self) -> None:
        """Be told that the layer has loaded its weights."""
        self._layer_loaded = True


def _entries(number: int, variable: StateVariable) -> dict[str, np.ndarray]:
    layout = rule_of(variable.recipe).layout
    matrix = keras.ops.convert_to_numpy(variable.value)
    entries = {}
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        entries[f"{prefix}.scale"] = layout.scale(matrix)[row]
        entries[f"{prefix}.amax_history"] = layout.history(matrix)[row]
    return entries


def _read(variables: list[StateVariable], store: Any) -> list[np.ndarray]:
    """The matrices that a store means; those it lacks start anew."""
    keys = set(store.keys())
    if not keys or not variables:
        return [_anew(variable) for variable in variables]
    path = variables[0].path.rpartition("/")[0]
    if VERSION_KEY not in keys:
        raise ValueError(_damaged(path, f"it lacks {VERSION_KEY!r}"))
    version = np.asarray(store[VERSION_KEY])
    if version.shape or version.dtype.kind != "i" or version < 1:
        raise ValueError(_damaged(path, f"{VERSION_KEY!r} is {version!r}"))
    if version > FORMAT_VERSION:
        raise ValueError(
            f"The float8 state of {path!r} was written by a newer version of "
            f"keras_policy_ext. Received: format {version}. Allowed: up to "
            f"{FORMAT_VERSION}. Update keras_policy_ext, or load the weights "
            "without float8 state: into the model with a plain policy."
        )
    return [
        _matrix(number, variable, store, keys, path)
        for number, variable in enumerate(variables)
    ]


def _anew(variable: StateVariable) -> np.ndarray:
    matrix = np.zeros(tuple(variable.shape), "float32")
    matrix[:, 0] = -1.0
    return matrix


def _matrix(
    number: int,
    variable: StateVariable,
    store: Any,
    keys: set[str],
    path: str,
) -> np.ndarray:
    layout = rule_of(variable.recipe).layout
    matrix = _anew(variable)
    names = [
        f"{n}.{kind}" for n in OPERANDS for kind in ("scale", "amax_history")
    ]
    wanted = {f"{number}.{name}" for name in names}
    if keys.isdisjoint(wanted):
        return matrix
    if not wanted <= keys:
        lacking = ", ".join(sorted(wanted - keys))
        raise ValueError(_damaged(path, f"it lacks {lacking}"))
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        history = _entry(store, f"{prefix}.amax_history", 1, path)
        layout.scale(matrix)[row] = _entry(store, f"{prefix}.scale", 0, path)
        layout.history(matrix)[row] = _resized(history, layout.length)
    return matrix


def _entry(store: Any, key: str, rank: int, path: str) -> np.ndarray:
    value = np.asarray(store[key])
    if value.ndim != rank or not value.size or value.dtype.kind != "f":
        found = f"{key!r} is {value.dtype} of shape {value.shape}"
        raise ValueError(_damaged(path, found))
    with np.errstate(over="ignore"):
        value = value.astype("float32")
    if not _is_amax(value):
        raise ValueError(_damaged(path, f"{key!r} is {value}"))
    return value


def _is_amax(values: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(values)) and np.all(values >= 0))


def _damaged(path: str, found: str) -> str:
    keys = "i.<operand>.scale and i.<operand>.amax_history"
    return (
        f"The float8 state of {path!r} in this file is damaged; the layer's "
        f"state was not changed. Received: {found}. Allowed: {VERSION_KEY!r} "
        f"and, for each kernel i and each of {', '.join(OPERANDS)}, a float "
        f"scalar and a float vector ({keys}), finite and >= 0. Save the "
        "model again, or delete the group from the file: the state then "
        "starts anew."
    )


def _check_rows(variable: StateVariable, value: np.ndarray) -> None:
    """Raise if this array is no observation and no state."""
    if value.shape != tuple(variable.shape):
        return  # Keras says so.
    uses = value[:, 0]
    # Not the slots: another optimizer than Keras's may have moved them.
    settled = value[uses < 0][:, 1 + SLOTS :]
    if np.any(np.isnan(uses)) or not _is_amax(settled):
        raise ValueError(
            f"This array is no float8 state of {variable.path!r}. Received: "
            f"{value!r}. Allowed: rows of -1 followed by finite numbers >= 0, "
            "as `get_weights` returns them. Leave the variable as it is, or "
            "load the model from a file."
        )


def _resized(ring: np.ndarray, length: int) -> np.ndarray:
    """A history cut or padded with zeros, the newest entries kept.

    In the ring index 0 is the newest and the last index the one before it.
    """
    aged = np.concatenate([ring[:1], ring[:0:-1]])[:length]
    aged = np.pad(aged, (0, length - len(aged)))
    return np.concatenate([aged[:1], aged[:0:-1]])
