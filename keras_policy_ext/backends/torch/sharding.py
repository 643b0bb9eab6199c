"""PyTorch: variables of Keras in models that `fully_shard` has cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_policy_ext._keras import variable_values


def follow(variables: Iterable[Any], modules: Iterable[Any]) -> list[Any]:
    """Let variables be read where `fully_shard` puts their parameters.

    It puts the part of this process there, and during a pass the whole.
    Keras keeps parameters in a dict of each layer, by the paths of variables.

    Args:
        variables: Of one model.
        modules: Its layers.

    Returns:
        The variables that were cut.

    Raises:
        ValueError: If one was cut twice, or is not trainable. Nothing is
            changed then.
    """
    holders = _holders_of_parts(modules)
    cut = [v for v in variables if v.path in holders]
    for variable in cut:
        _check(variable, holders[variable.path])
    for variable in cut:
        holder = holders[variable.path][0]
        variable_values.read_from(variable, holder, variable.path)
    return cut


def group_of(variable: Any) -> Any:
    """The process group that a variable is cut over."""
    return variable.value.device_mesh.get_group()


def _holders_of_parts(modules: Iterable[Any]) -> dict[str, list[Any]]:
    """The dicts that have a part of a parameter, by its name."""
    dicts = {
        id(inner): inner
        for module in modules
        for inner in module.modules()
        if isinstance(inner, torch.nn.ParameterDict)
    }
    found: dict[str, list[Any]] = {}
    for each in dicts.values():
        for name, parameter in each.items():
            if isinstance(parameter, DTensor):
                found.setdefault(name, []).append(each)
    return found


def _check(variable: Any, holders: list[Any]) -> None:
    parts = {id(holder[variable.path]) for holder in holders}
    if len(parts) > 1:
        raise ValueError(
            "A weight is cut twice, and only one of the two would be trained. "
            f"Received: {variable.path!r}, in fully_shard of its layer and of "
            "a Keras model around it, which lists it as well. Allowed: "
            "fully_shard of the model, or of its layers."
        )
    state = getattr(variable, "overwrite_with_gradient", False)
    if state or not variable.trainable:
        raise ValueError(
            "What is assigned to a variable would be lost where it is cut. "
            f"Received: {variable.path!r}, cut by fully_shard. Allowed: "
            "weights that an optimizer updates. Pass the others to "
            "fully_shard(..., ignored_params=kpe.loops.uncut(model))."
        )
