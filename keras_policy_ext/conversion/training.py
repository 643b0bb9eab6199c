"""Let compiled models continue training after their variables have changed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from keras_policy_ext import backends, seams
from keras_policy_ext._keras import (
    built_layers,
    keras_hub,
    optimizer_variables,
    walking,
)
from keras_policy_ext._keras.optimizer_facts import is_overwritten
from keras_policy_ext.conversion.candidates import leaves, path_of
from keras_policy_ext.files import model_files
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.layers.state_of import is_state
from keras_policy_ext.layers.transaction import unchanged_on_error

_OF_FRAMEWORKS = ("keras", "torch", "tensorflow", "keras_policy_ext")


class Compiled(NamedTuple):
    """A compiled function in a layer: its name is the path with the attribute.

    For a method, `layer` is the one whose class defines it; else None.
    """

    name: str
    function: Any
    layer: keras.Layer | None


def compiled_in(model: keras.Layer) -> list[Compiled]:
    """Return the compiled functions that a model and its layers hold."""
    is_compiled = backends.current.is_compiled
    by_ids: dict[tuple[int, int], Compiled] = {}
    for layer in walking.layers_within(model):
        path = path_of(layer)
        for name, value in _callables_held_by(layer):
            function = _innermost_function(value)
            if is_compiled(function):  # Once, whoever holds it.
                compiled = Compiled(f"{path}.{name}", function, layer=None)
                by_ids.setdefault((id(function), 0), compiled)
        for name, value in _members_of_user_classes(layer):
            function = _innermost_function(value)
            if is_compiled(function):  # For each layer of the class.
                compiled = Compiled(f"{path}.{name}", function, layer)
                by_ids[id(function), id(layer)] = compiled
    return list(by_ids.values())


def _callables_held_by(layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yield the callable attributes of a layer, and those in lists."""
    for name, value in walking.attributes(layer).items():
        if name in walking.STEPS:  # Of the trainer: traced anew anyway.
            continue
        is_leaf = not isinstance(value, (dict, list, tuple))
        for suffix, each in [("", value)] if is_leaf else leaves(value):
            if callable(each) and not isinstance(each, keras.Layer):
                yield name + suffix, each


def _members_of_user_classes(layer: keras.Layer) -> Iterator[tuple[str, Any]]:
    """Yield (name, member) of the user's classes in a layer's MRO."""
    for cls in type(layer).__mro__:
        package = cls.__module__.partition(".")[0]
        if package not in (*_OF_FRAMEWORKS, "builtins"):
            yield from vars(cls).items()


def _innermost_function(value: Any) -> Any:
    """Return the function inside `functools.partial`s, or `value` itself."""
    while isinstance(value, functools.partial):
        value = value.func
    return value


@contextlib.contextmanager
def changing(model: keras.Layer) -> Iterator[tuple[str, ...]]:
    """In the block, a model may be changed; an error undoes the changes.

    New variables are created in the scope of those of the model. On exit,
    optimizers get the new variables, and compiled steps are dropped. It yields
    the names of the functions that will be traced again.
    """
    with (
        unchanged_on_error(parts(model)),
        continued(model) as retraced,
        replicas(model),
    ):
        yield retraced


@contextlib.contextmanager
def continued(model: keras.Layer) -> Iterator[tuple[str, ...]]:
    """On exit of the block, update optimizers to the model's new variables.

    Afterwards each optimizer in the model knows the present variables, and
    keeps its slots and its iteration; steps are traced anew; PyTorch sees the
    parameters. Nothing is updated if the block fails: see `layers.transaction`.
    It yields the names of the functions traced anew.
    """
    models = _models_in(model)
    # Kept until the exit, so that no other variable gets the id of one.
    old_variables = model.variables
    slots = _slots(model)
    compiled = compiled_in(model)
    yield tuple(each.name for each in compiled)
    # PyTorch's parameters, in Keras's order: those of inner layers first.
    built_layers.track_again(reversed(walking.layers_within(model)))
    present = {id(v) for v in model.variables}
    old = {id(v) for v in old_variables}
    for each in models:
        _update_optimizers(each, gone=old - present, added=present - old)
    for each in compiled:
        backends.current.forget_traces(each.function, each.layer)
    present |= {id(v) for v in _slots(model)}
    gone = [v for v in [*old_variables, *slots] if id(v) not in present]
    # On TensorFlow graphs would keep the memory of weights and slots. States
    # are small, and a function that the user compiled before still reads them.
    backends.current.let_go([v for v in gone if not is_state(v)])


