"""The float8 state of a layer: a sub-layer that holds sum-safe matrices.

In a file it is a group of its own beside the weights of the layer, which
stock layers don't look at. For the kernel that was made as number `i`:

| key | shape | value |
|---|---|---|
| `format_version` | () | 1; once in the group |
| `policy` | (bytes,) | the policy that the layer has; once in the group |
| `attention` | (bytes,) | what an attention layer has for that, if anything |
| `i.<operand>.scale` | () | last scale used, 0 if none |
| `i.<operand>.amax_history` | (length,) | the ring of amaxes |
| `i.observed` | as in memory | of micro-batches before the next step, if any |

The ring is that of `numerics.observations`. `policy` is a full name in UTF-8:
by it `load_model` knows a layer again that was made as a stock one. Kernels
have numbers and not names, as weights have in Keras: a weight that was not
given a name is called differently in each model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import _user_code, frameworks
from keras_policy_ext._keras import averages, variable_values
from keras_policy_ext.layers.paths import scope_of_path
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.observations import (
    ROUNDING,
    SEALED,
    SLOTS,
)
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import OPERANDS, Recipe

FORMAT_VERSION = 1
"""Of the entries in a file; one more when older readers would misread it."""

VERSION_KEY = "format_version"

POLICY_KEY = "policy"

ATTENTION_KEY = "attention"

_MOVED = (
    "The float8 state of a layer was changed as if it were a weight. It is not "
    "used: scales come from the amax of each tensor until amaxes are observed "
    "anew. Received: a step of an optimizer that is neither Keras's nor of "
    "torch.optim, or a value that was computed from another variable. Allowed: "
    "observations, states, and averages of states. For an optimizer, or to "
    "pair the weights of two models, leave out those for which "
    "`keras_policy_ext.loops.is_state` is True, as `loops.weights(model)` "
    "does; `keras_policy_ext.inspect(model)` shows them."
)

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


def _on_every_device() -> dict[str, Any]:
    """The layout of a state on JAX: whole, whatever a LayoutMap matches.

    Keras 3.12 searches a path for a pattern, so that the one of a kernel
    finds the state of that kernel; other patterns name whole layers.
    """
    distribution = keras.distribution.distribution()
    if keras.backend.backend() != "jax" or distribution is None:
        return {}
    mesh = distribution.device_mesh
    return {"layout": keras.distribution.TensorLayout((None, None), mesh)}


class StateVariable(
    averages.NotAveraged, variable_values.TellsItsValue, keras.Variable
):
    """A variable that Keras overwrites with its "gradient".

    Assigning is where an observation becomes state: see
    `numerics.observations`. Zeros, which JAX hands out as the gradient of
    what was not used, leave it as it was.

    Attributes:
        recipe: What the state is kept for.
        kernel: The contracted weight.
        uses: How often the kernel was used since the last assignment.
        observed: What was observed since then, where a framework keeps it
            with the variable.
    """

    observed: Any = None
    _looked_at: Any = None
    _said = False

    def __init__(self, recipe: Recipe, kernel: keras.Variable, name: str):
        self.recipe = recipe
        self.kernel = kernel
        self.uses = 0
        super().__init__(
            initializer=_unobserved,
            shape=source_of(recipe).state_shape,
            dtype="float32",
            autocast=False,
            aggregation="only_first_replica",
            name=name,
            **_on_every_device(),
        )

    def value_made(self, value: Any) -> None:
        """Keep observations with this variable, whose tensor is made."""
        frameworks.current().keep_observations(self, value)

    def assign(self, value: Any) -> Any:
        """Settle `value`, an observation or a state, and store the result.

        Raises:
            ValueError: If `value` has another shape, or is a NumPy array, as
                in `set_weights`, that is no observation and no state.
        """
        self._check_shape(value)
        self.check(value)
        settled = _is_settled(value)
        if settled:
            value = _sealed(value)
            if self.observed is not None:
                self.observed.taken()  # It was observed of another state.
        self.uses = 0
        value = ops.convert_to_tensor(value, dtype=self.dtype)
        readable = not settled and variable_values.has_value(self)
        if readable and tuple(value.shape) == tuple(self.shape):
            value = frameworks.current().assigned(
                self, value, source_of(self.recipe).settle
            )
        assigned = super().assign(value)
        if readable or settled:
            self.look()
        return assigned

    def matrix(self) -> Any:
        """The tensor in this variable.

        Raises:
            ValueError: If a module of PyTorch has cast it, as
                `model.to(torch.bfloat16)` does.
        """
        value = variable_values.value_without_autocast(self)
        dtype = keras.backend.standardize_dtype(value.dtype)
        if dtype != self.dtype:
            raise ValueError(_cast(self.path, dtype))
        return value

    def look(self) -> None:
        """Warn, once, if this state was moved and can be read at no cost."""
        value = frameworks.current().known_value(self)
        if value is None or value is self._looked_at:
            return
        # On JAX each assignment brings another array.
        self._looked_at = None if isinstance(value, np.ndarray) else value
        self.trusted(np.asarray(value))

    def trusted(self, matrix: np.ndarray | None = None) -> np.ndarray:
        """The state, with rows as if never observed that were moved.

        Warns of them, once until they are mended.

        Args:
            matrix: What the variable holds, where that is known.

        Returns:
            A copy.
        """
        if matrix is None:
            matrix = ops.convert_to_numpy(self.matrix())
        matrix = np.array(matrix)
        moved = ~(np.abs(matrix[:, 0] - SEALED) <= ROUNDING)
        if moved.any() and not self._said:
            warnings.warn(_MOVED, stacklevel=_user_code.stacklevel())
        self._said = bool(moved.any())
        matrix[moved] = _empty(matrix.shape)[moved]
        return matrix

    def observe(self, operand: str, amax: Any) -> None:
        """Enter the amax of one operand, and leave the others as they are.

        Args:
            operand: One of `recipes.OPERANDS`.
            amax: Float32 scalar.
        """
        amax = np.float32(ops.convert_to_numpy(amax))
        row = OPERANDS.index(operand)
        matrix = np.array(ops.convert_to_numpy(self.value))
        layout = source_of(self.recipe).layout
        fresh = not (
            layout.scale(matrix)[row] or layout.history(matrix)[row].any()
        )
        if fresh and np.isfinite(amax):
            # What settling comes to, without its thirty operations.
            layout.history(matrix)[row, 0] = amax
        else:
            matrix[row] = 0.0
            matrix[row, :2] = 1.0, amax
        self.assign(matrix)

    def rows(self) -> dict[str, tuple[np.float32, np.ndarray]]:
        """For each operand its last scale and its amaxes, newest first.

        The scale is 0 where none came from a history yet, and the amaxes are
        0 as far as nothing was observed.
        """
        layout = source_of(self.recipe).layout
        matrix = self.trusted()
        return {
            operand: (scale, _aged(ring))
            for operand, scale, ring in zip(
                OPERANDS,
                layout.scale(matrix),
                layout.history(matrix),
                strict=True,
            )
        }

    def has_seen(self, operand: str) -> bool:
        """Whether an amax of an operand was ever entered."""
        scale, amaxes = self.rows()[operand]
        return bool(scale > 0 or np.any(amaxes > 0))

    def _check_shape(self, value: Any) -> None:
        shape = getattr(value, "shape", None)
        if shape is None or tuple(shape) == tuple(self.shape):
            return
        raise ValueError(
            f"This is no float8 state of {self.path!r}. Received: a value of "
            f"shape {tuple(shape)}. Allowed: {tuple(self.shape)}. "
            "Where the weights of two models are paired, one of them is in "
            "float8 and the other is not, or with another history length: "
            "pair those of `keras_policy_ext.loops.weights(model)`, which "
            "leave the state out."
        )

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
        return True

    def next_slot(self) -> int:
        """Number the uses between two assignments, modulo `SLOTS`.

        More numbers would mean more plans, each compiled for itself.
        """
        slot = self.uses
        self.uses = (slot + 1) % SLOTS
        return slot


_Take = Callable[[dict[str, np.ndarray]], None]


class Float8State(keras.layers.Layer):
    """Holds one matrix for each contraction kernel of the layer it is in.

    Args:
        trainable: Whether that layer is. Keras tells sub-layers when a layer
            is frozen, but not one that comes later.
    """

    def __init__(self, trainable: bool = True):
        super().__init__(
            name="float8_state", trainable=trainable, dtype="float32"
        )
        self._owners: dict[str, str] = {}
        # Whether files hold another kernel, the one with adapters merged in:
        # what was observed of this one is then not written.
        self.merged = False
        # What files get to know of the layer, by entry, and the policy that
        # the file last read had, which `load_model` looks at.
        self.texts: dict[str, str] = {}
        self.policy_in_file: np.ndarray | None = None
        self._take: _Take | None = None
        self._layer_loaded: bool | None = None
        self._stock_loaded = False
        self._failure: ValueError | None = None
        self.built = True

    def add(self, kernel: keras.Variable, recipe: Recipe) -> None:
        """Create the state of a kernel, where the recipe has state.

        Raises:
            ValueError: If there is a kernel of this path already.
        """
        if source_of(recipe).state_shape is None:
            return
        if kernel.path in self._owners:
            raise ValueError(
                "Two float8 kernels of a layer must have different names, or "
                f"they would share one state. Received: {kernel.path!r} "
                "twice. Allowed: any other name. Pass `name=` to `add_weight`."
            )
        name = kernel.name + SUFFIX
        # Beside the kernel, wherever this is called. So the paths of states
        # are as distinct as those of their kernels, which PyTorch needs: it
        # keeps parameters by path.
        beside = scope_of_path(kernel.path.rpartition("/")[0])
        with beside, keras.name_scope(self.name):
            variable = StateVariable(recipe, kernel, name)
            # Tracked while it is trainable, to follow the layer when that is
            # thawed.
            setattr(self, name, variable)
        variable.trainable = self.trainable
        self._owners[kernel.path] = name

    def observe(self, kernels: list[keras.Variable]) -> None:
        """Enter the amax of each kernel that has a state."""
        for kernel in kernels:
            variable = self.of(kernel)
            if variable is not None:
                value = variable_values.value_without_autocast(kernel)
                variable.observe("kernel", scaling.amax(value))

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
        shape = source_of(recipe).state_shape
        return shape is None or all(
            tuple(variable.shape) == shape for variable in self.matrices
        )

    def follow(self, recipe: Recipe) -> None:
        """Go on under another recipe, one that `fits`."""
        if source_of(recipe).state_shape is not None:
            for variable in self.matrices:
                variable.recipe = recipe

    def save_own_variables(self, store: Any) -> None:
        """Write the texts, and scale and amax history of each operand."""
        if self.matrices or self.texts:
            store[VERSION_KEY] = np.array(FORMAT_VERSION, "int32")
        for key, text in self.texts.items():
            store[key] = np.frombuffer(text.encode(), "uint8")
        for number, variable in enumerate(self.matrices):
            for key, value in _entries(number, variable).items():
                other_kernel = self.merged and ".kernel." in key
                store[key] = np.zeros_like(value) if other_kernel else value
            earlier = frameworks.current().earlier_observation(variable)
            if earlier is not None:
                store[_earlier(number)] = _readable(earlier)

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
            matrices = _read(self.matrices, entries)
        except ValueError as error:
            self._failure = error
            raise
        self._failure = None
        self._assign(matrices, entries)

    @contextlib.contextmanager
    def handing_on(self, take: _Take) -> Iterator[None]:
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
            variable.assign(matrix)
            earlier = entries.get(_earlier(number))
            # Of another history length it has another shape.
            if earlier is not None and earlier.shape == matrix.shape:
                framework = frameworks.current()
                framework.put_earlier_observation(variable, earlier)

    def layer_loads(self, store: Any) -> None:
        """Note that the layer is about to load its weights."""
        self._layer_loaded = False
        self._stock_loaded = False
        if len(store.keys()):
            self._failure = None

    def layer_has_loaded(self) -> None:
        """Note that the layer has loaded its weights."""
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


def _entries(number: int, variable: StateVariable) -> dict[str, np.ndarray]:
    layout = source_of(variable.recipe).layout
    matrix = variable.trusted()
    entries = {}
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        entries[f"{prefix}.scale"] = layout.scale(matrix)[row]
        entries[f"{prefix}.amax_history"] = layout.history(matrix)[row]
    return entries


def entries_of(store: Any) -> dict[str, np.ndarray]:
    """What is in the store of a layer, each entry read once."""
    return {key: np.asarray(store[key]) for key in sorted(store.keys())}


def text_in(entries: dict[str, np.ndarray], key: str, path: str) -> str:
    """What a file says of a layer, such as its policy's full name.

    Args:
        entries: What was in the file for the state of the layer.
        key: `POLICY_KEY` or `ATTENTION_KEY`.
        path: That of the state, for messages.

    Returns:
        The text; "" if there is no such entry.

    Raises:
        ValueError: If the entry is no text, or the file has a newer format.
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
    """The states that a file has for the kernels of a layer.

    Args:
        entries: What was in the file for the state of the layer.
        recipe: What the layer follows, or is going to.
        count: How many kernels it has.
        path: That of the state, for messages.

    Returns:
        A settled matrix for each kernel, none if the recipe has no state.
        What the file lacks starts anew.

    Raises:
        ValueError: If the entries are incomplete, of wrong shapes or values,
            or written by a newer version of this package.
    """
    shape = source_of(recipe).state_shape
    if shape is None or not count:
        return []
    if not entries:
        return [_empty(shape) for _ in range(count)]
    _check_version(entries, path)
    return [_matrix(i, recipe, entries, path) for i in range(count)]


