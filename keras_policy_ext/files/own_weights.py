"""The weights of a float8 layer in a file, as Keras has layers save and load.

The codes of a frozen layer are in the group of the layer's own weights, by the
schema `entries.FROZEN`. LoRA adapters are separate weights there. Added to a
kernel, they would be rounded with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_policy_ext import backends, formats, policy_names, user_code
from keras_policy_ext._keras import variable_values, walking
from keras_policy_ext._keras.variable_values import ComputedVariable
from keras_policy_ext.files import entries, keras_float8
from keras_policy_ext.files.saved_layers import (
    FrozenWeights,
    header_for_file,
    is_frozen,
)
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import policy_of
from keras_policy_ext.recipes import MATMULS, Recipe
from keras_policy_ext.recipes.fields import counterpart
from keras_policy_ext.stored_kernels import E4M3, pack


def texts_for_file(layer: keras.Layer) -> dict[str, str]:
    """Return the strings that a file stores about a float8 layer."""
    policy = policy_of(layer)
    if not isinstance(policy, Float8DTypePolicy):
        return {}
    texts = {entries.POLICY: policy.full_name}
    if layer.float8_state.given is not None:
        texts[entries.GIVEN] = layer.float8_state.given
    return texts


def load(
    layer: keras.Layer,
    store: Mapping[str, np.ndarray],
    stock: Callable[[Mapping[str, np.ndarray]], None],
) -> dict[str, np.ndarray] | None:
    """Load all weights of a float8 layer from a file or, on an error, none.

    The group in the file is of a float layer, a frozen one, or one of Keras's
    own float8. `stock` is `load_own_variables` of the stock layer.

    Returns:
        For a group of Keras's own float8 the entries of its state, of which
        there are none if the layer has no state. None for other groups.

    Raises:
        ValueError: If the weights do not fit, or the state that Keras wrote
            is damaged; then nothing was changed.
    """
    policy = policy_of(layer)
    if isinstance(policy, Float8DTypePolicy):
        warn_of_formats(policy)
    # A frozen layer, or a group of one in the file.
    if layer.built and (layer.is_frozen or is_frozen(store)):
        _load_stored(layer, store)
        return None
    if not _is_in_keras_float8(layer, store):  # The group of a float layer.
        with variable_values.without_notifying():
            stock(store)
        if layer.merges_adapters:
            user_code.warn(_MERGED)
        return None
    extension = keras_float8.needed(f"a file for layer {layer.path!r}")
    has_state = bool(layer.float8_state.matrices)
    own, state = extension.split(store, layer.path, has_state)
    with variable_values.without_notifying():
        stock(own)
    return state


_MERGED = (
    "This file has no LoRA adapters: Keras adds them to the kernels that it "
    "saves. Those of the loaded layers are zeros, which get no gradients. To "
    "train adapters on, save them by `save_lora_weights` of KerasHub, or call "
    "`keras_policy_ext.freeze` before you save. To train new ones, assign "
    "random values to the first of each layer, such as `lora_kernel_a`."
)


def _load_stored(layer: keras.Layer, store: Mapping[str, np.ndarray]) -> None:
    """Load codes and scales; raise unless both layer and file are frozen."""
    if not layer.is_frozen:
        raise ValueError(
            f"The weights of layer {layer.path!r} in this file are stored in "
            "float8, and the layer is not frozen. Received: codes and scales. "
            "Allowed: float weights. `keras_policy_ext.load_model(path)` loads "
            "the frozen model, `keras_policy_ext.load_weights(model, path, "
            "as_saved=True)` freezes this model as the saved one was, and "
            "`keras_policy_ext.load_weights(model, path, dequantize=True)` "
            "loads the dequantized values."
        )
    if not is_frozen(store):
        raise ValueError(
            f"Layer {layer.path!r} is frozen, and its weights in this file are "
            "not. Received: float weights. Allowed: codes and scales, as a "
            "frozen model saves them. Load the file into a model that is not "
            "frozen, then call `keras_policy_ext.freeze(model)`."
        )
    _load_codes(layer, store)


def _is_in_keras_float8(layer: keras.Layer, store: Mapping[str, Any]) -> bool:
    """Return True if a layer's group was saved in Keras's own float8."""
    # Only a layer whose stock form knows float8 can have been in such a file.
    if "float8" not in layer.stock_serialization_spec() or not layer.built:
        return False
    if layer.quantization_mode not in (None, *policy_names.MODES):
        return False
    return keras_float8.is_store(store)


def save_frozen(layer: keras.Layer, store: MutableMapping[str, Any]) -> None:
    """Write the codes, scales and other weights of a frozen layer to a file.

    `store` takes arrays by name.
    """
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
    shapes = None
    if formats.get(recipe.weights).numbers_per_byte > 1:
        shapes = {v.name: tuple(v.shape) for v in weights if v.name in summed}
    store[entries.HEADER] = header_for_file(recipe, names, summed, lora, shapes)
    for each in weights:
        if not isinstance(each, ComputedVariable):
            store[each.name] = variable_values.value_without_autocast(each)
            continue
        stored = each.stored
        store[each.name] = pack(stored.codes, stored.weights)
        if stored.scale_format == "float32":
            store[entries.CODES_SCALE.format(name=each.name)] = stored.scale
        else:
            key = entries.CODES_OF_SCALE.format(name=each.name)
            store[key] = stored.scale_codes
        if stored.scale_format == E4M3:
            key = entries.OUTER_SCALE.format(name=each.name)
            store[key] = stored.outer_scale
        if each.inputs_scale is not None:
            # It raises if someone has cast the scale to another dtype.
            scale = ops.convert_to_numpy(each.inputs_scale.as_stored)
            store[entries.INPUTS_SCALE.format(name=each.name)] = scale


def _load_codes(layer: keras.Layer, store: Mapping[str, Any]) -> None:
    """Load all weights that `save_frozen` wrote; on a ValueError, none.

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
    pairs = _weights_and_names(layer, saved)
    values = [_value_in_file(each, saved, name) for each, name in pairs]
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