def _slots(model: keras.Layer) -> list[keras.Variable]:
    """Return the variables of all optimizers in a model."""
    return [v for each in all_optimizers(model) for v in each.variables]


def parts(model: keras.Layer) -> list[Any]:
    """Return all layers in a model, then all optimizers of its models."""
    return [*walking.layers_within(model), *all_optimizers(model)]


def check_optimizers(model: keras.Layer) -> None:
    """Raise if a model's optimizer cannot take new float8 state.

    Raises:
        ImportError: If this Keras does not tell what variables a built
            optimizer knows.
        ValueError: If a `keras.optimizers.MultiOptimizer` is built: it assigns
            variables to its optimizers only once, when it is built.
    """
    multiple = getattr(keras.optimizers, "MultiOptimizer", ())
    for each_model in _models_in(model):
        for optimizer in optimizers(each_model):
            within = optimizer_variables.optimizers_within(optimizer)
            for each in within:
                optimizer_variables.check_can_retarget(each)
            if any(isinstance(x, multiple) and x.built for x in within):
                raise ValueError(
                    f"The optimizer of {each_model.name!r} cannot take new "
                    "state. Received: a MultiOptimizer that has been used, "
                    "which assigns variables when it is built. Allowed: one "
                    "that has not been, or another optimizer. Convert before "
                    "`fit`, or compile with a new optimizer and convert then."
                )


def replicas(model: keras.Layer) -> AbstractContextManager[object]:
    """Return the `tf.distribute` scope in which a model was made, if any."""
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def _update_optimizers(
    model: keras.Model, gone: set[int], added: set[int]
) -> None:
    """Give a model's optimizers the variables that the model has now.

    `gone` and `added` are the ids of variables that it lost and got.
    """
    walking.forget_compiled_functions(model)
    walking.forget_gone_layers(model)
    keras_hub.count_adapted_layers_again(model)
    for optimizer in optimizers(model):
        within = optimizer_variables.optimizers_within(optimizer)
        variables = [
            optimizer_variables.known_to_optimizer(each) for each in within
        ]
        is_own = optimizer is getattr(model, "optimizer", None)
        has_all = is_own and any(
            _has_all_weights(model, optimized, added) for optimized in variables
        )
        for each, optimized in zip(within, variables, strict=True):
            if optimized is None:  # It is not built.
                continue
            new = _ids_of_states(model, optimized, has_all)
            # An optimizer with substitutes for the weights gets states alone.
            if has_all and not _has_substitutes(model, optimized, gone):
                new |= {
                    id(v) for v in model.trainable_variables if id(v) in added
                }
            to_optimize = _to_optimize(optimized, model, new, gone)
            if [id(v) for v in to_optimize] != [id(v) for v in optimized]:
                optimizer_variables.retarget_optimizer(each, to_optimize)


def change_of(
    model: keras.Layer, *, to_float8: bool, optimizer: Any = None
) -> seams.ModelChange:
    """Return a change of a model, as followers see it."""

    def find_optimizers() -> list[keras.optimizers.Optimizer]:
        return [x for each in _models_in(model) for x in optimizers(each)]

    return seams.ModelChange(model, to_float8, find_optimizers, optimizer)


def before(change: seams.ModelChange) -> list[tuple[seams.Follower, Any]]:
    """Return all followers, each with what it has to know after a change.

    Raises:
        ImportError: If no follower acts on the argument `optimizer`.
        Exception: What a follower raises that cannot follow.
    """
    followers = seams.followers()
    option = change.optimizer_option
    takes_it = any(each.takes_optimizer_option for each in followers)
    if option is not None and not takes_it:
        raise ImportError(
            "The state of optimizers is stored in one byte a number by "
            "keras_policy_ext.optimizers, which is not installed. Received: "
            f"optimizer={option!r}. Allowed without it: None. Leave "
            "`optimizer` out, or install the whole package."
        )
    return [(each, each.before(change)) for each in followers]


def after(
    change: seams.ModelChange, notes: list[tuple[seams.Follower, Any]]
) -> None:
    """Have all followers follow a change, with what `before` returned."""
    for follower, note in notes:
        follower.after(change, note)


def all_optimizers(model: keras.Layer) -> list[keras.optimizers.Optimizer]:
    """Return all optimizers in a model, including wrapped optimizers."""
    return [
        each
        for each_model in _models_in(model)
        for optimizer in optimizers(each_model)
        for each in optimizer_variables.optimizers_within(optimizer)
    ]


