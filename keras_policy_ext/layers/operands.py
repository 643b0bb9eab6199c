"""Checks of a float8 layer's operands, activations, and contraction hooks."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_policy_ext import backends
from keras_policy_ext._types import Tensor
from keras_policy_ext.contractions import Einsum, equations

_RECOMPUTED = (
    keras.activations.gelu,
    keras.activations.silu,
    keras.activations.mish,
    keras.activations.hard_silu,
)
"""Activations whose own gradient saves more than their inputs."""


def activated(activation: Any, x: Tensor) -> Tensor:
    """Return `activation(x)`; save as little as possible for the gradient.

    Args:
        activation: The activation of a layer; None for none.
        x: A tensor of any shape.
    """
    if activation is None:
        return x
    if activation is keras.activations.relu:
        return backends.current.relu(x)
    if activation in _RECOMPUTED:
        return backends.current.recomputed(activation, x)
    return activation(x)


Hook = Callable[[Any, Any], None]

_hooks: contextvars.ContextVar[tuple[Hook, ...]] = contextvars.ContextVar(
    "hooks of contractions", default=()
)


@contextlib.contextmanager
def contraction_hook(hook: Hook) -> Iterator[None]:
    """In the block, call `hook(state, inputs)` at every contraction.

    Only contractions of this thread and asyncio task count.

    Args:
        hook: Called with the state variable of the contracted kernel, None
            under a recipe without state, and the inputs (any shape) in the
            compute dtype.
    """
    token = _hooks.set((*_hooks.get(), hook))
    try:
        yield
    finally:
        _hooks.reset(token)


def has_contraction_hooks() -> bool:
    """Return True inside a `contraction_hook` block."""
    return bool(_hooks.get())


def call_hooks(state: Any, inputs: Tensor) -> None:
    """Call each hook of the `contraction_hook` blocks for one contraction."""
    for hook in _hooks.get():
        hook(state, inputs)


def static_flag(training: Any) -> bool | None:
    """Return `training` as a bool; None if it is None or a traced tensor."""
    known = isinstance(training, (bool, int, np.bool_))
    return bool(training) if known else None


def no_operands(inputs: Tensor, kernel: keras.Variable) -> str:
    """Return an error message: the operands are no tensor and weight."""
    return (
        "The operands are not a tensor and a weight of this layer. Received: "
        f"inputs {inputs!r}, kernel {kernel!r}. Allowed: a tensor or array, "
        "and a weight which the layer made with `add_weight`. Make the weight "
        "in `build` or `__init__`."
    )


def is_floating_tensor(x: Tensor) -> bool:
    """Return True if `x` is a tensor with a floating dtype."""
    return keras.ops.is_tensor(x) and is_floating(x.dtype)


def is_floating(dtype: Any) -> bool:
    """Return True if a dtype is floating."""
    return "float" in keras.backend.standardize_dtype(dtype)


def contraction_of(
    equation: str, first: tuple[Any, ...], second: tuple[Any, ...]
) -> Einsum:
    """Return the `Einsum` of an equation for operands of these shapes.

    Args:
        equation: An equation of two operands; `...` is allowed.
        first: The shape of the first operand, None for an unknown size.
        second: The shape of the second operand.

    Raises:
        ValueError: If the equation is malformed or does not fit the operands.
    """
    explicit = equations.explicit(equation, len(first), len(second))
    check_sizes(explicit, first, second)
    return Einsum(explicit)


known_contraction_of = functools.lru_cache(maxsize=4096)(contraction_of)
"""Return `contraction_of`, cached: the same object for equal arguments."""


def check_sizes(equation: str, first: Tensor, second: Tensor) -> None:
    """Raise if two operands of an einsum differ in the size of a letter.

    An einsum would broadcast a size of 1.
    """
    terms = equations.split(equation)
    sizes = dict(zip(terms.first, first, strict=True))
    for axis, size in zip(terms.second, second, strict=True):
        other = sizes.get(axis, size)
        if None not in (size, other) and size != other:
            raise ValueError(
                f"The operands of {equation!r} differ in axis {axis!r}. "
                f"Received: shapes {tuple(first)} and {tuple(second)}. "
                "Allowed: equal sizes. Transpose or repeat the inputs first."
            )