def _weights_and_names(
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


def _value_in_file(
    variable: keras.Variable, saved: FrozenWeights, name: str
) -> Any:
    """Return the value for a weight from a file; raise if it does not fit.

    It is an array. For a stored kernel it is a pair, which its method `take`
    takes: the kernel, and the scale of the inputs or None.
    """
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


def warn_of_formats(policy: Float8DTypePolicy) -> None:
    """Warn if this device's matmuls do not read the formats of a policy."""
    # A loaded model keeps the formats that it was trained in, on any device,
    # so that values and scales do not change.
    native = backends.engine.device().float8
    # A format without a family, such as one of four bits, is not compared.
    families = {formats.get(name).family for name in _formats_of(policy.recipe)}
    if native is None or not families - {native, None}:
        return
    user_code.warn(_warning(policy, native))


@functools.cache
def _formats_of(recipe: Recipe) -> list[str]:
    """List the formats that a recipe quantizes operands to, each once."""
    quantizations = (
        recipe.quantization(operand, matmul)
        for matmul, operands in MATMULS.items()
        for operand in operands
    )
    return list(dict.fromkeys(q.format for q in quantizations if q is not None))


def _warning(policy: Float8DTypePolicy, native: str) -> str:
    """Return the text of the warning of formats that are emulated."""
    own, others = _formats_of(policy.recipe), formats.FAMILIES[native]
    text = (
        f"This model was trained in {' and '.join(own)}; "
        f"{backends.engine.device().title} multiplies "
        f"{' and '.join(others)}. "
        "It stays in the formats that it has, with its numbers and scales, "
        "and its matmuls are emulated."
    )
    other = counterpart(policy.recipe)
    if other is None:
        return text
    name = Float8DTypePolicy(policy.default_policy, recipe=other).full_name
    return (
        f"{text} For native ones: kpe.convert(model, {name!r}), which keeps "
        "the histories that scales come from."
    )
