"""The global dtype policy, and policies that layers hold."""

import keras

from keras_policy_ext._keras import versions

try:
    from keras.src.backend.common import global_state as _global_state
except ImportError:  # Keras has moved it: the public API has to do.
    _global_state = None


def stored_global_policy() -> keras.DTypePolicy | None:
    """Read Keras's global policy without fixing it to the floatx policy."""
    # Public `keras.config.dtype_policy()` stores the floatx policy on its
    # first read, after which `set_floatx` is ignored (keras 3.8 to 3.15). It
    # is used if Keras has moved the store. Expires when
    # `set_dtype_policy(None)` resets.
    if _global_state is None:
        return keras.config.dtype_policy()
    return _global_state.get_global_attribute("dtype_policy", None)


def store_global_policy(policy: keras.DTypePolicy | None) -> None:
    """Set Keras's global policy; None removes it, so that floatx decides."""
    # `keras.config.set_dtype_policy(None)` raises (keras 3.8 to 3.15). If
    # Keras has moved the store, None stores the policy of the present floatx.
    if _global_state is not None:
        _global_state.set_global_attribute("dtype_policy", policy)
    elif policy is None:
        keras.config.set_dtype_policy(keras.config.floatx())
    else:
        keras.config.set_dtype_policy(policy)


def replace_layer_policy(layer: keras.Layer, policy: keras.DTypePolicy) -> None:
    """Set the policy of one layer, without writing into a shared map.

    Public `layer.dtype_policy = …` does not replace a map that a built layer
    holds, but writes into it, although many layers hold the same object (keras
    3.8 to 3.16). Expires when Keras's setter copies the map.
    """
    layer._dtype_policy = policy
    if layer.dtype_policy is not policy:
        raise versions.missing(
            "Layer._dtype_policy", "another policy for a built layer"
        )


def name_for_maps(policy: keras.DTypePolicy, name: str) -> None:
    """Set the name that a `DTypePolicyMap` with this default policy has."""
    # `DTypePolicyMap.name` reads an attribute of its default, and not the
    # property (`_name`, keras 3.4 to 3.15).
    policy._name = name
