"""The variables that an optimizer was built with, and their slots."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

from keras_policy_ext._keras import versions
from keras_policy_ext._keras.built_layers import tracker_of

try:
    from keras.src.utils import tracking as _tracking
except ImportError:  # Keras has moved it: see `_replace_list`.
    _tracking = None


def known_to_optimizer(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable] | None:
    """Return the variables with which an optimizer was built, or None."""
    # They are in `_trainable_variables` (keras 3.0 to 3.16).
    if not getattr(optimizer, "built", False):
        return None
    variables = getattr(optimizer, "_trainable_variables", None)
    return None if variables is None else list(variables)


def optimizers_within(optimizer: object) -> list[keras.optimizers.Optimizer]:
    """Return an optimizer, then the optimizers that it wraps."""
    optimizers = []
    while isinstance(optimizer, keras.optimizers.Optimizer):
        optimizers.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizers


def check_can_retarget(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise ImportError if Keras lacks what `retarget_optimizer` needs."""
    if not getattr(optimizer, "built", False):
        return
    needed = ["_trainable_variables", "_trainable_variables_indices"]
    needed += ["_var_key", "_variables"]
    if optimizer.gradient_accumulation_steps:
        needed.append("_accumulated_gradients")
    for name in needed:
        if not hasattr(optimizer, name):
            raise versions.missing(
                f"Optimizer.{name}",
                "changing a model whose optimizer has been used",
                "Or convert before the first step, or compile the model with "
                "a new optimizer first.",
            )


