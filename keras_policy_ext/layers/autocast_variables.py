"""In which dtype variables are read: a scope, and a class of variables."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import keras

from keras_policy_ext import _scopes
from keras_policy_ext._keras import calls, variable_values
from keras_policy_ext._types import Tensor
from keras_policy_ext.policies import FLOATS

_SCOPES = _scopes.Scopes(
    "autocast_scope", calls.stored_autocast_scope, calls.store_autocast_scope
)


def autocast_scope(dtype: object) -> AbstractContextManager[None]:
    """Read variables in another dtype for a `with` block.

    A layer's own call enters the scope of its compute dtype again: the scope
    holds for what is read in the block itself. It belongs to the thread, with
    all its asyncio tasks: await nothing inside but tasks that are started
    inside, too. Scopes nest, and the one before is back afterwards, after an
    exception too.

    Args:
        dtype: A floating dtype, in which variables that autocast are then
            read; None switches autocasting off.

    Returns:
        A context manager, to be entered once.

    Raises:
        ValueError: If the dtype is not floating.
        RuntimeError: By the `with` statement, if another asyncio task of this
            thread is inside of a scope; at its end, if a scope that was
            entered later still is.

    Examples:
        >>> class Counting(kpe.layers.AutocastMixin, keras.layers.Layer):
        ...     def build(self, shape):
        ...         self.count = self.add_weight(shape=(), initializer="zeros")
        ...
        ...     def call(self, x):
        ...         with kpe.autocast_scope(None):
        ...             self.seen = keras.ops.add(self.count, 1.0)
        ...         return x
        >>> layer = Counting(dtype="mixed_bfloat16")
        >>> outputs = layer(np.ones((2, 3)))
        >>> keras.backend.standardize_dtype(layer.seen.dtype)
        'float32'
    """
    name = None
    if dtype is not None:
        try:
            name = keras.backend.standardize_dtype(dtype)
        except (TypeError, ValueError):
            name = ""
    if name is not None and name not in FLOATS:
        raise ValueError(
            f"{dtype!r} is not a floating dtype, and variables are autocast "
            f"to those only. Received: {dtype!r}. Allowed: "
            f"{', '.join(FLOATS)}, or None to switch autocasting off. Use "
            "`ops.cast` for other dtypes."
        )
    return _SCOPES.opened(calls.autocast_scope(name))


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

    def assign(self, value: Tensor) -> Tensor:
        """`keras.Variable.assign`, with `value` read in its own dtype."""
        with calls.autocast_scope(None):
            return super().assign(value)

    def assign_add(self, value: Tensor) -> Tensor:
        """Add in the dtype of the variable."""
        with calls.autocast_scope(None):
            return super().assign_add(value)

    def assign_sub(self, value: Tensor) -> Tensor:
        """Subtract in the dtype of the variable."""
        with calls.autocast_scope(None):
            return super().assign_sub(value)

    def follow(self, mixed: bool) -> None:
        """Autocast, if it was asked for and the owner is mixed."""
        variable_values.set_autocasts(self, self.asked and mixed)


def own(variable: keras.Variable, layer: keras.Layer, mixed: bool) -> None:
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


def assigned_variables(value: object) -> list[keras.Variable]:
    """The variables in an attribute: itself, or in lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [v for each in value for v in assigned_variables(each)]
    return [value] if isinstance(value, keras.Variable) else []


def is_autocast_variable(variable: object) -> bool:
    """True if a variable is cast where it is read in a mixed layer's call.

    Args:
        variable: Anything.

    Returns:
        True for a floating `keras.Variable` that autocasts. A variable of an
        `AutocastMixin` layer does so while its layer is mixed, unless it was
        made with `autocast=False`; one of a stock layer does so in any mixed
        layer that reads it. False for all else.
    """
    if not isinstance(variable, keras.Variable):
        return False
    with calls.autocast_scope(None):
        dtype = variable.dtype
    return variable_values.autocasts(variable) and dtype in FLOATS
