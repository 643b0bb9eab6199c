"""Save and load the weights of a frozen layer.

They are in the group of the layer's own weights. A layer that is not frozen
rejects them, since Keras counts the entries:

| key | shape | value |
|---|---|---|
| `stored` | (bytes,) | JSON: version, names in order, how it is frozen |
| a name | of the weight | codes, uint8, of a kernel; else the weight itself |
| a name + `.scale` | `stored_kernels.scale_shape` | float32, of a kernel |
| a name + `.inputs_scale` | () | float32, of its inputs, if they have one |

LoRA adapters are separate weights here. Added to a kernel, they would be
rounded with it. The JSON contains names and numbers only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_policy_ext import _input_files, formats
from keras_policy_ext._keras import variable_values, walking
from keras_policy_ext.layers.stored_weights import StoredVariable
from keras_policy_ext.recipes import FrozenKernels
from keras_policy_ext.stored_kernels import Axes, StoredKernel, scale_shape

STORED = "stored"
"""The key that marks a group as that of a frozen layer."""

VERSION = 1
"""The version of the entries; increased if older readers would misread them."""

SCALE = ".scale"
INPUTS_SCALE = ".inputs_scale"

Entries = Mapping[str, np.ndarray]


def save(layer: keras.Layer, store: MutableMapping[str, Any]) -> None:
    """Write the codes, scales and other weights of a frozen layer to a file."""
    weights = _own(layer)
    recipe = layer.float8_policy.recipe
    header = {
        "version": VERSION,
        "weights": recipe.weights,
        "per": recipe.per,
        "activations": recipe.activations,
        "names": [each.name for each in weights],
        "summed": {
            each.name: list(each.axes.summed)
            for each in weights
            if isinstance(each, StoredVariable)
        },
        "lora": _lora(layer),
    }
    text = json.dumps(header)
    store[STORED] = np.frombuffer(text.encode(), "uint8")
    for each in weights:
        if not isinstance(each, StoredVariable):
            store[each.name] = variable_values.value_without_autocast(each)
            continue
        stored = each.stored
        store[each.name] = stored.codes
        store[each.name + SCALE] = stored.scale
        if each.inputs_scale is not None:
            scale = ops.convert_to_numpy(each.inputs_scale.as_stored)
            store[each.name + INPUTS_SCALE] = scale


def load(layer: keras.Layer, store: Entries) -> None:
    """Load all weights that `save` wrote or, on an error, none.

    Raises:
        ValueError: If the entries belong to another layer, are damaged, or
            were written by a newer version of this package.
    """
    header = header_in(store, layer.path)
    if recipe_of(header, layer.path) != layer.float8_policy.recipe:
        raise ValueError(
            f"Layer {layer.path!r} is frozen with another recipe than the "
            f"file. Received: {recipe_of(header, layer.path)!r} in the file. "
            f"Allowed: {layer.float8_policy.recipe!r}, the recipe of the "
            "layer. Load the whole model with `keras_policy_ext.load_model`, "
            "not its weights alone."
        )
    _check_rank(layer, store, header)
    _adapt(layer, header)
    pairs = _pairs(layer, header)
    values = [
        _checked(layer, each, store, name, header) for each, name in pairs
    ]
    for (each, _), value in zip(pairs, values, strict=True):
        if isinstance(each, StoredVariable):
            each.take(*value)
        else:
            each.assign(value)
    if header["lora"]:
        layer.lora_alpha = header["lora"]["alpha"]


def header_in(store: Entries, path: str) -> dict[str, Any]:
    """Return the JSON header of a frozen layer's group in a file.

    Raises:
        ValueError: If it is damaged, or of a newer version.
    """
    raw = _input_files.array_in(path, store[STORED])
    try:
        if raw.dtype != "uint8" or raw.ndim != 1:
            raise ValueError(f"it is {raw.dtype} of shape {raw.shape}")
        header = _input_files.json_in(raw.tobytes(), path)
        version = header["version"]
        if type(version) is not int or version < 1:
            raise ValueError(
                f"it has the version {version!r}, which is not an int >= 1"
            )
    except (ValueError, KeyError, TypeError) as error:
        found = f"{STORED!r} cannot be read: {error}"
        raise ValueError(damaged(path, found)) from error
    if version > VERSION:
        raise ValueError(
            f"The frozen weights of {path!r} were written by a newer version "
            f"of keras_policy_ext. Received: format {version}. Allowed: up to "
            f"{VERSION}. Update keras_policy_ext."
        )
    _check_header(header, path)
    return dict(header)


def _check_header(header: dict[str, Any], path: str) -> None:
    for field, check in _FIELDS.items():
        if field not in header or not check(header[field], header):
            found = f"{field!r} in {STORED!r} is {header.get(field)!r}"
            raise ValueError(damaged(path, found))


def _are_names(value: object, header: dict[str, Any]) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(x) is str for x in value) and len(set(value)) == len(value)


def _are_summed(value: object, header: dict[str, Any]) -> bool:
    if not isinstance(value, dict):
        return False
    if not all(isinstance(each, list) for each in value.values()):
        return False
    axes = [axis for each in value.values() for axis in each]
    right = all(type(axis) is int and axis >= 0 for axis in axes)
    return right and set(value) <= set(header["names"])


def _is_lora(value: object, header: dict[str, Any]) -> bool:
    if not isinstance(value, dict):
        return value is None
    rank, alpha = value.get("rank"), value.get("alpha")
    return type(rank) is int and rank > 0 and type(alpha) in (int, float)


_FIELDS = {"names": _are_names, "summed": _are_summed, "lora": _is_lora}
"""The check of each field, in an order in which later ones rely on earlier."""


def recipe_of(header: dict[str, Any], path: str) -> FrozenKernels:
    """Return the `FrozenKernels` recipe that a file's header describes.

    Raises:
        ValueError: If there is no such recipe.
    """
    names = ("weights", "per", "activations")
    try:
        return FrozenKernels(**{name: header[name] for name in names})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(damaged(path, str(error))) from error


def stored_kernels_in(
    store: Entries, path: str
) -> dict[str, StoredKernel | np.ndarray]:
    """Return a frozen layer's weights from a file, by name.

    Kernels are `StoredKernel` objects, other weights are arrays.

    Raises:
        ValueError: If an entry is damaged.
    """
    header = header_in(store, path)
    recipe = recipe_of(header, path)
    found: dict[str, StoredKernel | np.ndarray] = {}
    for name in header["names"]:
        if name not in header["summed"]:
            found[name] = _as_array(_entry(store, name, path))
            continue
        rank = np.ndim(_entry(store, name, path))
        summed = tuple(header["summed"][name])
        if any(axis >= rank for axis in summed):
            raise ValueError(damaged(path, f"{name!r} has {rank} axes"))
        free = tuple(axis for axis in range(rank) if axis not in summed)
        axes = Axes(summed, free)
        found[name] = _stored(store, name, recipe, axes, path)
    return found


def _as_array(entry: Any) -> np.ndarray:
    """Convert a file's entry to an array; bfloat16 becomes float32."""
    if getattr(entry, "attrs", {}).get("dtype") == "bfloat16":
        return np.array(entry, "V2").view(ml_dtypes.bfloat16).astype("float32")
    return np.asarray(entry)


