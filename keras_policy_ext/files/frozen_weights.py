"""Save and load the weights of a frozen layer, by the schema `entries.FROZEN`.

They are in the group of the layer's own weights. LoRA adapters are separate
weights here. Added to a kernel, they would be rounded with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext._keras import variable_values, walking
from keras_policy_ext._keras.variable_values import ComputedVariable
from keras_policy_ext.files import entries
from keras_policy_ext.files.saved_layers import FrozenWeights, header_for_file


def save(layer: keras.Layer, store: MutableMapping[str, Any]) -> None:
    """Write the codes, scales and other weights of a frozen layer to a file."""
    weights = list(walking.own_weights(layer))
    recipe = layer.float8_policy.recipe
    summed = {
        each.name: each.axes.summed
        for each in weights
        if isinstance(each, ComputedVariable)
    }
    lora = None
    if getattr(layer, "lora_enabled", False):
        lora = {"rank": layer.lora_rank, "alpha": layer.lora_alpha}
    names = [each.name for each in weights]
    store[entries.HEADER] = header_for_file(recipe, names, summed, lora)
    for each in weights:
        if not isinstance(each, ComputedVariable):
            store[each.name] = variable_values.value_without_autocast(each)
            continue
        stored = each.stored
        store[each.name] = stored.codes
        store[entries.CODES_SCALE.format(name=each.name)] = stored.scale
        if each.inputs_scale is not None:
            # It raises if someone has cast the scale to another dtype.
            scale = ops.convert_to_numpy(each.inputs_scale.as_stored)
            store[entries.INPUTS_SCALE.format(name=each.name)] = scale


def load(layer: keras.Layer, store: Mapping[str, Any]) -> None:
    """Load all weights that `save` wrote; on a ValueError, none.

    It is raised if the entries belong to another layer, are damaged, or were
    written by a newer version of this package.
    """
    saved = FrozenWeights.of(store, layer.path)
    if saved.recipe != layer.float8_policy.recipe:
        raise ValueError(
            f"Layer {layer.path!r} is frozen with another recipe than the "
            f"file. Received: {saved.recipe!r} in the file. "
            f"Allowed: {layer.float8_policy.recipe!r}, the recipe of the "
            "layer. Load the whole model with `keras_policy_ext.load_model`, "
            "not its weights alone."
        )
    check_rank(saved)
    enable_saved_lora(layer, saved)
    pairs = _pairs(layer, saved)
    values = [_checked(each, saved, name) for each, name in pairs]
    for (each, _), value in zip(pairs, values, strict=True):
        if isinstance(each, ComputedVariable):
            each.take(*value)
        else:
            each.assign(value)
    if saved.lora:
        layer.lora_alpha = saved.lora["alpha"]


def check_rank(saved: FrozenWeights) -> None:
    """Raise if a file's LoRA adapters have another rank than its header."""
    if not saved.lora:
        return
    names = [name for name in saved.names if name.startswith("lora_")]
    shapes = [np.shape(saved.item(name)) for name in names]
    rank = saved.lora["rank"]
    if not shapes or not all(rank in shape for shape in shapes):
        raise saved.damaged(f"adapters of shapes {shapes} for a rank of {rank}")


def enable_saved_lora(layer: keras.Layer, saved: FrozenWeights) -> None:
    """Enable LoRA on a layer if the file has LoRA adapters for it."""
    lora = saved.lora
    if lora and not getattr(layer, "lora_enabled", False):
        layer.enable_lora(int(lora["rank"]), lora_alpha=lora["alpha"])


def _pairs(
    layer: keras.Layer, saved: FrozenWeights
) -> list[tuple[keras.Variable, str]]:
    """Pair each weight of a layer with its name in the file."""
    # An unnamed weight gets another name in each model, so those without a
    # match are paired in order. Adapters that the file lacks are unchanged.
    own = [
        each
        for each in walking.own_weights(layer)
        if saved.lora or not each.name.startswith("lora_")
    ]
    names = saved.names
    taken = {each.name for each in own} & set(names)
    unmatched = iter([name for name in names if name not in taken])
    if len(own) != len(names):
        raise ValueError(
            f"Layer {layer.path!r} has other weights than the file. Received: "
            f"{', '.join(names)}. Allowed: "
            f"{', '.join(each.name for each in own)}. Build the model with "
            "the arguments of the saved one."
        )
    return [(v, v.name if v.name in taken else next(unmatched)) for v in own]


def _checked(variable: keras.Variable, saved: FrozenWeights, name: str) -> Any:
    """Return the value for a weight from a file; raise if it does not fit."""
    # It is an array, or for a kernel what `StoredVariable.take` takes.
    is_codes = name in saved.summed  # The header has axes of kernels alone.
    if is_codes != isinstance(variable, ComputedVariable):
        kinds = ("codes", "floats") if is_codes else ("floats", "codes")
        raise saved.damaged(
            f"{name!r} is stored as {kinds[0]}, but the layer holds "
            f"{kinds[1]} there"
        )
    if is_codes and saved.summed[name] != tuple(variable.axes.summed):
        raise saved.damaged(
            f"{name!r} is summed over axes {saved.summed[name]}"
        )
    stored = saved.kernel(name) if is_codes else None
    value = saved.item(name) if stored is None else stored.codes
    shape = tuple(value.shape)
    if shape != tuple(variable.shape):
        raise saved.damaged(f"{name!r} of shape {shape}")
    if stored is None:
        return value
    stored = dataclasses.replace(stored, axes=variable.axes)
    if variable.inputs_scale is None:
        return stored, None
    return stored, saved.read(entries.INPUTS_SCALE, name=name)
