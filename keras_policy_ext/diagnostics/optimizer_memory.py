"""Bytes of the variables of an optimizer, made or still to be made."""

from __future__ import annotations

from typing import Any

import keras

from keras_policy_ext._keras import variable_values, walking
from keras_policy_ext.conversion import training
from keras_policy_ext.diagnostics.batches import size_of
from keras_policy_ext.layers.stored_weights import is_state


def bytes_of(model: keras.Layer) -> int | None:
    """Bytes of the optimizers of a model, each variable once.

    Returns:
        0 without an optimizer; None if one that has not trained does not say
        which variables it is going to make.
    """
    found: dict[int, Any] = {}
    models = [
        layer
        for layer in walking.layers_within(model)
        if isinstance(layer, keras.Model)
    ]
    for each in models:
        for optimizer in training.optimizers(each):
            variables = _variables(optimizer, each)
            if variables is None:
                return None
            found.update({id(v): v for v in variables})
    return sum(size_of(v) for v in found.values())


def _variables(
    optimizer: keras.Optimizer, model: keras.Model
) -> list[Any] | None:
    """Variables of an optimizer, with those of one that it wraps."""
    if not optimizer.built:
        optimizer = _built_copy(optimizer, model)
    return None if optimizer is None else list(optimizer.variables)


def _built_copy(optimizer: keras.Optimizer, model: keras.Model) -> Any:
    """An optimizer as it is after the first step, without memory.

    Returns:
        The copy; None if variables of it need values.
    """
    copy = type(optimizer).from_config(optimizer.get_config())
    weights = [v for v in model.trainable_variables if not is_state(v)]
    try:
        # What is made in such a scope has no values.
        with keras.StatelessScope():
            copy.build(weights)
            for variable in copy.variables:
                variable_values.let_wait_no_longer(variable)
    except ValueError:
        return None
    return copy
