"""The variable of a float8 state; Keras overwrites it with its "gradient"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, user_code
from keras_policy_ext._keras import variable_values
from keras_policy_ext._types import Tensor, override
from keras_policy_ext.ext.delayed import _keras, frameworks
from keras_policy_ext.ext.delayed.observations import (
    ROUNDING,
    SLOTS,
    UNIT,
    UNSEEN,
    VALID_MARK,
    StateLayout,
    newest_first,
)
from keras_policy_ext.ext.delayed.sources import (
    CatchingUp,
    Settling,
    has_history_per_matrix,
)
from keras_policy_ext.files.entries import is_amax
from keras_policy_ext.layers.state_of import NoWeight
from keras_policy_ext.layers.stored_weights import on_every_device
from keras_policy_ext.numerics import scaling
from keras_policy_ext.numerics.scale_sources import source_of
from keras_policy_ext.recipes import OPERANDS, Recipe

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

GROWTH = 2.0
"""More than a step of training makes a kernel grow, beyond the state before.

A kernel that is larger is not the one that a given state belongs to.
"""

SUFFIX = "_amax"
"""The suffix of a state variable's name; a LayoutMap for kernels skips it."""

STEPS_SUFFIX = "_steps"  # Of a state that counts steps.


class StateVariable(
    NoWeight,
    _keras.NotAveraged,
    _keras.Companion,
    _keras.TellsItsValue,
    keras.Variable,
):
    """A float8 state, a variable that Keras overwrites with its "gradient".

    An observation, what a step has seen, is entered into the state by assigning
    it; see `observations`. A value is *settled* if it is a state
    itself. Zeros, JAX's gradient of an unused variable, leave the state
    unchanged. The kernel is *ahead* where it was assigned and the state not.
    """

    # Observations since the last assignment, where a framework keeps them here.
    observed: Any = None

    # Whether other code has changed this state: `warn_if_moved`.
    _checked_value: Any = None  # The value that was checked last.
    _has_warned = False  # Rows are moved, and the user was told.

    # Whether the kernel has changed since the state was made for it. Who
    # assigns it by Keras is counted: `assigned_beside`. Other code changes the
    # tensor, which has a version on some frameworks: `look_at`.
    _kernel_ahead = 0  # Assignments of the kernel minus those of the state.
    _kernel_version: int | None = None  # At the last look; None before it.
    _state_version: int | None = None
    _assigned_since_look = False  # The state, by a step of the optimizer.
    # An array that was assigned, and what became of it, while the kernel that
    # belongs to it may follow: checkpoints are read in any order.
    _given: tuple[np.ndarray, np.ndarray] | None = None
    _looks_at_kernel = True  # False after `look_last`.
    # Of the last assignment: a step that returns no observation repeats it.
    _kernel_rows_hash: int | None = None

    def __init__(
        self,
        recipe: Recipe,
        kernel: keras.Variable,
        name: str,
        bank_axis: int | None = None,
    ):
        _keras.install()
        self.recipe = recipe
        self.kernel = kernel
        # The axis of the kernel whose matrices have a history each, if any.
        if not has_history_per_matrix(recipe):
            bank_axis = None
        self.bank_axis = bank_axis
        self.matrix_count = 1 if bank_axis is None else kernel.shape[bank_axis]
        self.uses = 0  # Of the kernel since the last assignment.
        # A function for each use of the kernel; torch.compile traces no cache.
        self.numbered = getattr(source_of(recipe), "numbered", None)
        self.counts_steps = self.numbered is not None
        super().__init__(
            initializer=self._never_observed,
            shape=source_of(recipe, self.matrix_count).state_shape,
            dtype="float32",
            autocast=False,
            aggregation="only_first_replica",
            name=name,
            **on_every_device(2),
        )
        _keras.watch(kernel, self)

    def _never_observed(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        # An initializer, which Keras gives the shape that the layout has.
        return ops.convert_to_tensor(self.rows_layout.never_observed(), dtype)

    def value_made(self, value: Tensor) -> None:
        """Store observations beside the tensor that this variable now has."""
        frameworks.current.keep_observations(self, value)

    def assign(self, value: Tensor) -> Any:
        """Compute the new state from an observation or a state, and store it.

        Raises:
            ValueError: If `value` has another shape, or is a NumPy array, as
                in `set_weights`, that is neither an observation nor a state.
        """
        assigned = self.enter(value)
        if isinstance(value, np.ndarray) and _is_settled(value):
            given, self._given = self._numbers(), None
            self.catch_up(GROWTH)
            left = self._numbers()
            if given is not None and left is not None:
                self._given = given, left
        return assigned

    def enter(self, value: Tensor) -> Any:
        """Assign an observation or a state; do not check the kernel's amax."""
        if self.is_stand_in(value):
            # Nothing was observed. On PyTorch observations wait for the step
            # of the optimizer, which comes after all batches of the step.
            return self.value
        self._check_shape(value)
        self.check(value)
        settled = isinstance(value, np.ndarray) and _is_settled(value)
        self._count_assignment(settled)
        if settled:
            value = np.array(value)  # Marks of valid rows are then exactly -1.
            value[_is_sealed(value[:, 0]), 0] = VALID_MARK
            self._kernel_rows_hash = _hash_of_kernel_rows(value)
            if self.observed is not None:  # Discard those of the former state.
                self.observed.replaced()
        self.uses = 0
        value = frameworks.current.as_value_of(self, value)
        readable = not settled and variable_values.has_value(self)
        if readable and tuple(value.shape) == tuple(self.shape):
            # The state after this observation; None if that is stored already.
            value = frameworks.current.assigned(self, value)
        assigned = self.value if value is None else super().assign(value)
        if settled:  # The state is of the kernel as it is now.
            self._note_versions()
        if readable or settled:
            self.warn_if_moved()
        if readable and frameworks.current.steps_take_values:
            self._count_unchanged()
        return assigned

    if keras.backend.backend() == "jax":

        @property
        def value(self) -> Any:
            """The state; it includes the amax of the kernel's current value."""
            # Here, since a compiled step gets values, and reads no variables.
            if self._kernel_ahead > 0 and not variable_values.is_stateless():
                self.catch_up()
            return super().value

    @property
    def is_observed_in_graph(self) -> bool:
        """True if a graph of PyTorch returns what is observed."""
        kept = self.observed  # By hooks, which no such graph has.
        if kept is None or not backends.current.is_compiling():
            return False
        return kept.latest is None and kept.earlier is None

    def accumulate(
        self, observation: Tensor, accumulator: keras.Variable, is_last: Tensor
    ) -> None:
        """Keep an observation or, with the last one, enter all; no branch."""
        largest = ops.maximum(observation, accumulator)
        self.assign(ops.where(is_last, largest, self.value))
        accumulator.assign(ops.where(is_last, 0.0, largest))

    def _count_assignment(self, settled: bool) -> None:
        """Record whether state or kernel was assigned ahead of the other."""
        self._assigned_since_look = True
        if settled:
            self._kernel_ahead, self._assigned_since_look = 0, False
        elif not variable_values.is_without_notifying():
            # Below 0 the state was assigned first; the kernel may follow once.
            self._kernel_ahead = max(self._kernel_ahead - 1, -1)

    def _count_unchanged(self) -> None:
        """Mark the state as behind if an observation changed nothing."""
        # That happens if a compiled step does not return observations.
        value = frameworks.current.known_value(self)
        if value is None or not (self.trainable and self.observes_amaxes):
            return
        rows_hash = _hash_of_kernel_rows(np.asarray(value))
        is_same = rows_hash == self._kernel_rows_hash
        if is_same and not variable_values.is_without_notifying():
            self._kernel_ahead += 1
        self._kernel_rows_hash = rows_hash

    @override
    def assigned_beside(self) -> None:
        # The kernel was assigned. A loop may assign kernels and states in any
        # order: the kernel is ahead where it was assigned more often. Where no
        # graph keeps the state, `value` or `look_at` lets it catch up.
        self._kernel_ahead += 1
        is_given = bool(self._given) and not variable_values.is_stateless()
        if is_given or frameworks.current.keeps_variables_in_graphs:
            self.catch_up(1.0 if self._kernel_ahead > 0 else GROWTH)

    @override
    def stepped_beside(self) -> None:
        # An optimizer has updated the kernel and not the state.
        if not variable_values.is_stateless():
            self.catch_up()

    def look_at(self, kernel: Tensor) -> None:
        """Update the state if other code has changed the kernel's tensor."""
        if self.watched != id(self.kernel):  # In a copy of a layer.
            _keras.watch(self.kernel, self)
        framework = frameworks.current
        if framework.steps_take_values or not self._looks_at_kernel:
            self._given = None
            return  # See `value` and `look_last`.
        version = framework.version(kernel)
        has_changed = version != self._kernel_version
        if has_changed or self._kernel_ahead > 0:
            if variable_values.is_stateless():
                return  # As for shapes alone: what is assigned does not last.
            was_looked_at = self._kernel_version is not None
            # A step of an optimizer changes the kernel too, with the state.
            if self._kernel_ahead > 0 or (
                was_looked_at and not self._assigned_since_look
            ):
                # `load_state_dict`, for example, changes both tensors.
                is_given = self._state_version != framework.version(self.value)
                self.catch_up(GROWTH if is_given else 1.0)
        if has_changed:
            self._kernel_version, self._assigned_since_look = version, False
            self._state_version = framework.version(self.value)
        self._kernel_ahead, self._given = 0, None

    def look_last(self) -> None:
        """Check the kernel for changes now, and in no later call."""
        # A kernel that is gathered as float8 cannot be read.
        self.look_at(variable_values.value_without_autocast(self.kernel))
        self._looks_at_kernel = False

    @override
    def memory(self) -> Callable[[], None]:
        # For `layers.transaction`: a function that restores all but the values.
        state: Any = self
        attributes, pending = dict(vars(state)), state.observed
        observed = None if pending is None else dict(vars(pending))
        was_up_to_date = (
            self._kernel_version is not None
            and self._kernel_version == self._version_of(self.kernel)
        )

        def put_back() -> None:
            vars(state).clear()
            vars(state).update(attributes)
            if observed is not None:
                vars(pending).update(observed)
            if was_up_to_date:  # The restored values have new versions.
                self._note_versions()
            _keras.watch(self.kernel, self)

        return put_back

    def _note_versions(self) -> None:
        """Record that neither tensor has changed until now."""
        self._kernel_version = self._version_of(self.kernel)
        self._state_version = self._version_of(self)

    def _version_of(self, variable: Any) -> int | None:
        """Return a variable's count of changes in place; None if unknown."""
        if not variable_values.has_value(variable):
            return None
        value = variable_values.value_without_autocast(variable)
        return frameworks.current.version(value)

    def catch_up(self, beyond: float = 1.0) -> None:
        """Enter the kernel's amax if it is too large for the stored scale.

        It is if it exceeds `beyond` times the largest value that the scale
        allows. Pending observations of a step are kept. A state that was given
        before its kernel is taken as it was given.
        """
        self._kernel_ahead = 0
        given, self._given = self._given, None
        if all(map(variable_values.has_value, (self, self.kernel))):
            kernel = variable_values.value_without_autocast(self.kernel)
            matrix = variable_values.value_without_autocast(self)
            # Unless steps, perhaps of a graph, have changed it since.
            numbers = self._numbers() if given else None
            if (
                given
                and numbers is not None
                and (np.array_equal(given[1], numbers))
            ):
                matrix, beyond = ops.convert_to_tensor(given[0]), GROWTH
            super().assign(self.kept_up(kernel, matrix, beyond))
            self._note_versions()

    def _numbers(self) -> np.ndarray | None:
        """Return a copy of the state; None while it is traced."""
        is_traced = not backends.current.runs_now()
        if is_traced or variable_values.is_stateless():
            return None
        return np.array(ops.convert_to_numpy(self.value))

    def kept_up(self, kernel: Tensor, matrix: Any, beyond: float = 1.0) -> Any:
        """Return a state with a scale for the kernel; see `catch_up`."""
        if not self.observes_amaxes:
            return matrix
        fit = CatchingUp(self.recipe, self.matrix_count, beyond)
        amax = self.amax_of(kernel)  # The same on all replicas.
        return frameworks.current.settle_here(fit, amax, matrix)

    def amax_of(self, kernel: Tensor) -> Tensor:
        """Return the amax of a kernel; (matrices,) if each has a history."""
        if self.matrix_count == 1:
            return scaling.amax(kernel)
        axes = range(len(kernel.shape))
        others = tuple(axis for axis in axes if axis != self.bank_axis)
        return scaling.amax(kernel, axis=others)

    @property
    def settling(self) -> Any:
        """The function that computes the new state from an assigned value."""
        return Settling(self.recipe, self.matrix_count)

    def settled(self, observation: Tensor, previous: Tensor) -> Tensor:
        """Return the state after an observation, by a loop that keeps it."""
        self.uses = 0
        settle = frameworks.current.settle
        return settle(self.settling, observation, previous)

    def matrix(self) -> Any:
        """Return this variable's tensor; raise ValueError if it was cast."""
        value = self.value
        dtype = keras.backend.standardize_dtype(value.dtype)
        if dtype != self.dtype:
            raise ValueError(
                f"The float8 state of {self.path!r} was cast to another dtype, "
                f"which rounds its amaxes. Received: {dtype}. Allowed: "
                "float32. Call `model.float()`. To compute in another dtype, "
                "make the layers under a policy, such as 'mixed_bfloat16', "
                "instead of calling `module.to(dtype)`."
            )
        return value

    def warn_if_moved(self) -> None:
        """Warn once if other code has changed this state; never wait for it."""
        value = frameworks.current.known_value(self)
        if value is None or value is self._checked_value:
            return
        # A changed JAX array is another object; NumPy's may change in place.
        self._checked_value = None if isinstance(value, np.ndarray) else value
        value = np.asarray(value)
        if self._has_warned or _moved_rows(value).any():
            self.trusted(value)  # It warns, or notes that rows were repaired.

    def trusted(self, matrix: np.ndarray | None = None) -> np.ndarray:
        """Return a copy of the state; reset rows that other code changed."""
        # Warn once if there are any, and again only after they were repaired.
        # The value of the variable is read if `matrix` is None.
        if matrix is None:
            matrix = ops.convert_to_numpy(self.matrix())
        matrix = np.array(matrix)
        moved = _moved_rows(matrix)
        if moved.any() and not self._has_warned:
            user_code.warn(_MOVED)
        self._has_warned = bool(moved.any())
        matrix[moved] = self.rows_layout.never_observed()[moved]
        return matrix

    def observe(self, operand: str, amax: Any) -> None:
        """Enter the amax of one operand into its rows of the state.

        A float32 scalar, or (matrices,), of which amaxes of 0 are not entered.
        """
        matrix = np.array(ops.convert_to_numpy(self.value))
        layout, rows = self.rows_layout, self.rows_of(operand)
        amaxes = np.asarray(ops.convert_to_numpy(amax), "float32")
        amaxes = np.resize(amaxes, self.matrix_count)  # One for each row.
        for row, amax_of_row in enumerate(amaxes, rows.start):
            if self.matrix_count > 1 and not amax_of_row:
                continue
            if matrix[row, 0] == UNSEEN and np.isfinite(amax_of_row):
                # What settling comes to, without its thirty operations.
                matrix[row, 0] = VALID_MARK
                layout.history(matrix)[row, 0] = amax_of_row
            else:  # An observation: one use, and its amax in the first slot.
                matrix[row] = 0.0
                matrix[row, :2] = UNIT, UNIT * amax_of_row
        self.enter(matrix)

    def rows_of(self, operand: str) -> slice:
        """Return the rows of the state that an operand has."""
        first = OPERANDS.index(operand) * self.matrix_count
        return slice(first, first + self.matrix_count)

    @property
    def rows_layout(self) -> StateLayout:
        """The `StateLayout` of this state: which columns mean what."""
        return source_of(self.recipe, self.matrix_count).layout

    @property
    def observes_amaxes(self) -> bool:
        """True if this state records amaxes, False if it counts steps."""
        return bool(source_of(self.recipe).observes_amaxes)

    def rows(self) -> dict[str, tuple[np.float32, np.ndarray]]:
        """Return each operand's last scale and amaxes, newest first.

        A scale is 0 until one was computed from a history. An amax is 0 if it
        was never observed, or if the state is an average of which too little
        was observed. The dict is empty for a count of steps. Of a bank, each
        number is the largest of its matrices.
        """
        if not self.observes_amaxes:
            return {}
        layout = self.rows_layout
        matrix = self.trusted()
        matrix[~_is_sealed(matrix[:, 0])] = 0.0
        by_operand = {}
        for operand in OPERANDS:
            rows = matrix[self.rows_of(operand)]
            ring = layout.history(rows).max(axis=0)
            by_operand[operand] = layout.scale(rows).max(), newest_first(ring)
        return by_operand

    def is_unseen(self, operand: str) -> bool:
        """Return True if an operand's amax was never observed."""
        matrix = ops.convert_to_numpy(self.matrix())
        return bool((matrix[self.rows_of(operand), 0] == UNSEEN).all())

    def newest(self, operand: str) -> np.float32:
        """Return the newest observed amax of an operand; 0 without one."""
        return self.rows()[operand][1][0]

    @override
    def set_with_weights(self) -> None:
        self.catch_up(GROWTH)  # Its kernel is here; none follows.

    def _check_shape(self, value: Tensor) -> None:
        shape = getattr(value, "shape", None)
        if shape is None or tuple(shape) == tuple(self.shape):
            return
        raise ValueError(
            f"This is not the float8 state of {self.path!r}. Received: a value "
            f"of shape {tuple(shape)}. Allowed: {tuple(self.shape)}. If you "
            "copy weights from another model, that model is not in float8 or "
            "has another history length: copy only "
            "`keras_policy_ext.loops.weights(model)`, which leaves the state "
            "out."
        )

    @override
    def check(self, value: Tensor) -> None:
        # Tensors are not checked: that would wait for their values.
        if not isinstance(value, np.ndarray) or (
            value.shape != tuple(self.shape)  # Keras says so.
        ):
            return
        uses = value[:, 0]  # In a row of a state it is a mark, below 0.
        settled = value[uses < 0]
        is_state = bool(_is_state(settled[:, 0]).all())
        if not (
            np.isfinite(uses).all()
            and is_state
            and is_amax(settled[:, 1:]).all()
        ):
            raise ValueError(
                f"This array is not a float8 state of {self.path!r}. "
                f"Received: {value!r}. Allowed: an array from `get_weights`, "
                "or an average of such arrays: each row begins with -1, or -2 "
                "if never observed, and finite numbers >= 0 follow. Do not "
                "assign this variable. Load the model from a file, or copy "
                "only `keras_policy_ext.loops.weights(model)`, which leaves "
                "the state out."
            )

    @property
    def overwrite_with_gradient(self) -> bool:
        """True: Keras's optimizers assign the gradient to this variable."""
        return True

    def next_slot(self) -> int:
        """Return the slot for this use of the kernel in the current step."""
        # It is modulo `SLOTS`, since each number needs a plan compiled for it.
        number_of_use = frameworks.current.number_of_use
        slot = None if number_of_use is None else number_of_use(self)
        if slot is not None:
            return slot % SLOTS
        slot = self.uses
        self.uses = (slot + 1) % SLOTS
        return slot


def _hash_of_kernel_rows(value: np.ndarray) -> int:
    """Return a hash of a state's rows for the kernel, to detect changes."""
    count = len(value) // len(OPERANDS)  # 0 for a count of steps: one row.
    first = OPERANDS.index("kernel") * count
    rows = value[first : first + count] if count else value
    return hash(rows.astype("float32").tobytes())


def _is_sealed(first: np.ndarray) -> np.ndarray:
    """Return True for each first column that marks a valid row, about -1."""
    return np.abs(first - VALID_MARK) <= ROUNDING


def _moved_rows(matrix: np.ndarray) -> np.ndarray:
    """Return True for each row that is no state and no average of states."""
    has_observations: Any = matrix[:, 1 : SLOTS + 1].any(axis=1)
    return has_observations | ~_is_state(matrix[:, 0])


def _is_state(first: np.ndarray) -> np.ndarray:
    """Return True for each first column that a state, or an average, has."""
    return (first >= UNSEEN - ROUNDING) & (first <= VALID_MARK + ROUNDING)


def _is_settled(value: np.ndarray) -> bool:
    """Return True if an array is a state, not an observation."""
    return value.ndim == 2 and bool(np.all(value[:, 0] < 0))
