"""Gradients beside the variables that they belong to."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_policy_ext._types import Tensor


def as_accumulated(
    grads: list[Tensor | None], variables: list[keras.Variable]
) -> list[Tensor | None]:
    """Gradients in the dtypes of the variables: Keras accumulates in those."""
    return [
        grad if grad is None else ops.cast(grad, variable.dtype)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def may_belong(
    grads: list[Tensor | None], variables: list[keras.Variable]
) -> bool:
    """Return True if these can be gradients of the variables, in this order."""
    return len(grads) == len(variables) and all(
        grad is None or tuple(grad.shape) == tuple(variable.shape)
        for grad, variable in zip(grads, variables, strict=True)
    )


def is_overwritten(variable: keras.Variable) -> bool:
    """Return True if an optimizer assigns the gradient of a variable to it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def with_scaled_states(
    grads: list[Tensor | None], variables: list[keras.Variable], scale: Any
) -> list[Tensor | None]:
    """Undo the division of the observations of float8 state by a scale."""
    scale = ops.convert_to_tensor(scale)
    return [
        ops.multiply(grad, ops.cast(scale, grad.dtype))
        if grad is not None and is_overwritten(variable)
        else grad
        for grad, variable in zip(grads, variables, strict=True)
    ]
