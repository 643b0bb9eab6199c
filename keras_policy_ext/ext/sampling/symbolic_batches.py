"""Nested batches, and batches as shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_policy_ext.conversion.saved_input_bytes import itemsize

_ALLOWED = (
    "Allowed: what the model is called on, as arrays; keras.KerasTensor or "
    "keras.InputSpec with all sizes; a shape such as (32, 128), or nested "
    "ones; or the size of a batch, for a model that knows its other sizes."
)


def read(model: keras.Layer, batch: Any) -> Any:
    """Convert a batch, its shapes or its size to nested symbolic tensors.

    Args:
        model: The model that is called with it.
        batch: As for `memory`.

    Returns:
        Nested `keras.KerasTensor`.

    Raises:
        TypeError: If it is no batch that `memory` allows.
        ValueError: If a size is unknown.
    """
    if isinstance(batch, (int, np.integer)) and not isinstance(batch, bool):
        return _of_size(model, int(batch))
    if _is_shape(batch):
        return _of_shapes(model, batch)
    if isinstance(batch, (list, tuple, dict)) and _are_shapes(batch):
        return _of_shapes(model, batch)
    return map_arrays(_symbolic, batch)


def size_of(batch: Any) -> int:
    """Return the number of bytes of a batch of symbolic tensors."""
    return sum(
        int(np.prod(x.shape)) * itemsize(x.dtype)
        for x in keras.tree.flatten(batch)
        if x is not None
    )


def _of_size(model: keras.Layer, size: int) -> Any:
    inputs = getattr(model, "inputs", None)
    if size < 1:
        raise ValueError(
            "`batch` is not a size of a batch: it is below 1. Received: "
            f"{size}. {_ALLOWED}"
        )
    if inputs is None:
        raise ValueError(
            f"{type(model).__name__} {model.name!r} does not know the shapes "
            f"of its inputs. Received: a batch size, {size}. Allowed: a batch, "
            "or the shape of one. A batch size is enough only for Functional "
            "and Sequential models."
        )
    structure = getattr(model, "input", inputs)
    if isinstance(structure, (list, tuple)) and len(structure) == 1:
        (structure,) = structure
    return keras.tree.map_structure(
        lambda x: _known((size, *x.shape[1:]), x.dtype), structure
    )


def _of_shapes(model: keras.Layer, shapes: Any) -> Any:
    inputs = getattr(model, "inputs", None) or ()
    dtypes = iter([x.dtype for x in inputs])

    def symbolic(shape: Any) -> Any:
        dtype = next(dtypes, keras.config.floatx())
        return None if shape is None else _known(tuple(shape), dtype)

    return keras.tree.map_shape_structure(symbolic, shapes)


def _symbolic(x: Any) -> Any:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None:
        raise TypeError(
            "`batch` is neither arrays, nor shapes, nor a size. Received: "
            f"{x!r} (of type {type(x).__name__}). {_ALLOWED}"
        )
    name = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    if name == "float64" and isinstance(x, np.ndarray):
        name = keras.config.floatx()  # as Keras converts it
    return _known(tuple(shape), name)


def _known(shape: tuple[Any, ...], dtype: Any) -> Any:
    if None in shape or not all(int(size) >= 0 for size in shape):
        raise ValueError(
            f"The shape of the batch has an unknown size. Received: {shape}. "
            f"{_ALLOWED}"
        )
    return keras.KerasTensor(tuple(int(size) for size in shape), dtype)


def _is_shape(x: Any) -> bool:
    """Return True for a tuple of sizes; a list of integers is not a shape."""
    return isinstance(x, tuple) and all(
        size is None
        or (isinstance(size, (int, np.integer)) and not isinstance(size, bool))
        for size in x
    )


def _are_shapes(x: Any) -> bool:
    if _is_shape(x) or x is None:
        return True
    values = x.values() if isinstance(x, dict) else x
    return isinstance(x, (list, tuple, dict)) and all(map(_are_shapes, values))


def map_arrays(function: Callable[[Any], Any], nested: Any) -> Any:
    """Apply a function to each array of nested ones; None stays None."""
    # A model may have an optional input.
    return keras.tree.map_structure(
        lambda x: None if x is None else function(x), nested
    )
