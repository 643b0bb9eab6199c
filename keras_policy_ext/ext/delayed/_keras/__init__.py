"""What Keras tells about variables, and what its optimizers leave alone.

Contacts with private names of Keras: see `keras_policy_ext._keras`. Its
functions are replaced by `install`, for the first state of a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_policy_ext._keras import Stock, put_around
from keras_policy_ext._keras.optimizer_variables import fill_averages
from keras_policy_ext._keras.variable_values import (
    has_value,
    is_without_notifying,
    without_notifying,
)
from keras_policy_ext._types import Tensor


@functools.cache
def install() -> None:
    """Replace the functions of Keras that states need, once."""
    leave_out_of_averages()
    tell_companions()
    without_states_that_lack_gradients()


class TellsItsValue:
    """A variable that calls `value_made` once its tensor exists.

    Keras makes that tensor in `_initialize`, in the constructor, or later if a
    stateless scope is open (keras 3.0 to 3.16). If Keras makes it elsewhere,
    the constructor calls the method.
    """

    value: Any
    _has_told = False
    _value: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parent: Any = super()
        parent.__init__(*args, **kwargs)
        variable: Any = self
        if not self._has_told and has_value(variable):
            self._tell()

    def value_made(self, value: Tensor) -> None:
        """Do nothing; subclasses override this to see the new tensor."""

    def _initialize(self, value: Tensor) -> None:
        parent: Any = super()
        parent._initialize(value)
        self._tell()

    def _tell(self) -> None:
        self._has_told = True
        # Keras may have renamed `_value`; `value` is public.
        value = self.value if "_value" not in vars(self) else self._value
        self.value_made(value)


class Companion:
    """An object that Keras notifies when a variable is assigned."""

    left_out = False
    """True if an optimizer was built for the variable, not for this object."""

    watched: int | None = None
    """The id of the variable that `watch` was called with last."""

    _optimizers: Any = None

    def handed_to(self, optimizer: keras.Optimizer) -> None:
        """Record that `optimizer` was built for this object as well."""
        self._optimizers = self._optimizers or weakref.WeakSet()
        self._optimizers.add(optimizer)
        self.left_out = False

    def assigned_beside(self) -> None:
        """Do nothing; called if the code of the user assigns the variable."""

    def stepped_beside(self) -> None:
        """Do nothing; called if an optimizer updated the variable only."""

    def memory(self) -> Callable[[], None]:
        """Return a function that puts this back as it is now."""
        # It is called once the variable has its old value again.
        raise NotImplementedError


_COMPANION = "_float8_companion"
"""An attribute of variables: a weak reference to their companion."""

_thread = threading.local()
"""`notes`: False in a block of `not_noted`."""


def watch(variable: keras.Variable, companion: Companion) -> None:
    """Notify `companion` from now on when its variable is assigned."""
    # An attribute: torch.compile does not look into a weak dict. It is none of
    # Flax, whose variables would compare it.
    object.__setattr__(variable, _COMPANION, weakref.ref(companion))
    companion.watched = id(variable)


@contextlib.contextmanager
def not_noted() -> Iterator[None]:
    """In the block, companions do not note which optimizers are built."""
    noted = getattr(_thread, "notes", True)
    _thread.notes = False
    try:
        yield
    finally:
        _thread.notes = noted


def tell_companions() -> None:
    """Make Keras's `assign` and optimizers notify companions of variables.

    The public methods are `Variable.assign`, and of optimizers `build`,
    `apply` and `finalize_variable_values`, which on TensorFlow writes into the
    tensors behind the variables. The variables that an optimizer was built
    with are in `_trainable_variables` (keras 3.0 to 3.15). Without it, they
    have to be passed to `apply`.
    """
    put_around(keras.Variable, "assign", _assign)
    put_around(keras.optimizers.Optimizer, "build", _build)
    put_around(keras.optimizers.Optimizer, "apply", _apply)
    name = "finalize_variable_values"
    put_around(keras.optimizers.Optimizer, name, _finalize)


def _assign(stock: Stock, variable: keras.Variable, value: Any) -> Any:
    assigned = stock(variable, value)
    if hasattr(variable, _COMPANION):  # Most have none.
        companion = _companion_of(variable)
        if companion is not None and not is_without_notifying():
            companion.assigned_beside()
    return assigned


def _build(
    stock: Stock,
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
) -> Any:
    """Note companions that have no optimizer, while their variable has."""
    built = stock(optimizer, variables)
    if not getattr(_thread, "notes", True):
        return built
    for variable in variables:
        if isinstance(variable, Companion):
            variable.handed_to(optimizer)
    for companion in _companions_of(variables):
        companion.left_out = not companion._optimizers
    return built


def _apply(
    stock: Stock,
    optimizer: keras.Optimizer,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Update variables, and notify companions that were not updated too."""
    variables = trainable_variables
    if variables is None:
        variables = getattr(optimizer, "_trainable_variables", ())
    else:
        trainable_variables = variables = list(variables)
    with without_notifying():
        applied = stock(optimizer, grads, trainable_variables)
        # The step has assigned the other companions.
        for companion in _companions_of(variables):
            if companion.left_out:
                companion.stepped_beside()
    return applied


