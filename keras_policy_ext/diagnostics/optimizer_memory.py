"""The optimizers that a model has or would have, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_policy_ext._keras import (
    optimizer_variables,
    variable_values,
    walking,
)
from keras_policy_ext.conversion import training
from keras_policy_ext.diagnostics.forward_pass import size_of
from keras_policy_ext.layers.stored_weights import is_state
from keras_policy_ext.mixed_precision import StochasticRounding
from keras_policy_ext.optimizers import (
    QuantizedState,
    dequantize_state,
    quantize_state,
)
from keras_policy_ext.optimizers.conversion import copy_of, targets


class Owned(NamedTuple):
    """An optimizer, and the model or layer whose weights it updates."""

    optimizer: Any
    model: keras.Layer


def of_model(model: keras.Layer) -> list[Owned]:
    """Return the optimizers of a model and of the models in it."""
    return [
        Owned(optimizer, layer)
        for layer in walking.layers_within(model)
        if isinstance(layer, keras.Model)
        for optimizer in training.optimizers(layer)
    ]


def asked(model: keras.Layer, optimizer: Any) -> list[Owned]:
    """Return the optimizers that the argument `optimizer` of `memory` names.

    Raises:
        TypeError: If it is no optimizer, name or None.
        ValueError: If there is no such form of moments, or the model has no
            optimizer whose moments could have it.
    """
    if optimizer is None:
        return of_model(model)
    if isinstance(optimizer, str):
        training.check_moments(model, optimizer)
        return [
            Owned(
                quantize_state(copy_of(each.optimizer), optimizer), each.model
            )
            for each in of_model(model)
        ]
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` is no optimizer. Received: {optimizer!r} (of type "
            f"{type(optimizer).__name__}). Allowed: 'float8' or 'mx', for the "
            "model's optimizer with moments in one byte; a Keras optimizer; "
            "or None. Pass one of them."
        )
    return [Owned(optimizer, model)]


def round_at_random(found: Sequence[Owned]) -> bool:
    """Return True if a `StochasticRounding` is among optimizers."""
    return any(
        isinstance(each, StochasticRounding)
        for owned in found
        for each in optimizer_variables.optimizers_within(owned.optimizer)
    )


def are_quantized(found: Sequence[Owned]) -> bool:
    """Return True if an optimizer has moments in one byte a number."""
    return any(
        isinstance(each, QuantizedState)
        for owned in found
        for each in targets(owned.optimizer)
    )


def without_rounding(found: Sequence[Owned]) -> list[Owned]:
    """Return copies of optimizers without `StochasticRounding`."""
    return [
        Owned(_unwrapped(copy_of(each.optimizer)), each.model) for each in found
    ]


def stock(found: Sequence[Owned]) -> list[Owned]:
    """Return copies without `StochasticRounding`, with float32 moments."""
    return [
        Owned(dequantize_state(each.optimizer), each.model)
        for each in without_rounding(found)
    ]


def bytes_of(found: Sequence[Owned]) -> int | None:
    """Return the total bytes of optimizers.

    Returns:
        0 without an optimizer; None if one that is not built does not tell
        which variables it will create.
    """
    variables: dict[int, Any] = {}
    for optimizer, model in found:
        if not optimizer.built:
            optimizer = _built_copy(optimizer, model)
            if optimizer is None:
                return None
        variables.update({id(v): v for v in optimizer.variables})
    return sum(size_of(v) for v in variables.values())


def _unwrapped(optimizer: Any) -> Any:
    """Take `StochasticRounding` out of an optimizer that is not built."""
    if isinstance(optimizer, StochasticRounding):
        return optimizer.inner_optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, StochasticRounding):
        optimizer.inner_optimizer = inner.inner_optimizer
    return optimizer


def _built_copy(optimizer: Any, model: keras.Layer) -> Any:
    """Return a copy of an optimizer, built without allocating memory, or None.

    Returns:
        The copy; None if its variables need values.
    """
    copy = copy_of(optimizer)
    weights = [v for v in model.trainable_variables if not is_state(v)]
    try:
        # What is made in such a scope has no values.
        with keras.StatelessScope(), variable_values.not_noted():
            copy.build(weights)
            for variable in copy.variables:
                variable_values.let_wait_no_longer(variable)
    except ValueError:
        return None
    return copy