def _read(
    variables: list[StateVariable], entries: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """The matrices that a file means; those it lacks start anew."""
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


def _anew(variable: StateVariable) -> np.ndarray:
    return _empty(tuple(variable.shape))


def _empty(shape: tuple[int, ...]) -> np.ndarray:
    matrix = np.zeros(shape, "float32")
    matrix[:, 0] = -1.0
    return matrix


def _matrix(
    number: int, recipe: Recipe, entries: dict[str, np.ndarray], path: str
) -> np.ndarray:
    source = source_of(recipe)
    matrix = _empty(source.state_shape)
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
    layout = source.layout
    scales, histories = layout.scale(matrix), layout.history(matrix)
    for row, operand in enumerate(OPERANDS):
        prefix = f"{number}.{operand}"
        ring = _entry(entries, f"{prefix}.amax_history", 1, path)
        scales[row] = _entry(entries, f"{prefix}.scale", 0, path)
        histories[row] = _resized(ring, source.layout.length)
    return matrix


def _entry(
    entries: dict[str, np.ndarray], key: str, rank: int, path: str
) -> np.ndarray:
    value = entries[key]
    if value.ndim != rank or not value.size or value.dtype.kind != "f":
        found = f"{key!r} is {value.dtype} of shape {value.shape}"
        raise ValueError(_damaged(path, found))
    with np.errstate(over="ignore"):
        value = value.astype("float32")
    if not _is_amax(value):
        raise ValueError(_damaged(path, f"{key!r} is {value}"))
    return value


def _earlier(number: int) -> str:
    """The key of what was observed in micro-batches before the next step."""
    return f"{number}.observed"


def _readable(observation: Any) -> np.ndarray:
    """An observation for a file: what was not finite is infinite there."""
    array = np.array(ops.convert_to_numpy(observation))
    return np.nan_to_num(array, nan=np.inf, posinf=np.inf)


def _check_earlier(number: int, entries: Any, path: str) -> None:
    key = _earlier(number)
    if key not in entries:
        return
    value = entries[key]
    shaped = value.ndim == 2 and value.dtype == "float32"
    if not shaped or not np.all(value >= 0):
        found = f"{key!r} is {value.dtype} of shape {value.shape}: {value}"
        raise ValueError(_damaged(path, found))


def _is_amax(values: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(values)) and np.all(values >= 0))


