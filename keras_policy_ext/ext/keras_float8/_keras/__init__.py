"""Private names of layers in Keras's own float8."""

from collections.abc import Callable
from typing import Any

import keras

from keras_policy_ext._keras import put_around

try:  # Keras 3.16.
    from keras.src.quantizers.modes.float8 import Float8Strategy as _Strategy
except ImportError:
    _Strategy = None


def float8_variables(layer: keras.Layer) -> dict[str, keras.Variable]:
    """Return the variables that Keras's `quantize("float8")` added, by name."""
    # These are scales and amax histories of three operands, as trainable
    # weights of the layer itself (keras 3.5 to 3.15). Empty for other layers.
    if layer.quantization_mode != "float8":
        return {}
    names = [
        f"{operand}_{kind}"
        for operand in ("inputs", "kernel", "outputs_grad")
        for kind in ("scale", "amax_history")
    ]
    variables = {name: vars(layer).get(name) for name in names}
    # A float8 layer of this package has these names too, but no variables.
    own = all(isinstance(v, keras.Variable) for v in variables.values())
    return variables if own else {}


def remove_float8_variables(layer: keras.Layer) -> None:
    """Remove the variables that Keras's `quantize("float8")` added."""
    for name, variable in float8_variables(layer).items():
        # `quantize` of Keras does the same for its int8 (keras 3.0 to 3.16).
        layer._untrack_variable(variable)
        # `delattr` would run the garbage collector for each (keras 3.15).
        vars(layer).pop(name)
        layer._is_quantized = False


def call_without_float8(wanted: Callable[[], bool]) -> None:
    """Let layers without a float8 call run under Keras's float8 policy.

    They compute in the dtypes of the source policy. Keras calls their
    `_float8_call`, which raises (keras 3.4 to 3.15), or the `call` of one
    object, which asks the layer for the geometry of its kernel
    (`_quantization_geometry`, 3.16). If both are missing, Keras raises. Expires
    when Keras calls such layers normally.

    Args:
        wanted: Returns True if this applies now.
    """

    def float8_call(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        call = self.call if wanted() else stock.__get__(self)
        return call(*args, **kwargs)

    def by_strategy(
        stock: Any, self: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        geometry = getattr(layer, "_quantization_geometry", None)
        if wanted() and (geometry is None or geometry() is None):
            return layer.call(*args, **kwargs)
        return stock(self, layer, *args, **kwargs)

    put_around(keras.layers.Layer, "_float8_call", float8_call)
    put_around(_Strategy, "call", by_strategy)
