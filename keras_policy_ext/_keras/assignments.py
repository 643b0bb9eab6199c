"""Variables that are assigned, by optimizers of Keras or by others."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_policy_ext._keras.around import put_around


class Companion:
    """Base of an object that is notified when its variable changes.

    There is no public hook (keras 3.0 to 3.15). Expires with one.
    """

    left_out = False
    """Whether an optimizer was built for the variable, and none for this."""

    _optimizers: Any = None

    def handed_to(self, optimizer: Any) -> None:
        """Called when an optimizer is built for this."""
        self._optimizers = self._optimizers or weakref.WeakSet()
        self._optimizers.add(optimizer)
        self.left_out = False

    def assigned_beside(self) -> None:
        """Called after each assignment that is not `untold`."""

    def stepped_beside(self) -> None:
        """Called when an optimizer has changed the variable and not this."""

    def memory(self) -> Callable[[], None]:
        """Remember what this holds now; return what puts it back.

        To be called once the values of both variables are back.
        """
        raise NotImplementedError


_COMPANIONS: weakref.WeakValueDictionary[int, Any] = (
    weakref.WeakValueDictionary()
)
"""By the id of the variable, which its companion keeps alive."""

_thread = threading.local()


def watch(variable: keras.Variable, companion: Companion) -> None:
    """Tell a companion from now on when this variable is assigned.

    Args:
        variable: A variable that the companion holds.
        companion: Told of it, as long as it lives.
    """
    _COMPANIONS[id(variable)] = companion


def is_untold() -> bool:
    """Return whether this thread is in a block of `untold`."""
    return getattr(_thread, "blocks", 0) > 0


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """A block whose assignments are told to nobody.

    As in a step of an optimizer, which assigns companions too, or while a
    file is read that has both.
    """
    _thread.blocks = getattr(_thread, "blocks", 0) + 1
    try:
        yield
    finally:
        _thread.blocks -= 1


def tell_companions() -> None:
    """Have assignments to variables, and steps of optimizers, be told.

    Public methods are put into others: `Variable.assign`, and of optimizers
    `build`, `apply` and `finalize_variable_values`, which on TensorFlow write
    into the tensors behind the variables. The variables that an optimizer was
    built with are in `_trainable_variables` (keras 3.0 to 3.15); where these
    are gone, `apply` has to be given them.
    """
    put_around(keras.Variable, "assign", _assign)
    put_around(keras.optimizers.Optimizer, "build", _build)
    put_around(keras.optimizers.Optimizer, "apply", _apply)
    name = "finalize_variable_values"
    put_around(keras.optimizers.Optimizer, name, _finalize)


def _assign(stock: Callable[..., Any], variable: Any, value: Any) -> Any:
    assigned = stock(variable, value)
    companion = _COMPANIONS.get(id(variable))
    if companion is not None and not is_untold():
        companion.assigned_beside()
    return assigned


def _build(
    stock: Callable[..., Any], optimizer: Any, variables: Sequence[Any]
) -> Any:
    built = stock(optimizer, variables)
    for variable in variables:
        if isinstance(variable, Companion):
            variable.handed_to(optimizer)
    for companion in _companions_of(variables):
        companion.left_out = not companion._optimizers
    return built


def _apply(
    stock: Callable[..., Any],
    optimizer: Any,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    variables = trainable_variables
    if variables is None:
        variables = getattr(optimizer, "_trainable_variables", ())
    else:
        trainable_variables = variables = list(variables)
    with untold():
        applied = stock(optimizer, grads, trainable_variables)
        for companion in _companions_of(variables):
            if companion.left_out:
                companion.stepped_beside()
    return applied


def _finalize(
    stock: Callable[..., Any], optimizer: Any, var_list: Sequence[Any]
) -> Any:
    with untold():
        stock(optimizer, var_list)
    if getattr(optimizer, "use_ema", True):
        for companion in _companions_of(var_list):
            companion.stepped_beside()


def _companions_of(variables: Sequence[Any]) -> list[Any]:
    found = (_COMPANIONS.get(id(variable)) for variable in variables)
    return [companion for companion in found if companion is not None]