def _damaged(path: str, found: str) -> str:
    keys = "i.<operand>.scale and i.<operand>.amax_history"
    return (
        f"The float8 state of {path!r} in this file is damaged; the layer's "
        f"state was not changed. Received: {found}. Allowed: {VERSION_KEY!r}, "
        f"{POLICY_KEY!r} and {ATTENTION_KEY!r} (UTF-8, may be missing), and, "
        f"for each kernel i and each of {', '.join(OPERANDS)}, a float "
        f"scalar and a float vector ({keys}), finite and >= 0. Save the "
        "model again, or delete the group from the file: the state then "
        "starts anew."
    )


def _check_rows(variable: StateVariable, value: np.ndarray) -> None:
    """Raise if this array is no observation and no state."""
    if value.shape != tuple(variable.shape):
        return  # Keras says so.
    uses = value[:, 0]
    settled = value[uses < 0]
    sealed = np.abs(settled[:, 0] - SEALED) <= ROUNDING
    if not (
        np.isfinite(uses).all() and sealed.all() and _is_amax(settled[:, 1:])
    ):
        raise ValueError(
            f"This array is no float8 state of {variable.path!r}. Received: "
            f"{value!r}. Allowed: rows of -1 followed by finite numbers >= 0, "
            "as `get_weights` returns them. Leave the variable as it is, or "
            "load the model from a file. Where weights of two models are "
            "paired, take those of `keras_policy_ext.loops.weights(model)`, "
            "which leave the state out."
        )


