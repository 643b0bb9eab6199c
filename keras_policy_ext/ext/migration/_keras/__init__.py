"""Find the classes of Keras's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext._keras import versions


def operation_class(
    function: Callable[..., Any],
    operands: int = 1,
    takes_list: bool = False,
    **options: Any,
) -> Any:
    """Return the operation class behind a function such as `keras.ops.add`.

    `keras.ops` exports only the functions, but a saved graph names the classes
    (keras 3.0 to 3.15). The class is read from the history of a symbolic
    result.

    Args:
        function: The function, such as `keras.ops.add`.
        operands: How many tensors it takes; they get the shape (3, 3).
        takes_list: Whether it takes them as a list.
        **options: Other arguments that it requires.

    Raises:
        ImportError: If symbolic tensors of this Keras have no history.
    """
    # A square shape: a matrix product takes it too.
    tensors = [keras.KerasTensor((3, 3)) for _ in range(operands)]
    result = function(tensors) if takes_list else function(*tensors, **options)
    history = getattr(result, "_keras_history", None)
    if history is None:
        raise versions.missing(
            "KerasTensor._keras_history",
            "the migration of TensorFlow operations",
        )
    return type(history.operation)
