"""Which policy a layer follows, and on which plain policy that stands.

A layer holds a policy, often one for many layers. What that says for the
layer itself depends on its path, and on whether the layer can be in float8.
"""

from __future__ import annotations

import keras

from keras_policy_ext._keras import stock_float8, walking
from keras_policy_ext.policies import _plain
from keras_policy_ext.policies._source_map import SourceMap, is_stock_map
from keras_policy_ext.policies.float8 import Float8DTypePolicy, as_float8


def of_path(policy: keras.DTypePolicy, path: str | None) -> keras.DTypePolicy:
    """Look up a path in a map of Keras, and in a map that is found there.

    A policy of this package, which is a map too, is returned with its rules.

    Args:
        policy: Any policy.
        path: The path of a layer; None (a layer that is not built) for the
            default of the map, as in Keras.

    Returns:
        A policy that is no map, or one of this package. Keras's own float8
        policy is returned as it is.

    Raises:
        ValueError: If several patterns of the map match the path.
    """
    while is_stock_map(policy):
        policy = policy[path] if path else policy.default_policy
    return _plain.named(policy)


def held_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """The policy that a layer holds, with its rules if it is float8."""
    return as_float8(of_path(layer.dtype_policy, layer.path))


def policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """What the policy of a layer says for a float8 layer of its path.

    The one answer to which policy a layer follows: a `Float8DTypePolicy`
    without rules, or a policy that is not float8.
    """
    policy = held_policy(layer)
    if isinstance(policy, Float8DTypePolicy):
        return policy.for_path(layer.path)
    return policy


def stock_policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """What the policy of a layer says for a stock layer of its path.

    That is Keras's own float8 policy for a layer with the scales of that.
    """
    policy = of_path(layer.dtype_policy, layer.path)
    is_float8 = as_float8(policy) is not policy
    if is_float8 and not stock_float8.stock_float8(layer):
        return source_policy_of(layer)
    return source_policy_of(layer) if isinstance(policy, SourceMap) else policy


def source_policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """Return the source policy of a layer, or its policy if it is not float8.

    It is plain unless Keras has quantized the layer.
    """
    policy = policy_of(layer)
    if isinstance(policy, SourceMap):
        return policy.source_policy
    return policy


def float8_policy_of(layer: keras.Layer) -> Float8DTypePolicy | None:
    """The policy by which a layer is in float8 now; None if it is not."""
    return getattr(layer, "float8_policy", None)


def is_frozen(layer: keras.Layer) -> bool:
    """True if the kernels of a layer are stored in float8, and not trained."""
    policy = float8_policy_of(layer)
    return policy is not None and not policy.recipe.trains


def layers_in_float8(model: keras.Layer) -> list[keras.Layer]:
    """The layers of a model that are in float8, in its order."""
    layers = walking.layers_within(model)
    return [x for x in layers if float8_policy_of(x) is not None]
