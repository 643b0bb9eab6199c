"""Models whose config says which policy each quantized layer has.

A KerasHub backbone is made anew from its config, and so its own policy has to
say what its layers follow.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import keras

from keras_policy_ext._keras import global_policy, keras_hub, walking
from keras_policy_ext.conversion import candidates
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.layers.class_swap import source_of
from keras_policy_ext.layers.mixin import Float8Mixin
from keras_policy_ext.policies import Float8DTypePolicy

Followed = dict[str, Float8DTypePolicy | None]


def declare_policies(model: Any) -> None:
    """Let the backbones in a model have the policy of their float8 layers.

    The recipe that most of them follow, and rules for the other layers. A
    backbone whose policy says so already keeps it, and so does one that
    Keras has quantized, or without a layer in float8.

    Args:
        model: A built model or layer.
    """
    for layer in walking.layers_within(model):
        if keras_hub.writes_map_of_quantized_layers(layer):
            _declare(layer)


def _declare(backbone: Any) -> None:
    own = backbone.dtype_policy
    if isinstance(own, keras.dtype_policies.DTypePolicyMap) and not isinstance(
        own, Float8DTypePolicy
    ):
        return
    followed = _followed(backbone)
    if _quantized(backbone) or not any(followed.values()):
        return
    if isinstance(own, Float8DTypePolicy) and _says(own, followed):
        return
    policy = _policy(source_of(backbone), followed)
    global_policy.replace_layer_policy(backbone, policy)


def _followed(backbone: Any) -> Followed:
    """What each layer that can follow float8 does follow, by its path."""
    found = [c.layer for c in candidates.survey(backbone).candidates]
    return {
        path_of(layer): getattr(layer, "float8_policy", None) for layer in found
    }


def _quantized(backbone: Any) -> bool:
    return any(
        layer.quantization_mode is not None
        and not isinstance(layer, Float8Mixin)
        for layer in walking.layers_within(backbone)
    )


def _says(policy: Float8DTypePolicy, followed: Followed) -> bool:
    for path, wanted in followed.items():
        said = policy.for_path(path)
        if (said if isinstance(said, Float8DTypePolicy) else None) != wanted:
            return False
    return True


def _policy(source: keras.DTypePolicy, followed: Followed) -> Float8DTypePolicy:
    recipes = [p.recipe for p in followed.values() if p is not None]
    (recipe, _), *_ = collections.Counter(recipes).most_common(1)
    usual = Float8DTypePolicy(source.name, recipe=recipe)
    rules = [
        (re.escape(path), policy)
        for path, policy in followed.items()
        if policy != usual
    ]
    return Float8DTypePolicy(source.name, recipe=recipe, rules=rules)
