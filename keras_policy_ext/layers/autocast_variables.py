"""Variables that are cast where their own layer is mixed, and there only."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext._keras import calls, variable_values
from keras_policy_ext.policies import FLOATS


class AutocastVariable(keras.Variable):
    """A variable whose writes stay in its own dtype.

    Inside a mixed layer Keras adds in the compute dtype before it assigns,
    and on torch assigns to the copy that it handed out.

    Attributes:
        owner: The layer that made the variable.
        asked: Whether the variable was made with `autocast=True`.
    """

    owner: Any
    asked: bool

    def assign(self, value: Any) -> Any:
        """`keras.Variable.assign`, with `value` read in its own dtype."""
        with calls.autocast_scope(None):
            return super().assign(value)

    def assign_add(self, value: Any) -> Any:
        """Add in the dtype of the variable."""
        with calls.autocast_scope(None):
            return super().assign_add(value)

    def assign_sub(self, value: Any) -> Any:
        """Subtract in the dtype of the variable."""
        with calls.autocast_scope(None):
            return super().assign_sub(value)

    def follow(self, mixed: bool) -> None:
        """Autocast, if it was asked for and the owner is mixed."""
        variable_values.set_autocasts(self, self.asked and mixed)


def own(variable: Any, layer: Any, mixed: bool) -> None:
    """Make a variable one of a layer's.

    The class of the object is changed: `Layer.add_weight` makes it, under
    the name scope and with the tracking of its Keras, and lets nobody choose
    a class. A variable that has another class already, such as the state of
    a float8 kernel, stays what it is.
    """
    if type(variable) is not keras.Variable:
        return
    variable.__class__ = AutocastVariable
    variable.owner = layer
    variable.asked = variable_values.autocasts(variable)
    variable.follow(mixed)


def assigned_variables(value: Any) -> list[Any]:
    """The variables in an attribute: itself, or in lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [v for each in value for v in assigned_variables(each)]
    return [value] if isinstance(value, keras.Variable) else []


def is_autocast_variable(variable: Any) -> bool:
    """Whether a variable is cast where it is read in a mixed layer's call.

    Args:
        variable: Anything.

    Returns:
        True for a floating `keras.Variable` that autocasts. A variable of an
        `AutocastMixin` layer does so while its layer is mixed, unless it was
        made with `autocast=False`; one of a stock layer does so in any mixed
        layer that reads it. False for all else.
    """
    return (
        isinstance(variable, keras.Variable)
        and variable_values.autocasts(variable)
        and _own_dtype(variable) in FLOATS
    )


def _own_dtype(variable: Any) -> str:
    with calls.autocast_scope(None):
        return str(variable.dtype)
