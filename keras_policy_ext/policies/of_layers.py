"""Find the policy that a layer follows, and its plain source policy.

A layer holds a policy, often one shared by many layers. What that policy means
for the layer depends on its path, and on whether its class supports float8.
"""

from __future__ import annotations

import keras

from keras_policy_ext._keras import quantization, walking
from keras_policy_ext.policies import plain
from keras_policy_ext.policies._source_map import SourceMap, is_stock_map
from keras_policy_ext.policies.float8 import Float8DTypePolicy, as_float8


def of_path(policy: keras.DTypePolicy, path: str | None) -> keras.DTypePolicy:
    """Return the policy that a map of Keras, perhaps nested, has for a path.

    A path of None, of a layer that is not built, has the default of the map,
    as in Keras. A policy of this package, which is a map too, is returned with
    its rules, and Keras's own float8 policy unchanged.

    Raises:
        ValueError: If several patterns of the map match the path.
    """
    while is_stock_map(policy):
        policy = policy[path] if path else policy.default_policy
    return plain.named(policy)


def held_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """Return the layer's policy, looked up in a `DTypePolicyMap`.

    A `Float8DTypePolicy` keeps its per-path rules.
    """
    return as_float8(of_path(layer.dtype_policy, layer.path))


def policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """Return the policy that a layer would follow as a float8 layer.

    It is a `Float8DTypePolicy` without rules, or a policy that is not float8.
    """
    policy = held_policy(layer)
    if isinstance(policy, Float8DTypePolicy):
        return policy.for_path(layer.path)
    return policy


def stock_policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """Return the policy that a layer would follow without this package.

    That is Keras's own float8 policy only if Keras has quantized the layer.
    """
    policy = of_path(layer.dtype_policy, layer.path)
    # A layer follows Keras's own float8 policy only if Keras has quantized it.
    is_keras_float8 = as_float8(policy) is not policy
    if is_keras_float8 and not quantization.is_in_float8(layer):
        return source_policy_of(layer)
    return source_policy_of(layer) if isinstance(policy, SourceMap) else policy


def source_policy_of(layer: keras.Layer) -> keras.DTypePolicy:
    """Return the layer's policy without float8: the plain source policy."""
    # If Keras has quantized the layer, its policy is not plain.
    policy = policy_of(layer)
    if isinstance(policy, SourceMap):
        return policy.source_policy
    return policy


def float8_policy_of(layer: keras.Layer) -> Float8DTypePolicy | None:
    """Return a layer's float8 policy; None if it is not in float8 now."""
    return getattr(layer, "float8_policy", None)


def is_frozen(layer: keras.Layer) -> bool:
    """Return True if a layer's kernels are stored in float8, not trained."""
    policy = float8_policy_of(layer)
    return policy is not None and not policy.recipe.trains


def layers_in_float8(model: keras.Layer) -> list[keras.Layer]:
    """Return the layers of a model that are in float8, in the model's order."""
    layers = walking.layers_within(model)
    return [x for x in layers if float8_policy_of(x) is not None]


def multiplies_in_float8(layer: keras.Layer) -> bool:
    """Return True if a layer's forward matmul reads quantized inputs."""
    policy = float8_policy_of(layer)
    if policy is None:
        return False
    return policy.recipe.quantization("inputs", "forward") is not None
