"""The optimizers that a model has or would have, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_policy_ext._keras import optimizer_variables, variable_values
from keras_policy_ext._keras.walking import layers_within
from keras_policy_ext.conversion.training import optimizers as optimizers_of
from keras_policy_ext.ext.delayed import _keras as delayed_keras
from keras_policy_ext.ext.memory import saved_tensors
from keras_policy_ext.ext.memory.saved_tensors import Update
from keras_policy_ext.ext.moments.conversion import copy_of, targets
from keras_policy_ext.ext.sampling.symbolic_batches import size_of
from keras_policy_ext.layers.state_of import is_state
from keras_policy_ext.mixed_precision import StochasticRounding
from keras_policy_ext.optimizers import (
    QuantizedState,
    dequantize_state,
    quantize_state,
)
from keras_policy_ext.seams import ModelChange, followers


class Owned(NamedTuple):
    """An optimizer, and the model or layer whose weights it updates."""

    optimizer: Any
    model: keras.Layer


def of_model(model: keras.Layer) -> list[Owned]:
    """Return the optimizers of a model and of the models in it."""
    return [
        Owned(optimizer, layer)
        for layer in layers_within(model)
        if isinstance(layer, keras.Model)
        for optimizer in optimizers_of(layer)
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
        found = of_model(model)
        optimizers = [each.optimizer for each in found]
        change = ModelChange(model, True, lambda: optimizers, optimizer)
        for follower in followers():
            follower.before(change)  # It raises as `convert` would.
        return [
            Owned(quantize_state(copy_of(one), optimizer), each.model)
            for one, each in zip(optimizers, found, strict=True)
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
    """Return the total bytes of optimizers, 0 without one; None if unknown."""
    variables: dict[int, Any] = {}
    for optimizer, model in found:
        if not optimizer.built:
            optimizer = _built_copy(optimizer, model)
            if optimizer is None:  # What it will create is not known.
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
    """Return a copy of an optimizer, built without memory, or None."""
    copy = copy_of(optimizer)
    weights = [v for v in model.trainable_variables if not is_state(v)]
    try:
        # What is made in such a scope has no values.
        with keras.StatelessScope(), delayed_keras.not_noted():
            copy.build(weights)
            for variable in copy.variables:
                variable_values.cancel_initialization(variable)
    except ValueError:  # Its variables need values.
        return None
    return copy


def update_of(found: Sequence[Owned], model: keras.Layer) -> Update | None:
    """Return the update of a model by its optimizer as a function, or None."""
    for optimizer, owner in found:
        if owner is not model:
            continue
        if not optimizer.built:
            optimizer = _built_copy(optimizer, model)
        weights = optimizer_variables.known_to_optimizer(optimizer)
        if weights is None:  # The variables of the optimizer need values.
            return None
        return Update(optimizer.stateless_apply, weights, optimizer.variables)
    return None


_SAMPLE = 1 << 17
"""The numbers of a sample weight: those of a part that is updated at once."""


def update_bytes(found: Sequence[Owned]) -> int | None:
    """Return the most bytes that an eager update holds, besides variables.

    Some updates hold copies of all weights or gradients, some of one weight at
    a time, some of a part of one. So the update of one sample weight, of two,
    and of one that is twice as large are taken.

    Returns:
        The bytes, beside weights, gradients and the optimizer; 0 without an
        optimizer; None if that is not known, as where steps are compiled.
    """
    most = 0
    for optimizer, model in found:
        weights = [v for v in model.trainable_variables if not is_state(v)]
        sizes = [math.prod(v.shape) for v in weights]
        if not sizes:
            continue
        largest = weights[sizes.index(max(sizes))]
        try:
            one, two, large = (
                _bytes_of_update(optimizer, largest.dtype, lengths)
                for lengths in ([1], [1, 1], [2])
            )
        # A custom optimizer may want other weights, and fail in any way.
        except Exception:
            return None
        if one is None or two is None or large is None:
            return None
        for_all, for_largest = two - one, large - two
        # A part of a weight is no larger than the largest weight.
        for_part = (one - for_all - for_largest) * min(max(sizes), _SAMPLE)
        numbers = for_all * sum(sizes) + for_largest * max(sizes) + for_part
        most = max(most, round(numbers / _SAMPLE))
    return most


def _bytes_of_update(
    optimizer: Any, dtype: str, lengths: Sequence[int]
) -> int | None:
    """Return the most bytes of the updates of weights of some samples' size."""
    copy = copy_of(optimizer)
    shapes = [(length, _SAMPLE) for length in lengths]
    weights = [keras.Variable(np.zeros(s), dtype=dtype) for s in shapes]
    gradients = [ops.zeros(shape, dtype) for shape in shapes]
    with delayed_keras.not_noted():
        copy.build(weights)

    def update() -> None:
        for _ in range(optimizer.gradient_accumulation_steps or 1):
            copy.apply(gradients, weights)

    variables = [v.value for v in (*weights, *copy.variables)]
    return saved_tensors.of_backend().most_held(
        update, [*variables, *gradients]
    )
