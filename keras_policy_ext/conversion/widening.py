"""`widen`: frozen kernels that products find in float32."""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_policy_ext import backends, contractions
from keras_policy_ext._keras import built_layers
from keras_policy_ext.conversion import freezing, models, training
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.layers import stored_variable, stored_weights


def widen(model: keras.Layer) -> tuple[str, ...]:
    """Hold the kernels of a frozen model in float32 too, for single rows.

    Where float8 is emulated each call widens the kernels before it multiplies,
    which is most of the time of a call with a single row. Here that is done
    once. Outputs stay what they are, to the bit, with rounded inputs too;
    the memory is that of float32 and of the codes. Files stay as small: they
    have the codes alone, and a model that was loaded is widened again. Where
    other codes are loaded, the widened kernels follow.

    Args:
        model: A frozen model or layer.

    Returns:
        Paths of the layers whose kernels are widened. Those that look up rows
        are not, nor those whose products this device multiplies in float8,
        nor, with JAX on a CPU, kernels of two million numbers and more: they
        are widened part by part, in the cache of a core.

    Raises:
        TypeError: If it is no Keras model or layer.
        ValueError: If it is not built, no layer of it is frozen, or it is
            distributed. The model is then unchanged.

    Examples:
        >>> layer = keras.layers.Dense(8)
        >>> model = keras.Sequential([keras.Input((32,)), layer])
        >>> report = kpe.freeze(model)
        >>> len(kpe.widen(model))
        1
    """
    models.check(model)
    frozen = freezing.frozen_layers(model)
    if not frozen or keras.distribution.distribution() is not None:
        raise ValueError(_refusal(model, frozen))
    found = [(layer, _to_widen(layer)) for layer in frozen]
    layers = [layer for layer, variables in found if variables]
    with training.changing(model):
        for layer, variables in found:
            for variable in variables:
                if variable.widened is None:
                    stored_variable.keep_widened(layer, variable)
        built_layers.track_again(layers)
    return tuple(path_of(layer) for layer in layers)


def _to_widen(layer: Any) -> list[stored_variable.StoredVariable]:
    """The kernels of a layer that each call widens as a whole."""
    recipe = layer.float8_policy.recipe
    if not layer.float8_trains or contractions.multiplies_codes(recipe):
        return []
    cuts = backends.current().cuts
    stored = stored_weights.stored_in(layer)
    return [each for each in stored if not cuts(math.prod(each.shape))]


def _refusal(model: keras.Layer, frozen: list[Any]) -> str:
    if not frozen:
        return (
            f"No layer of {model.name!r} is frozen. Received: a model with "
            "float weights. Allowed: one whose kernels are stored in float8. "
            "Call `keras_policy_ext.freeze(model)` first."
        )
    return (
        "Kernels of a distributed model are not kept widened: each device "
        "would hold all of them. Received: a model under a distribution of "
        "Keras. Allowed: one on a single device. Leave the kernels as they "
        "are, or `keras_policy_ext.thaw(model)`."
    )