def _finalize(
    stock: Stock, optimizer: keras.Optimizer, var_list: Sequence[Any]
) -> Any:
    """Write averages into variables, and notify their companions."""
    with without_notifying():
        stock(optimizer, var_list)
    # Only averages change the weights here.
    if getattr(optimizer, "use_ema", True):
        for companion in _companions_of(var_list):
            companion.stepped_beside()


def _companions_of(variables: Sequence[keras.Variable]) -> list[Any]:
    watched = [each for each in variables if hasattr(each, _COMPANION)]
    companions = map(_companion_of, watched)
    return [each for each in companions if each is not None]


def _companion_of(variable: keras.Variable) -> Any:
    """Return the companion that watches a variable, or None."""
    reference = getattr(variable, _COMPANION, None)
    companion = None if reference is None else reference()
    # A copy of a variable has the reference of the first one.
    is_its_own = companion is not None and companion.watched == id(variable)
    return companion if is_its_own else None


class _AverageStandIn(keras.Variable):
    """The moving average of a variable that has none; it ignores values."""

    def __init__(self, variable: keras.Variable):
        # Keras assigns averages to variables; zeros leave a state unchanged.
        # On TensorFlow it writes into the tensors behind the variables: there
        # the average is the value, so that to swap them changes nothing.
        self._copies = keras.backend.backend() == "tensorflow"

        def initial(shape: Sequence[int], dtype: str | None = None) -> Tensor:
            if self._copies:
                return keras.ops.copy(variable.value)
            return keras.ops.zeros(shape, dtype)

        # The variable's layout, as for slots: a LayoutMap would go by the name.
        layout = getattr(variable, "_layout", None)
        super().__init__(
            initial,
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            autocast=False,
            aggregation="only_first_replica",
            name=f"{variable.name}_average",
            **({} if layout is None else {"layout": layout}),
        )

    def assign(self, value: Tensor) -> None:
        """Ignore the value, so that the average never changes."""

    def follow(self, variable: keras.Variable) -> None:
        """On TensorFlow, copy the value of `variable`; else do nothing."""
        if self._copies:
            super().assign(variable.value)


class NotAveraged:
    """A variable that an optimizer's moving averages do not change.

    For a variable that is overwritten with its gradient, optimizers with
    `use_ema` store None as the average and then fail on it: on TensorFlow at
    the end of `fit`, on TensorFlow and JAX with `ema_overwrite_frequency`, on
    all three with the callback `SwapEMAWeights` (keras 3.12 to 3.15).
    Assigning zeros to such a variable must not change it.
    """

    _stand_in: _AverageStandIn | None = None

    def stand_in(self) -> keras.Variable:
        """Return the variable that optimizers use as the moving average."""
        if self._stand_in is None:
            self._stand_in = _AverageStandIn(self)
        return self._stand_in

    def is_stand_in(self, value: Any) -> bool:
        """Return True if a value is the object that `stand_in` returns."""
        return value is not None and value is self._stand_in

    def assign(self, value: Tensor) -> Tensor:
        """Assign a value to this variable, and copy it to `stand_in()`."""
        parent: Any = super()
        assigned = parent.assign(value)
        if self._stand_in is not None:
            self._stand_in.follow(self)
        return assigned


def leave_out_of_averages() -> None:
    """Make Keras's optimizers leave `NotAveraged` variables unchanged."""

    # `Optimizer.build`, which gets the variables, is wrapped to fill the list
    # of averages (`_model_variables_moving_average`, keras 3.12 to 3.15).
    # Without it, optimizers fail as Keras's do. Expires if Keras skips None.
    def build(
        stock: Stock,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> None:
        stock(optimizer, variables)
        fill_averages(optimizer, list(variables))

    put_around(keras.optimizers.Optimizer, "build", build)


def without_states_that_lack_gradients() -> None:
    """Have optimizers leave out overwritten variables without a gradient."""
    # They keep their values. Else Keras would warn that they have no gradients
    # (`_filter_empty_gradients`, keras 3.12 to 3.16).
    name = "_filter_empty_gradients"
    put_around(keras.optimizers.Optimizer, name, _without_states)


def _is_accumulated(optimizer: Any, gradient: Tensor, variable: Any) -> bool:
    """Accumulate an observation in a graph of PyTorch; False elsewhere."""
    # Keras takes three branches for each such variable, and each ends a graph
    # (`_accumulated_gradients`, `_get_variable_index`, and `_iterations`, which
    # counts batches, keras 3.12 to 3.16). Without these it goes on doing so.
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if not steps or not getattr(variable, "is_observed_in_graph", False):
        return False
    names = "_accumulated_gradients", "_get_variable_index", "_iterations"
    if not all(hasattr(optimizer, name) for name in names):
        return False
    index = optimizer._get_variable_index(variable)
    is_last = keras.ops.equal((optimizer._iterations + 1) % steps, 0)
    accumulator = optimizer._accumulated_gradients[index]
    variable.accumulate(gradient, accumulator, is_last)
    return True


def _without_states(
    stock: Stock, optimizer: Any, gradients: Any, variables: Any
) -> Any:
    """Update without the state variables that have no gradient."""
    pairs = [
        (gradient, variable)
        for gradient, variable in zip(gradients, variables, strict=True)
        if not getattr(variable, "overwrite_with_gradient", False)
        or not (
            gradient is None or _is_accumulated(optimizer, gradient, variable)
        )
    ]
    if len(pairs) < len(variables):
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
    return stock(optimizer, gradients, variables)
