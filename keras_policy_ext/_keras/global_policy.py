"""The global dtype policy, policies of layers, and names of policies."""

from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext._keras import put_around, versions

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
        what = "Layer._dtype_policy"
        raise versions.missing(what, "another policy for a built layer")


def name_for_maps(policy: keras.DTypePolicy, name: str) -> None:
    """Set the name that a `DTypePolicyMap` with this default policy has."""
    # `DTypePolicyMap.name` reads an attribute of its default, and not the
    # property (`_name`, keras 3.4 to 3.15).
    policy._name = name


try:
    from keras.src import dtype_policies as _dtype_policies
    from keras.src.dtype_policies import dtype_policy as _dtype_policy
except ImportError:  # Keras has moved it: see `read_names`.
    _dtype_policies = _dtype_policy = None


def read_names(read: Callable[[str], keras.DTypePolicy | None]) -> None:
    """Make Keras call `read` wherever it reads a dtype policy from a name.

    It does in `keras.dtype_policies.get`, `keras.config.set_dtype_policy`,
    maps, and `dtype=` of layers. All use the class `DTypePolicy`, or, for a
    name that begins with a quantization mode, one function of its module
    (`_get_quantized_dtype_policy_by_str`, keras 3.4 to 3.16; in 3.16 the
    package has it too). These are wrapped here. If the function is missing,
    Keras refuses these names. Expires with a public way to register names.

    Args:
        read: Returns the policy of a name, or None to leave the name to Keras.
            It may raise a ValueError.
    """

    def by_name(stock: Any, name: Any) -> keras.DTypePolicy:
        """Return the policy that `read` or else Keras finds."""
        policy = read(name) if isinstance(name, str) else None
        return stock(name) if policy is None else policy

    def init(stock: Any, self: Any, name: Any = None) -> None:
        """Make the policy that `read` finds, or else that of Keras."""
        policy = None
        if isinstance(name, str) and type(self) in _PLAIN_CLASSES:
            policy = read(name)
        if policy is None:
            stock(self, name)
            return
        # `__new__` is over: the object becomes the policy that was meant.
        self.__class__ = type(policy)
        vars(self).update(vars(policy))

    for module in (_dtype_policy, _dtype_policies):
        put_around(module, "_get_quantized_dtype_policy_by_str", by_name)
    put_around(keras.DTypePolicy, "__init__", init)


_PLAIN_CLASSES = (keras.DTypePolicy, keras.dtype_policies.FloatDTypePolicy)