def _cast(path: str, dtype: str) -> str:
    return (
        f"The float8 state of {path!r} was cast, and its amaxes with it. "
        f"Received: {dtype}. Allowed: float32. `module.to(dtype)` casts all "
        "parameters, and Keras is not told: call `model.float()`. For another "
        "dtype make the layers under a policy, such as 'mixed_bfloat16'."
    )


def _aged(ring: np.ndarray) -> np.ndarray:
    """A ring as a list, newest first."""
    return np.concatenate([ring[:1], ring[:0:-1]])


def _sealed(value: np.ndarray) -> np.ndarray:
    """A settled state whose rows are sealed exactly, not within rounding."""
    value = np.array(value)
    value[:, 0] = SEALED
    return value


def _is_settled(value: Any) -> bool:
    """Whether an array has no row to settle."""
    return (
        isinstance(value, np.ndarray)
        and value.ndim == 2
        and bool(np.all(value[:, 0] < 0))
    )


def _resized(ring: np.ndarray, length: int) -> np.ndarray:
    """A history cut or padded with zeros, the newest entries kept.

    In the ring index 0 is the newest and the last index the one before it.
    """
    aged = _aged(ring)[:length]
    aged = np.pad(aged, (0, length - len(aged)))
    return np.concatenate([aged[:1], aged[:0:-1]])