def retarget_optimizer(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Replace the variables of a built optimizer; known ones keep slots.

    Slots are moved, not copied. An optimizer has, for each model variable in
    order, one entry in each of its lists of slots (keras 3.0 to 3.15), and
    variables for the accumulation of gradients. Variables that are overwritten
    with their gradient have no slots. If other variables are added or removed,
    or a custom optimizer has slots for overwritten ones too, slots are created
    by `build`, so that files have the same number.
    """
    old = optimizer._trainable_variables
    if _slots_change(old, variables) or _has_slots_for_all(
        optimizer, [*old, *variables]
    ):
        _build_again(optimizer, variables)
        return
    old_places = {id(v): i for i, v in enumerate(old)}
    places = [old_places.get(id(v)) for v in variables]
    names_of_slots = [
        name
        for name, value in vars(optimizer).items()
        if name not in ("_variables", "_accumulated_gradients")
        and _are_slots(value, old_places)
    ]
    _retarget_accumulators(optimizer, variables, places)
    for name in names_of_slots:
        slots = getattr(optimizer, name)
        moved = [None if i is None else slots[i] for i in places]
        _replace_list(optimizer, name, moved)
    _replace_known(optimizer, variables)


def _slots_change(old: list[keras.Variable], new: list[keras.Variable]) -> bool:
    """Return True if two lists differ in variables that have slots."""
    ids, new_ids = {id(v) for v in old}, {id(v) for v in new}
    changed = [v for v in old if id(v) not in new_ids]
    changed += [v for v in new if id(v) not in ids]
    # Variables that are overwritten with their gradient have none.
    return not all(getattr(v, "overwrite_with_gradient", 0) for v in changed)


def _has_slots_for_all(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> bool:
    """Return True if `build` makes slots even for overwritten variables."""
    # To see, another optimizer is built for one. Optimizers of Keras make only
    # accumulators of gradients for it, which do not count as slots here.
    overwritten = [
        v for v in variables if getattr(v, "overwrite_with_gradient", False)
    ]
    if not overwritten or type(optimizer).__module__.startswith("keras."):
        return False
    try:
        other = type(optimizer).from_config(optimizer.get_config())
        other.build(overwritten[:1])
    # The user's code may raise anything; its files do not load then either.
    except Exception:
        return False
    place = {id(overwritten[0]): 0}
    return any(
        _are_slots(value, place) and value[0] is not None
        for name, value in vars(other).items()
        if name not in NO_SLOTS
    )


def _build_again(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Build the slots of an optimizer again; known variables keep theirs."""
    # A fresh optimizer is built for the variables, and its slots for variables
    # that have slots already are replaced by those.
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(variables)
    known = optimizer._trainable_variables
    old_places = {id(v): i for i, v in enumerate(known)}
    new_places = {id(v): i for i, v in enumerate(variables)}
    # By the `id` of each slot of the fresh optimizer, the slot to use for it.
    to_use: dict[int, keras.Variable] = {}
    ids_of_old: set[int] = set()
    for name, fresh_slots in list(vars(fresh).items()):
        old_slots: Any = getattr(optimizer, name, None)
        if name in _ALL_VARIABLES or not _are_slots(fresh_slots, new_places):
            continue
        if not _are_slots(old_slots, old_places):
            continue
        ids_of_old |= {id(slot) for slot in old_slots}
        for variable, slot in zip(variables, fresh_slots, strict=True):
            place = old_places.get(id(variable))
            to_use[id(slot)] = slot if place is None else old_slots[place]
            # An average begins as the variable.
            if place is None and name == _AVERAGES and slot is not None:
                slot.assign(keras.ops.copy(variable.value))
        _replace_list(optimizer, name, [to_use[id(x)] for x in fresh_slots])
    # In the order of the fresh optimizer, as a file has them.
    slots = [to_use[id(v)] for v in fresh._variables if id(v) in to_use]
    others = [v for v in optimizer._variables if id(v) not in ids_of_old]
    _replace_variables(optimizer, [*others, *slots])
    _replace_known(optimizer, variables)


def _replace_known(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Set the variables that the optimizer updates, and their indices."""
    _replace_list(optimizer, "_trainable_variables", list(variables))
    optimizer._trainable_variables_indices = {
        optimizer._var_key(v): i for i, v in enumerate(variables)
    }
    fill_averages(optimizer, variables)


def fill_averages(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Replace each None among an optimizer's averages by `stand_in()`.

    That is a method of variables that optimizers must not average.
    """
    averages = getattr(optimizer, _AVERAGES, None) or []
    for index, average in enumerate(averages):
        variable = variables[index]
        if average is None and hasattr(variable, "stand_in"):
            averages[index] = variable.stand_in()


def _replace_variables(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Set the optimizer's own variables, and have Keras track them."""
    _replace_list(optimizer, "_variables", variables)
    config = tracker_of(optimizer).config
    is_variable, _ = config["variables"]
    config["variables"] = is_variable, optimizer._variables


_ALL_VARIABLES = ("_variables", "_trainable_variables")
_AVERAGES = "_model_variables_moving_average"

NO_SLOTS = (*_ALL_VARIABLES, _AVERAGES, "_accumulated_gradients")
"""The lists of variables that an optimizer has besides those of slots."""


def _are_slots(candidate: object, places: dict[int, int]) -> bool:
    """Return True if a list has a slot or None for each id in `places`.

    A slot is a variable that an optimizer keeps for a weight, such as a moment.
    """
    if not isinstance(candidate, list) or len(candidate) != len(places):
        return False
    return all(  # A slot is a variable, but none of those that have slots.
        slot is None
        or (isinstance(slot, keras.Variable) and id(slot) not in places)
        for slot in candidate
    )


def _retarget_accumulators(
    optimizer: keras.optimizers.Optimizer,
    variables: list[keras.Variable],
    places: list[int | None],
) -> None:
    """Add gradient accumulators for new variables, in `build`'s order."""
    # `places` has the old index of each variable, or None. Files store the
    # variables of an optimizer by their index: the order counts.
    if not optimizer.gradient_accumulation_steps:
        return
    old = list(optimizer._accumulated_gradients)
    ids = [id(v) for v in optimizer._variables]
    first_place = min((ids.index(id(v)) for v in old), default=len(ids))
    new = [
        optimizer.add_variable_from_reference(v, name="gradient_accumulator")
        if i is None
        else old[i]
        for v, i in zip(variables, places, strict=True)
    ]
    moved = {id(v) for v in (*old, *new)}
    others = [v for v in optimizer._variables if id(v) not in moved]
    ordered = others[:first_place] + new + others[first_place:]
    _replace_variables(optimizer, ordered)
    _replace_list(optimizer, "_accumulated_gradients", new)


def _replace_list(
    optimizer: keras.Optimizer, name: str, values: list[keras.Variable]
) -> None:
    """Replace a list of an optimizer, without Keras tracking its variables."""
    # As stock `build` does. TensorFlow's checkpoints refuse a tracked list
    # whose elements were replaced, and accept a new list.
    if _tracking is None:
        vars(optimizer)[name] = values
        return
    with _tracking.DotNotTrackScope():
        setattr(optimizer, name, values)


def untracked() -> Any:
    """Return a scope in which attributes of an optimizer are not tracked."""
    if _tracking is None:
        return contextlib.nullcontext()
    return _tracking.DotNotTrackScope()


def replace_slots(
    optimizer: keras.optimizers.Optimizer, replaced: dict[int, keras.Variable]
) -> None:
    """Put other variables, by the ids of the old ones, in the place of slots.

    They are in `_variables` and in lists of the optimizer's class (keras 3.0 to
    3.16).
    """
    for name, value in list(vars(optimizer).items()):
        if name == "_variables" or not isinstance(value, list):
            continue
        if any(id(each) in replaced for each in value):
            new = [replaced.get(id(each), each) for each in value]
            _replace_list(optimizer, name, new)
    variables = [replaced.get(id(v), v) for v in optimizer._variables]
    tracker = tracker_of(optimizer)
    tracker.stored_ids["variables"] = {id(v) for v in variables}
    _replace_variables(optimizer, variables)
