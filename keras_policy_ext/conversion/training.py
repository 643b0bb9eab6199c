"""Compiled models go on training after their variables have changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_policy_ext import _keras_compat
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.state import StateVariable


@contextlib.contextmanager
def continued(model: Any) -> Iterator[None]:
    """Let optimizers and compiled steps follow what the block changes.

    Afterwards each optimizer in the model knows the variables that there
    are, with its slots and its iteration; steps are traced anew; PyTorch sees
    the parameters.

    Args:
        model: A built model or layer.
    """
    models = [
        layer
        for layer in _keras_compat.layers_within(model)
        if isinstance(layer, keras.Model)
    ]
    states = [v for v in model.variables if _is_state(v)]
    try:
        yield
    finally:
        _keras_compat.track_again(reversed(_keras_compat.layers_within(model)))
        present = {id(v) for v in model.variables}
        gone = {id(v) for v in states} - present
        for each in models:
            _follow(each, gone)


def check_optimizers(model: Any) -> None:
    """Raise if an optimizer could not go on with states that come now.

    Raises:
        ValueError: If a `keras.optimizers.MultiOptimizer` is built: it asks
            once, when it is built, which variable goes to which optimizer.
    """
    multiple = getattr(keras.optimizers, "MultiOptimizer", ())
    for layer in _keras_compat.layers_within(model):
        if not isinstance(layer, keras.Model):
            continue
        for optimizer in _optimizers(layer):
            within = _keras_compat.optimizers_within(optimizer)
            if any(isinstance(x, multiple) and x.built for x in within):
                raise ValueError(
                    f"The optimizer of {layer.name!r} cannot take new state. "
                    "Received: a MultiOptimizer that has been used, which "
                    "assigns variables when it is built. Allowed: one that "
                    "has not been, or another optimizer. Convert before "
                    "`fit`, or compile with a new optimizer and convert then."
                )


def replicas(model: Any) -> Any:
    """The scope in which the variables of a model were made."""
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _is_state(variable: Any) -> bool:
    """Whether a variable is float8 state, of this package or of Keras."""
    return isinstance(variable, StateVariable) or (
        getattr(variable, "overwrite_with_gradient", False)
    )


def _follow(model: Any, gone: set[int]) -> None:
    _keras_compat.forget_compiled_functions(model)
    _keras_compat.count_adapted_layers_again(model)
    for optimizer in _optimizers(model):
        is_own = optimizer is getattr(model, "optimizer", None)
        for each in _keras_compat.optimizers_within(optimizer):
            known = _keras_compat.known_to_optimizer(each)
            if known is None:
                continue
            new = _states(model, known, is_own)
            wanted = _wanted(known, model, new, gone)
            if [id(v) for v in wanted] != [id(v) for v in known]:
                _keras_compat.retarget_optimizer(each, wanted)


def _optimizers(model: Any) -> list[Any]:
    """The optimizer of `compile`, and those that a model has besides."""
    candidates = (getattr(model, "optimizer", None), *vars(model).values())
    found = {
        id(each): each
        for each in candidates
        if isinstance(each, keras.optimizers.Optimizer)
    }
    return list(found.values())


def _states(model: Any, known: list[Any], is_own: bool) -> set[int]:
    """The states that an optimizer is to know.

    Those of the layers that it optimizes, frozen since or not; the optimizer
    of `compile` has all layers that are not frozen.
    """
    ids = {id(v) for v in known}
    return {
        id(state)
        for layer in _keras_compat.layers_within(model)
        if isinstance(layer, Float8Mixin)
        for state in layer.float8_state.matrices
        if (is_own and state.trainable)
        or any(id(v) in ids for v in layer.weights)
    }


def _wanted(
    known: list[Any], model: Any, new: set[int], gone: set[int]
) -> list[Any]:
    """The variables to optimize: those known, with today's states.

    In the order of `variables`, which is that of `trainable_variables`, by
    which the trainers go, whatever is frozen now. What is another model's is
    kept where it was.
    """
    remembered = {id(v) for v in known}
    wanted = [v for v in model.variables if id(v) in remembered or id(v) in new]
    present = {id(v) for v in wanted}
    others = [
        (i, v)
        for i, v in enumerate(known)
        if id(v) not in present and id(v) not in gone
    ]
    for index, variable in others:
        wanted.insert(index, variable)
    return wanted
