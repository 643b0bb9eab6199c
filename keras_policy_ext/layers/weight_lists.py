"""Lists of weights, as `get_weights` returns them, set all or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import stored_kernels
from keras_policy_ext._keras import built_layers
from keras_policy_ext.layers.state_variable import StateVariable
from keras_policy_ext.layers.stored_variable import (
    WIDENED,
    StoredConstant,
    StoredVariable,
)

_OWN = (StateVariable, StoredConstant, StoredVariable)


def set_all(layer: Any, weights: Sequence[Any]) -> None:
    """Set the weights of a layer or model, once all of them are looked at.

    A kernel that is frozen takes codes, or the numbers that its codes mean
    with the scale that is set with them: those that `get_weights` returned.

    Args:
        layer: The layer or model.
        weights: An array for each of `layer.weights`.

    Raises:
        ValueError: If they do not fit, one is no float8 state, or one is
            other numbers than a frozen kernel can have. None is then set.
    """
    variables = layer.weights
    received = [np.shape(value) for value in weights]
    allowed = [tuple(variable.shape) for variable in variables]
    if received != allowed:
        raise ValueError(
            f"These arrays are not those of layer {layer.name!r}; none was "
            f"set. Received: shapes {received}. Allowed: {allowed}. A "
            "state of another history length is cut or padded when it is "
            "loaded from a file. To pair the weights of two models, take "
            "those of `keras_policy_ext.loops.weights(model)`, without "
            "the state."
        )
    for variable, value in zip(variables, weights, strict=True):
        _check_numbers(variable, value)
    given = {id(v): x for v, x in zip(variables, weights, strict=True)}
    values = [_checked(v, given) for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def watch() -> None:
    """Let `set_weights` of models that hold float8 layers be `set_all`."""
    built_layers.around_set_weights(_set)


def _set(stock: Any, layer: Any, weights: Sequence[Any]) -> None:
    if any(isinstance(each, _OWN) for each in layer.weights):
        set_all(layer, weights)
    else:
        stock(layer, weights)


def _checked(variable: keras.Variable, given: dict[int, Any]) -> Any:
    """Return the value that a variable is to hold; raise if it cannot."""
    value = given[id(variable)]
    if isinstance(variable, StateVariable):
        variable.check(value)
    if isinstance(variable, StoredConstant):
        _check_constant(variable, value)
    if isinstance(variable, StoredVariable):
        return _codes(variable, value, given)
    return value


def _check_numbers(variable: keras.Variable, value: Any) -> None:
    """Raise if this is an array of something else; tensors are of numbers."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind not in "biufcV":
        raise ValueError(
            f"This array has no numbers for {variable.path!r}; none was set. "
            f"Received: dtype {dtype}. Allowed: numbers. Pass the arrays that "
            "`get_weights` returns."
        )


def _check_constant(variable: keras.Variable, value: Any) -> None:
    numbers = np.asarray(ops.convert_to_numpy(value))
    is_scale = not variable.name.endswith(WIDENED)
    if np.isfinite(numbers).all() and (not is_scale or (numbers > 0).all()):
        return
    raise ValueError(
        f"This array is no scale of a frozen kernel ({variable.path!r}); none "
        "was set. Received: numbers that are NaN, infinite or <= 0. Allowed: "
        "those that `get_weights` returns."
    )


def _codes(
    variable: StoredVariable, value: Any, given: dict[int, Any]
) -> np.ndarray:
    """The codes of a frozen kernel, given them or the numbers they mean."""
    array = np.asarray(ops.convert_to_numpy(value))
    if array.dtype == "uint8":
        variable.check(array)
        return array
    scale = given.get(id(variable.scale))
    if scale is None:
        scale = variable.scale.as_stored
    numbers = array.astype("float32")
    if np.isfinite(numbers).all():
        stored = stored_kernels.quantize(
            numbers,
            variable.axes,
            variable.granularity,
            variable.weights,
            np.asarray(ops.convert_to_numpy(scale), "float32"),
        )
        meant = stored.dequantized()
        if np.array_equal(meant.astype(array.dtype), array):
            return stored.codes
    variable.check(array)
    return array
