"""Set the weights of a float8 layer from a list of arrays, all or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import stored_kernels
from keras_policy_ext._keras import built_layers, first_use
from keras_policy_ext._types import Tensor
from keras_policy_ext.layers.state_of import NoWeight
from keras_policy_ext.layers.stored_weights import StoredVariable

_CHECKED_CLASSES = (NoWeight, StoredVariable)


def set_all(layer: keras.Layer, weights: Sequence[Any]) -> None:
    """Check one array for each of `layer.weights`; then set all of them.

    A frozen kernel takes codes, or the dequantized values that `get_weights`
    returned. The values must match the codes under the scale set.

    Raises:
        ValueError: If the arrays do not fit, one is not a float8 state, or one
            has values that a frozen kernel cannot have. No weight is set then.
    """
    variables = layer.weights
    received = [np.shape(value) for value in weights]
    allowed = [tuple(variable.shape) for variable in variables]
    if received != allowed:
        raise ValueError(
            f"These arrays are not those of layer {layer.name!r}; none was "
            f"set. Received: shapes {received}. Allowed: {allowed}. To copy "
            "weights between two models, use "
            "`keras_policy_ext.loops.weights(model)`, which leaves the float8 "
            "state out. To change the history length, save the weights to a "
            "file and load it: histories are then shortened or padded."
        )
    for variable, value in zip(variables, weights, strict=True):
        _check_numbers(variable, value)
    # By id: which codes a kernel gets also depends on the scale given for it.
    given = {id(v): x for v, x in zip(variables, weights, strict=True)}
    values = [_value_to_assign(v, given) for v in variables]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    for variable in variables:
        if isinstance(variable, NoWeight):
            variable.set_with_weights()


def _set_weights(
    stock: Any, layer: keras.Layer, weights: Sequence[Any]
) -> None:
    """Set the weights, all or none if some are of frozen kernels."""
    if any(isinstance(each, _CHECKED_CLASSES) for each in layer.weights):
        set_all(layer, weights)
    else:
        stock(layer, weights)


first_use.wait(lambda: built_layers.around_set_weights(_set_weights))


def _value_to_assign(variable: keras.Variable, given: dict[int, Any]) -> Any:
    """Return the value to assign to a variable; raise if it is invalid."""
    value = given[id(variable)]
    if isinstance(variable, NoWeight):
        variable.check(value)
    if isinstance(variable, StoredVariable):
        return _codes_of(variable, value, given)
    return value


def _check_numbers(variable: keras.Variable, value: Tensor) -> None:
    """Raise if a NumPy array's dtype is not numeric."""
    dtype = getattr(value, "dtype", None)
    # The last kind, V, is that of bfloat16 and of float8.
    if isinstance(dtype, np.dtype) and dtype.kind not in "biufcV":
        raise ValueError(
            f"This array cannot be the value of {variable.path!r}; no weight "
            f"was set. Received: dtype {dtype}. Allowed: dtypes of numbers. "
            "Pass the arrays that `get_weights` returned."
        )


def _codes_of(
    variable: StoredVariable, value: Tensor, given: dict[int, Any]
) -> np.ndarray:
    """Return the codes of a frozen kernel, from codes or dequantized values.

    `given` has all values to set, by the id of the variable: the codes also
    depend on the scale.
    """
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
        values = stored.dequantized()
        if np.array_equal(values.astype(array.dtype), array):
            return stored.codes
    variable.check(array)  # It raises: these are no codes.
    return array
