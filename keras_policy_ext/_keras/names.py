"""Let Keras read the names of float8 policies."""

from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext._keras import Stock, put_around

try:
    from keras.src import dtype_policies as _dtype_policies
    from keras.src.dtype_policies import dtype_policy as _dtype_policy
except ImportError:  # Keras has moved it: see `read_names`.
    _dtype_policies = _dtype_policy = None

try:  # Keras 3.16.
    from keras.src.quantizers.modes.float8 import Float8Strategy as _Strategy
except ImportError:
    _Strategy = None


def read_names(read: Callable[[str], keras.DTypePolicy | None]) -> None:
    """Make Keras call `read` wherever it reads a dtype policy from a name.

    It returns the policy of the name, None to leave the name to Keras, or
    raises a ValueError. `keras.dtype_policies.get`,
    `keras.config.set_dtype_policy`, maps, and `dtype=` of layers use the class
    `DTypePolicy`, or, for a name that begins with a quantization mode, one
    function of its module (`_get_quantized_dtype_policy_by_str`, keras 3.4 to
    3.16; in 3.16 the package has it too). Both are wrapped here. Without the
    function, Keras refuses these names.
    """

    def by_name(stock: Stock, name: Any) -> keras.DTypePolicy:
        policy = read(name) if isinstance(name, str) else None
        return stock(name) if policy is None else policy

    def made(stock: Stock, self: Any, name: Any = None) -> None:
        policy = None
        if isinstance(name, str) and type(self) in _PLAIN:
            policy = read(name)
        if policy is None:
            stock(self, name)
            return
        # `__new__` is over: the object becomes the policy that was meant.
        self.__class__ = type(policy)
        vars(self).update(vars(policy))

    for module in (_dtype_policy, _dtype_policies):
        put_around(module, "_get_quantized_dtype_policy_by_str", by_name)
    put_around(keras.DTypePolicy, "__init__", made)


_PLAIN = (keras.DTypePolicy, keras.dtype_policies.FloatDTypePolicy)


def call_without_float8(wanted: Callable[[], bool]) -> None:
    """Let layers without a float8 call run under Keras's float8 policy.

    Where `wanted` returns True, they compute in the dtypes of the source
    policy. Keras calls their `_float8_call`, which raises (keras 3.4 to 3.15),
    or the `call` of one object, which asks the layer for the geometry of its
    kernel (`_quantization_geometry`, 3.16). If both are missing, Keras raises.
    """

    def float8_call(stock: Stock, self: Any, *args: Any, **kwargs: Any) -> Any:
        call = self.call if wanted() else stock.__get__(self)
        return call(*args, **kwargs)

    def by_strategy(
        stock: Stock, self: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        geometry = getattr(layer, "_quantization_geometry", None)
        if wanted() and (geometry is None or geometry() is None):
            return layer.call(*args, **kwargs)
        return stock(self, layer, *args, **kwargs)

    put_around(keras.layers.Layer, "_float8_call", float8_call)
    put_around(_Strategy, "call", by_strategy)