def refuse(layer: keras.Layer) -> None:
    """Raise ValueError: the file's weights are frozen, the layer's are not."""
    raise ValueError(
        f"The weights of layer {layer.path!r} in this file are stored in "
        "float8, and the layer is not frozen. Received: codes and scales. "
        "Allowed: float weights. `keras_policy_ext.load_model(path)` loads "
        "the frozen model, `keras_policy_ext.load_weights(model, path, "
        "as_saved=True)` freezes this model as the saved one was, and "
        "`keras_policy_ext.load_weights(model, path, dequantize=True)` loads "
        "the dequantized values."
    )


def refuse_float(layer: keras.Layer) -> None:
    """Raise ValueError: the layer is frozen, the file has float weights."""
    raise ValueError(
        f"Layer {layer.path!r} is frozen, and its weights in this file are "
        "not. Received: float weights. Allowed: codes and scales, as a frozen "
        "model saves them. Load the file into a model that is not frozen, "
        "then call `keras_policy_ext.freeze(model)`."
    )


def damaged(path: str, found: str) -> str:
    """Return an error message: a file's frozen weights are damaged."""
    return (
        f"The frozen weights of {path!r} in this file are damaged; the layer "
        f"was not changed. Received: {found}. Allowed: an entry {STORED!r} "
        "(JSON) with the names of the weights, and one entry for each. For a "
        f"kernel: uint8 codes of finite numbers, and '<name>{SCALE}' "
        "(float32), finite and > 0. Copy the file again, or take an earlier "
        "one."
    )


def _own(layer: keras.Layer) -> list[keras.Variable]:
    """Return a layer's own weights, without its float8 state."""
    return list(walking.own_weights(layer))


def _lora(layer: keras.Layer) -> dict[str, Any] | None:
    if not getattr(layer, "lora_enabled", False):
        return None
    return {"rank": layer.lora_rank, "alpha": layer.lora_alpha}


