"""Which models can be converted: those whose layers with weights are built.

A model that is only trained, such as a GAN, a VAE or a distiller, often has a
`train_step` and no `call`. Keras never builds it, or takes it for built after
a call that failed; what it says of itself tells nothing about its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from keras_policy_ext._keras import variable_values, walking
from keras_policy_ext.conversion.candidates import path_of

# Layers of Keras whose `build` looks at shapes, and makes no weights.
_NAMES = """
    Add Average AugMix Concatenate Dot Maximum Minimum Multiply RandAugment
    RandomColorJitter Subtract TextVectorization
"""
_WITHOUT_WEIGHTS = [getattr(keras.layers, name) for name in _NAMES.split()]


def check(model: keras.Layer) -> None:
    """Raise if the layers of a model can't be converted, or reverted, now.

    Raises:
        TypeError: If it is no Keras model or layer.
        ValueError: If it has no weights yet, a part of a model that is not
            built has none, or the weights are not in their variables.
    """
    check_is_layer(model, "can be converted")
    if not (model.built and has_call(model)):
        _check_parts(model)
    if not all(variable_values.has_value(v) for v in model.variables):
        raise ValueError(
            f"The weights of {model.name!r} are not in its variables now: "
            "Keras takes them out while it trains on JAX, and does not put "
            "them back when training ends in an error. Received: a model in "
            "this state. Allowed: one before or after `fit`, or in a "
            "callback's `on_epoch_end`. Convert it there, or make it anew."
        )


def check_is_layer(model: object, purpose: str, also: str = "") -> None:
    """Raise a TypeError if this is no Keras model or layer."""
    # Not keras.Layer, in whose place libraries such as bert4keras3 put a class
    # of their own.
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            f"This is not a Keras model or layer, and only those {purpose}. "
            f"Received: {model!r} (of type {type(model).__name__}). Allowed: "
            f"a keras.Model or keras.Layer{also}. Pass the model itself."
        )


def has_call(model: keras.Layer) -> bool:
    """True if a model or layer has a `call`, and not only parts that do."""
    return type(model).call not in (keras.Model.call, keras.Layer.call)


def _check_parts(model: keras.Layer) -> None:
    """Raise if a part of a model that is not built itself lacks weights."""
    unbuilt = [name for name, _ in _unbuilt_parts(model)]
    if unbuilt and (model.weights or not has_call(model)):
        raise ValueError(
            f"Parts of {type(model).__name__} {model.name!r} have no weights "
            f"yet. Received: {', '.join(unbuilt)}, not built. Allowed: a "
            "model whose layers with weights are all built. Call each of "
            "these parts on a batch of data, or `part.build(input_shape)`, "
            "first."
        )
    if (not model.weights and not model.built) or _would_get_weights(model):
        raise ValueError(
            f"{type(model).__name__} {model.name!r} has no weights yet. "
            "Received: a model that is not built. Allowed: a built one. Call "
            "it on a batch of data, or `model.build(input_shape)`, first."
        )


def _unbuilt_parts(model: keras.Layer) -> list[tuple[str, Any]]:
    """Parts without weights that would get some, outermost ones, by name."""
    found = []
    for name, part in _parts(model):
        if not any(map(_would_get_weights, walking.layers_within(part))):
            continue
        inner = _unbuilt_parts(part) if part.weights else []
        found += [(f"{name}.{under}", layer) for under, layer in inner]
        if not inner:
            described = f"{name} ({type(part).__name__} {path_of(part)!r})"
            found.append((described, part))
    return found


def _would_get_weights(layer: keras.Layer) -> bool:
    """True if a layer is going to make weights itself when it is built."""
    if layer.built or type(layer) in _WITHOUT_WEIGHTS:
        return False
    if isinstance(layer, keras.Model) and layer.layers:
        return False  # Its layers do.
    return type(layer).build is not keras.Layer.build


def _parts(model: keras.Layer) -> Iterator[tuple[str, Any]]:
    """The layers directly in a model, each with the attribute that has it."""
    names: dict[int, str] = {}
    for name, value in walking.attributes(model).items():
        if not name.startswith("_"):
            for suffix, each in leaves(value):
                names.setdefault(id(each), name + suffix)
    for number, layer in enumerate(getattr(model, "layers", ())):
        names.setdefault(id(layer), f"layers[{number}]")
    for layer in walking.layers_directly_in(model):
        yield names.get(id(layer), layer.name), layer


def leaves(value: object) -> Iterator[tuple[str, Any]]:
    """What is in lists and dicts, with the subscripts that lead there."""
    if isinstance(value, dict):
        items = [(repr(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(i), each) for i, each in enumerate(value)]
    else:
        yield "", value
        return
    for key, each in items:
        for suffix, leaf in leaves(each):
            yield f"[{key}]{suffix}", leaf
