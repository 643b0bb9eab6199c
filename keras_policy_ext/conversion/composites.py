"""Layers that make other layers: their policy says what these follow.

An attention layer makes its projections, a recurrent layer its cell, and a
KerasHub backbone its blocks, anew whenever it is made from its config.
"""

from __future__ import annotations

import collections
import re

import keras

from keras_policy_ext import policies
from keras_policy_ext._keras import global_policy, keras_hub, walking
from keras_policy_ext.conversion import candidates
from keras_policy_ext.conversion.candidates import path_of
from keras_policy_ext.layers.class_swap import to_float8_class, to_stock_class
from keras_policy_ext.policies import Float8DTypePolicy
from keras_policy_ext.policies.of_layers import (
    float8_policy_of,
    of_path,
    source_policy_of,
)

Followed = list[tuple[str, Float8DTypePolicy | None]]


def enter_float8_with_children(layer: keras.Layer) -> bool:
    """Give a composite its float8 form, if all in it follow one policy.

    It then makes float8 layers. It keeps the policy that it holds if that
    says what they follow.

    Returns:
        Whether it has its float8 form now.
    """
    followed = _followed(layer)
    distinct = {policy for _, policy in followed}
    if len(distinct) != 1 or None in distinct:
        return False
    held = policies.as_float8(layer.dtype_policy)
    to_float8_class(layer, held if _says(held, followed) else distinct.pop())
    return True


def leave_with_children(layer: keras.Layer, left: list[keras.Layer]) -> None:
    """Give a composite its stock form, if its last layer has left float8.

    Args:
        layer: The composite.
        left: The layers that have left.
    """
    within = walking.layers_within(layer)[1:]
    none_stays = not any(float8_policy_of(each) is not None for each in within)
    if none_stays and any(each is one for each in within for one in left):
        to_stock_class(layer)


def declare_policies(model: keras.Layer) -> None:
    """Let the backbones in a model have the policy of their float8 layers.

    The recipe that most of them follow, and rules for the other layers. A
    backbone whose policy says so already keeps it, and so does one that
    Keras has quantized, or without a layer in float8.
    """
    for layer in walking.layers_within(model):
        if keras_hub.writes_map_of_quantized_layers(layer):
            _declare(layer)


def _declare(backbone: keras.Model) -> None:
    own = backbone.dtype_policy
    if isinstance(own, keras.dtype_policies.DTypePolicyMap) and not isinstance(
        own, Float8DTypePolicy
    ):
        return
    followed = _followed(backbone)
    layers = walking.layers_within(backbone)
    if any(map(candidates.quantized_by_keras, layers)):
        return
    if _says(own, followed) or not any(policy for _, policy in followed):
        return
    policy = _policy(source_policy_of(backbone), followed)
    global_policy.replace_layer_policy(backbone, policy)


def _followed(composite: keras.Layer) -> Followed:
    """What each layer that can follow float8 does follow, with its path."""
    found = [c.layer for c in candidates.survey(composite).candidates]
    return [(path_of(layer), float8_policy_of(layer)) for layer in found]


def _says(policy: keras.DTypePolicy, followed: Followed) -> bool:
    """True if a policy says of all these paths what is followed there."""
    for path, wanted in followed:
        said = policies.as_float8(of_path(policy, path))
        if isinstance(said, Float8DTypePolicy):
            said = said.for_path(path)
        if (said if isinstance(said, Float8DTypePolicy) else None) != wanted:
            return False
    return True


def _policy(source: keras.DTypePolicy, followed: Followed) -> Float8DTypePolicy:
    recipes = [policy.recipe for _, policy in followed if policy is not None]
    (recipe, _), *_ = collections.Counter(recipes).most_common(1)
    usual = Float8DTypePolicy(source.name, recipe=recipe)
    # A path that several layers have gets one rule.
    rules = {path: policy for path, policy in followed if policy != usual}
    return Float8DTypePolicy(
        source.name,
        recipe=recipe,
        rules=[(re.escape(path), policy) for path, policy in rules.items()],
    )
