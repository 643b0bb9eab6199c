"""Which policy a layer follows, and on which plain policy that stands.

A layer holds a policy, often one for many layers. What that says for the
layer itself depends on its path, and on whether the layer can be in float8.
"""

from __future__ import annotations

import keras

from keras_policy_ext._keras import walking
from keras_policy_ext.policies.float8 import Float8DTypePolicy, as_float8, get


def held_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """The policy that a layer holds, with rules for all paths."""
    return as_float8(layer.dtype_policy)


def policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """What the policy of a layer says for a float8 layer of its path.

    A `Float8DTypePolicy` without rules, or one that is not float8.
    """
    policy = held_policy(layer)
    if isinstance(policy, Float8DTypePolicy):
        return policy.for_path(layer.path)
    return as_float8(stock_policy_of(layer))


def stock_policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """What the policy of a layer says for a stock layer of its path."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path or ""]
    return policy


def source_policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """The policy of a layer as far as it is not float8.

    It is plain unless Keras has quantized the layer.
    """
    policy = get(stock_policy_of(layer))
    if isinstance(policy, Float8DTypePolicy):
        return policy.source_policy
    return policy


def float8_policy_of(layer: keras.Layer) -> Float8DTypePolicy | None:
    """The policy by which a layer is in float8 now; None if it is not."""
    return getattr(layer, "float8_policy", None)


def is_frozen(layer: keras.Layer) -> bool:
    """Whether the kernels of a layer are stored in float8, and not trained."""
    policy = float8_policy_of(layer)
    return policy is not None and not policy.recipe.trains


def layers_in_float8(model: keras.Layer) -> list[keras.Layer]:
    """The layers of a model that are in float8, in its order."""
    layers = walking.layers_within(model)
    return [x for x in layers if float8_policy_of(x) is not None]