def _models_in(model: keras.Layer) -> list[keras.Model]:
    """Return a model and the models in it."""
    layers = walking.layers_within(model)
    return [layer for layer in layers if isinstance(layer, keras.Model)]


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizer of `compile`, then those in other attributes."""
    found: list[Any] = []
    seen: set[int] = set()  # A list may be in itself.
    # Reversed: the next one is taken from the end.
    waiting = [*walking.attributes(model).values()][::-1]
    waiting.append(getattr(model, "optimizer", None))
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            waiting.extend([*each.values()][::-1])
        elif isinstance(each, (list, tuple)):
            waiting.extend(each[::-1])
        elif isinstance(each, keras.optimizers.Optimizer):
            found.append(each)
    return found


def _has_substitutes(
    model: keras.Model, optimized: list[keras.Variable], gone: set[int]
) -> bool:
    """Return True if an optimizer knows only other variables than a model's.

    Some keep copies of the weights and update those.
    """
    ids = {id(v) for v in optimized}
    return bool(ids) and ids.isdisjoint(gone | {id(v) for v in model.variables})


def _has_all_weights(
    model: keras.Model, optimized: list[keras.Variable] | None, added: set[int]
) -> bool:
    """Return True if an optimizer was built with all trainable weights."""
    # Weights that were added since then do not count. A wrapped optimizer may
    # have substitutes for the weights, and none of the weights themselves.
    if optimized is None:
        return False
    ids = {id(v) for v in optimized}
    if ids.isdisjoint(id(v) for v in model.variables):
        return True
    weights = (v for v in model.trainable_variables if not is_overwritten(v))
    return all(id(v) in ids | added for v in weights)


def _ids_of_states(
    model: keras.Model, optimized: list[keras.Variable], has_all: bool
) -> set[int]:
    """Return the ids of the float8 states that an optimizer has to update.

    `optimized` are its variables; `has_all`: all trainable weights are.
    """
    # States of the layers that it optimizes, trainable or not. The optimizer of
    # `compile` gets all trainable states if it has all trainable weights.
    ids = {id(v) for v in optimized}
    return {
        id(state)
        for layer in walking.layers_within(model)
        if isinstance(layer, Float8Mixin)
        for state in layer.float8_state.matrices
        if (has_all and state.trainable)
        or any(id(v) in ids for v in layer.weights)
    }


def _to_optimize(
    optimized: list[keras.Variable],
    model: keras.Model,
    new: set[int],
    gone: set[int],
) -> list[keras.Variable]:
    """Return an optimizer's variables, without `gone` and with `new` ones.

    Both are ids of variables. The order is that of `model.variables`.
    """
    # A state follows the variable that precedes it in `model.variables`. So the
    # order is again that of `trainable_variables`, which the trainers rely on,
    # and of lists that a custom loop joins from several parts.
    variables = [v for v in optimized if id(v) not in gone]
    place = {id(v): i for i, v in enumerate(variables)}
    after: dict[int, list[Any]] = {}
    preceding = -1
    for variable in model.variables:
        if id(variable) in place:
            preceding = place[id(variable)]
        elif id(variable) in new:
            after.setdefault(preceding, []).append(variable)
    for index in sorted(after, reverse=True):
        variables[index + 1 : index + 1] = after[index]
    return variables


def may_differ_in_loss_scaler(model: keras.Model) -> bool:
    """Return True if a loss scaler may be in a model and not in its file.

    Or in the file alone: the optimizer is a scaler, or `compile` would put one
    around it with some backend or policy.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return False
    if hasattr(optimizer, "inner_optimizer"):
        return True
    return any(each.may_wrap_optimizer(model) for each in seams.followers())


def restore(model: keras.Model, weights: str) -> bool:
    """Put a loss scaler around the optimizer, or take it off, as in a file.

    Return True if that has changed the optimizer.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return False
    saved_with_scaler = model_files.has_scaler(weights)
    inner = getattr(optimizer, "inner_optimizer", None)
    if saved_with_scaler in (None, inner is not None):
        return False
    if saved_with_scaler:
        wrapper: Any = keras.optimizers.LossScaleOptimizer
        inner = wrapper(optimizer, name="loss_scale_optimizer")
    model.optimizer = inner
    with replicas(model):
        model.optimizer.build(model.trainable_variables)
    return True
