"""Contacts of `moments` with Keras: the variables and steps of optimizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext._keras import optimizer_variables, put_around, versions
from keras_policy_ext._types import Tensor


def track(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> None:
    """Add a variable to those of an optimizer.

    `add_variable`, the public way, makes the variable (`_track_variable`, keras
    3.0 to 3.16).

    Raises:
        ImportError: If this Keras adds it otherwise.
    """
    if not hasattr(optimizer, "_track_variable"):
        raise versions.missing(
            "Optimizer._track_variable",
            "an optimizer whose state is stored in one byte a number",
            "Use the optimizer as it is.",
        )
    optimizer._track_variable(variable)


def around_loading(function: Callable[..., None]) -> None:
    """Have a function load optimizers in the place of Keras's method.

    It gets that method (`Optimizer.load_own_variables`, public) first. A
    stock optimizer asks nobody about the entries of a file that it reads.
    """
    put_around(keras.optimizers.Optimizer, "load_own_variables", function)


def around_making(function: Callable[..., Any]) -> None:
    """Have a function make optimizers of configs in the place of Keras.

    It gets the class method `from_config` (public) first. A stock class is
    asked for a config that is not its own, and refuses its entries.
    """
    put_around(keras.optimizers.Optimizer, "from_config", function)


def own_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Return the variables that an optimizer tracks itself, slots included.

    Public `variables` is another list where a class says so (`_variables`,
    keras 3.0 to 3.16).
    """
    return optimizer._variables


def steps_made(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Return the variable that counts the calls of `apply`.

    Public `iterations` counts the updates, and of a wrapper those inside
    (`_iterations`, keras 3.0 to 3.16).
    """
    return optimizer._iterations


def replicas_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the `tf.distribute` scope in which an optimizer was made, if any.

    A slot that is made elsewhere is no variable of each replica: all would
    update the same one. The strategy has no public name
    (`_distribution_strategy`, on TensorFlow, keras 3.0 to 3.16).
    """
    strategy = getattr(optimizer, "_distribution_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def layout_of(variable: keras.Variable) -> dict[str, Any]:
    """Return the layout of a variable as an argument of `keras.Variable`.

    It has no public name (`_layout`, on JAX, keras 3.0 to 3.16). Without it a
    distribution of Keras chooses one by the path.
    """
    layout = getattr(variable, "_layout", None)
    return {} if layout is None else {"layout": layout}


class KnowsParts:
    """A mixin for optimizers whose `update_step` may get a part of a weight.

    A part has the weight as `whole`. An optimizer finds the slots of a weight
    by `_var_key` (keras 3.0 to 3.16). `takes_parts` says if it still does.
    """

    def _var_key(self, variable: Any) -> Any:
        return super()._var_key(getattr(variable, "whole", variable))  # type: ignore[misc]


def takes_parts(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if slots are found by what `KnowsParts` changes."""
    found = hasattr(keras.optimizers.Optimizer, "_get_variable_index")
    return found and hasattr(keras.optimizers.Optimizer, "_var_key")


def slots_of_variable(
    optimizer: keras.optimizers.Optimizer, variable: Any
) -> list[keras.Variable]:
    """Return the slots of a variable, but no averages and accumulators.

    Where Keras lacks what `takes_parts` looks for, there are none.
    """
    if not takes_parts(optimizer):
        return []
    # Only at one place of each list: a step asks this for each variable.
    count = len(optimizer._trainable_variables)
    index = optimizer._get_variable_index(variable)
    others = optimizer_variables.NO_SLOTS
    found = [
        value[index]
        for name, value in vars(optimizer).items()
        if name not in others and isinstance(value, list)
        if len(value) == count
    ]
    return [x for x in found if x is None or isinstance(x, keras.Variable)]


@functools.cache
def fused_update(cls: Any) -> Callable[..., None] | None:
    """Return how Keras updates several weights at once, in place, or None.

    On PyTorch an object of a public class is one of a private class, with
    `_parallel_update_step` (keras 3.0 to 3.16). It takes a tenth of the calls
    of `update_step`, which is used where it is missing.

    Args:
        cls: A public class of optimizers.

    Returns:
        `update(optimizer, gradients, variables, learning_rate)`.
    """
    made = type(cls.__new__(cls))
    return getattr(made, "_parallel_update_step", None)


class StoredInParts:
    """A variable that a `tf.train.Checkpoint` stores as other variables.

    TensorFlow asks each variable for its tensors and hands them back, by
    methods that Keras's variables have (`_serialize_to_tensors`,
    `_restore_from_tensors`, keras 3.12 to 3.16, TensorFlow 2.21). They would
    read the computed value. Without them, the checkpoint lacks the variable.
    Expires with variables that have no value of their own.
    """

    stored_parts: dict[str, keras.Variable]
    """The other variables, by the names of their entries in a checkpoint."""

    def _serialize_to_tensors(self) -> dict[str, Any]:
        found = {}
        for name, part in self.stored_parts.items():
            (found[name],) = part._serialize_to_tensors().values()
        return found

    def _restore_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, part in self.stored_parts.items():
            part.assign(tensors[name])
