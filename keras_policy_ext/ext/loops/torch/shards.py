"""PyTorch: the variables of Keras follow what `fully_shard` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from keras_policy_ext._keras import variable_values
from keras_policy_ext.backends.torch import observations
from keras_policy_ext.backends.torch.backend import GATHERS


class Gathering(NamedTuple):
    """A kernel that `fully_shard` gathers as codes, before its layer runs.

    Attributes:
        axes: An empty entry for each axis of the kernel; see
            `Backend.gathering_of`.
        is_quantized: True.
    """

    axes: tuple[tuple[str, ...], ...]
    is_quantized: bool = True


def follow(variables: Sequence[Any], modules: Iterable[Any]) -> None:
    """Make variables read the sharded parameters of `fully_shard`.

    Keras stores the parameters of a layer in a dict, by variable path.
    `fully_shard` puts the shard of this process into that dict, and the whole
    parameter during a pass.

    Args:
        variables: The variables of one model.
        modules: Its layers.

    Raises:
        ValueError: If no variable is sharded, or one is sharded twice or is
            not trainable. Nothing is changed then.
    """
    dicts = parameters_of(modules)
    holders = holders_of_parts(dicts)
    cut = [v for v in variables if v.path in holders]
    for variable in cut:
        _check(variable, holders[variable.path])
    if not cut:
        raise ValueError(
            "Nothing of this model is sharded. Received: a model without "
            "fully_shard, or one whose weights are all in ignored_params. "
            "Allowed: a model that fully_shard was called on, or on a "
            "layer of it. Call torch.distributed.fsdp.fully_shard first."
        )
    for variable in cut:
        holder = holders[variable.path][0]
        if hasattr(holder[variable.path].to_local(), GATHERS):
            axes = ((),) * len(variable.shape)
            variable.float8_gathering = Gathering(axes)
        variable_values.read_from(variable, holder, variable.path)
        # A Keras model lists the weights of its layers as its own, and would
        # keep and save what these were before.
        for each in dicts:
            if variable.path in each and each not in holders[variable.path]:
                each[variable.path] = holder[variable.path]
    group = cut[0].value.device_mesh.get_group()
    observations.know_group(variables, group)


def parameters_of(modules: Iterable[Any]) -> list[Any]:
    """Return the dicts of parameters in modules, without repeats."""
    dicts = {
        id(inner): inner
        for module in modules
        for inner in module.modules()
        if isinstance(inner, torch.nn.ParameterDict)
    }
    return list(dicts.values())


def holders_of_parts(dicts: list[Any]) -> dict[str, list[Any]]:
    """Return, by parameter name, the dicts that hold the parameter's shards."""
    # Not at the top: it takes a tenth of a second.
    from torch.distributed.tensor import DTensor

    found: dict[str, list[Any]] = {}
    for each in dicts:
        for name, parameter in each.items():
            if isinstance(parameter, DTensor):
                found.setdefault(name, []).append(each)
    return found


def _check(variable: Any, holders: list[Any]) -> None:
    parts = {id(holder[variable.path]) for holder in holders}
    if len(parts) > 1:
        raise ValueError(
            "A weight is sharded twice, and only one of the two copies would "
            f"be trained. Received: {variable.path!r}, by fully_shard of its "
            "layer and by fully_shard of the Keras model, which lists it too. "
            "Allowed: fully_shard of the model, or of its layers, not both."
        )
    state = getattr(variable, "overwrite_with_gradient", False)
    if state or not variable.trainable:
        raise ValueError(
            "An assignment to a sharded variable would be lost. Received: "
            f"{variable.path!r}, sharded by fully_shard. Allowed: weights that "
            "an optimizer updates. Pass all others to fully_shard(..., "
            "ignored_params=kpe.loops.uncut(model))."
        )