def _check_rank(
    layer: keras.Layer, store: Entries, header: dict[str, Any]
) -> None:
    """Raise if a file's LoRA adapters have another rank than its header."""
    if not header["lora"]:
        return
    names = [name for name in header["names"] if name.startswith("lora_")]
    shapes = [np.shape(_entry(store, name, layer.path)) for name in names]
    rank = header["lora"]["rank"]
    if not shapes or not all(rank in shape for shape in shapes):
        found = f"adapters of shapes {shapes} for a rank of {rank}"
        raise ValueError(damaged(layer.path, found))


def _adapt(layer: keras.Layer, header: dict[str, Any]) -> None:
    """Enable LoRA on a layer if the file has LoRA adapters for it."""
    lora = header["lora"]
    if lora and not getattr(layer, "lora_enabled", False):
        layer.enable_lora(int(lora["rank"]), lora_alpha=lora["alpha"])


def _pairs(
    layer: keras.Layer, header: dict[str, Any]
) -> list[tuple[keras.Variable, str]]:
    """Pair each weight of a layer with its name in the file.

    An unnamed weight gets another name in each model, so weights without a
    match are paired in order. Adapters that the file lacks are unchanged.
    """
    own = [
        each
        for each in _own(layer)
        if header["lora"] or not each.name.startswith("lora_")
    ]
    names = list(header["names"])
    taken = {each.name for each in own} & set(names)
    rest = iter([name for name in names if name not in taken])
    if len(own) != len(names):
        raise ValueError(
            f"Layer {layer.path!r} has other weights than the file. Received: "
            f"{', '.join(names)}. Allowed: "
            f"{', '.join(each.name for each in own)}. Build the model with "
            "the arguments of the saved one."
        )
    return [(v, v.name if v.name in taken else next(rest)) for v in own]


def _checked(
    layer: keras.Layer,
    variable: keras.Variable,
    store: Entries,
    name: str,
    header: dict[str, Any],
) -> Any:
    """Return the value for a weight from a file; raise if it does not fit."""
    is_codes = name in header["summed"]
    if is_codes != isinstance(variable, StoredVariable):
        kinds = ("codes", "floats") if is_codes else ("floats", "codes")
        found = f"{name!r} is stored as {kinds[0]}, but the layer holds "
        raise ValueError(damaged(layer.path, f"{found}{kinds[1]} there"))
    if not is_codes:
        value = _entry(store, name, layer.path)
        if tuple(value.shape) != tuple(variable.shape):
            found = f"{name!r} of shape {tuple(value.shape)}"
            raise ValueError(damaged(layer.path, found))
        return value
    if tuple(header["summed"][name]) != tuple(variable.axes.summed):
        found = f"{name!r} is summed over axes {header['summed'][name]}"
        raise ValueError(damaged(layer.path, found))
    stored = _stored(store, name, variable.recipe, variable.axes, layer.path)
    if stored.codes.shape != tuple(variable.shape):
        found = f"{name!r} of shape {stored.codes.shape}"
        raise ValueError(damaged(layer.path, found))
    if variable.inputs_scale is None:
        return stored, None
    scale = np.asarray(_entry(store, name + INPUTS_SCALE, layer.path))
    if scale.shape or not (np.isfinite(scale) and scale > 0):
        found = f"{name + INPUTS_SCALE!r} is {scale}"
        raise ValueError(damaged(layer.path, found))
    return stored, scale


def _stored(
    store: Entries, name: str, recipe: FrozenKernels, axes: Axes, path: str
) -> StoredKernel:
    codes = np.asarray(_entry(store, name, path))
    scale = np.asarray(_entry(store, name + SCALE, path))
    if codes.dtype != "uint8":
        raise ValueError(damaged(path, f"{name!r} is {codes.dtype}"))
    numbers = codes.view(formats.get(recipe.weights).dtype)
    wanted = scale_shape(codes.shape, axes, recipe.per)
    if scale.shape != wanted or scale.dtype != "float32":
        found = f"{name + SCALE!r} is {scale.dtype} of shape {scale.shape}"
        raise ValueError(damaged(path, found))
    if not np.all(np.isfinite(numbers.astype("float16"))):
        raise ValueError(damaged(path, f"{name!r} has codes of NaN"))
    if not np.all(np.isfinite(scale) & (scale > 0)):
        raise ValueError(damaged(path, f"{name + SCALE!r} has {scale.min()}"))
    return StoredKernel(
        codes=codes,
        scale=scale,
        weights=recipe.weights,
        granularity=recipe.per,
        axes=axes,
    )


def _entry(store: Entries, name: str, path: str) -> Any:
    if name not in store:
        raise ValueError(damaged(path, f"it lacks {name!r}"))
    _input_files.check_dataset(path, store[name])
    return store[name]
