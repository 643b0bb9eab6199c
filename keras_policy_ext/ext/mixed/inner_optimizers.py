"""Optimizers inside of wrappers: their checks, and which wrapper has one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_policy_ext._keras import optimizer_variables

# The wrapper of each optimizer that has one, a LossScaleOptimizer or a
# StochasticRounding: an optimizer in two of them would be updated by both.
_wrappers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def wrapper_of(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer | None:
    """Return the loss scaler that wraps an optimizer, or None."""
    reference = _wrappers.get(optimizer)
    return None if reference is None else reference()


def register_wrapper(
    optimizer: keras.optimizers.Optimizer, wrapper: keras.optimizers.Optimizer
) -> None:
    """Record which loss scaler wraps an optimizer, while both exist."""
    _wrappers[optimizer] = weakref.ref(wrapper)


def check_inner(optimizer: object) -> None:
    """Raise if an object is not an optimizer that can be wrapped.

    Raises:
        TypeError: If it is no optimizer, or a loss scaler itself.
        ValueError: If it scales the loss itself or has a wrapper.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "`inner_optimizer` is not a Keras optimizer. Received: "
            f"{optimizer!r} (of type {type(optimizer).__name__}). Allowed: an "
            "instance of a class of keras.optimizers. Pass for instance "
            "keras.optimizers.Adam()."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "`inner_optimizer` is a LossScaleOptimizer itself, and the loss "
            f"would be scaled twice. Received: {optimizer!r}. Allowed: an "
            "optimizer that does not scale the loss. Pass its "
            "`inner_optimizer`, or use it as it is."
        )
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            "`inner_optimizer` scales the loss itself. Received: an optimizer "
            f"with loss_scale_factor={optimizer.loss_scale_factor!r}. Allowed: "
            "an optimizer with loss_scale_factor=None. Leave "
            "loss_scale_factor out, and pass to the wrapper dynamic=False, "
            f"initial_scale={optimizer.loss_scale_factor!r}."
        )
    check_not_wrapped(optimizer, "LossScaleOptimizer")


def check_not_wrapped(optimizer: keras.optimizers.Optimizer, by: str) -> None:
    """Raise if another optimizer already wraps this optimizer.

    Raises:
        ValueError: If it is wrapped.
    """
    wrapper = wrapper_of(optimizer)
    if wrapper is not None:
        there = type(wrapper).__name__
        raise ValueError(
            "`inner_optimizer` is wrapped already, and would be updated "
            f"twice. Received: {optimizer.name!r}, which {wrapper.name!r} (of "
            f"type {there}) wraps. Allowed: an optimizer that nothing wraps. "
            f"Use the existing {there}, or make a new optimizer."
        )


def variables_of(
    optimizer: keras.optimizers.Optimizer,
    given: Iterable[keras.Variable] | None,
    gradients: int,
) -> list[keras.Variable]:
    """Return the variables for the gradients passed to `apply`, in order.

    Raises:
        ValueError: If there are no variables, or their number differs from
            that of the gradients.
    """
    if given is None and not optimizer.built:
        raise ValueError(
            "The optimizer does not know its variables yet. Received: "
            "gradients with trainable_variables=None. Allowed: that, once "
            "the optimizer is built. Call "
            "optimizer.build(model.trainable_variables), or pass the "
            "variables too."
        )
    known = optimizer_variables.known_to_optimizer(optimizer) or []
    variables = known if given is None else list(given)
    if gradients != len(variables):
        raise ValueError(
            "The numbers of gradients and variables differ. Received: "
            f"{gradients} gradients and {len(variables)} variables. Allowed: "
            "one gradient for each variable. Pass them in the same order."
        )
    return variables


def read_inner(
    config: object, custom_objects: Mapping[str, object] | None
) -> keras.optimizers.Optimizer:
    """Return the optimizer for the entry `inner_optimizer` in a config."""
    if not isinstance(config, Mapping):
        return config
    return keras.optimizers.deserialize(
        dict(config), custom_objects=custom_objects
    )
