"""Layers that Keras's own quantization has changed."""

from typing import Any, NoReturn

import keras

from keras_policy_ext import user_code
from keras_policy_ext._keras import built_layers


def is_quantized(layer: keras.Layer) -> bool:
    """Return True if Keras's own `quantize` has changed a layer."""
    # `quantization_mode` is also set by a policy with a mode, as in float8
    # layers of this package (`_is_quantized`, keras 3.5 to 3.15).
    return bool(getattr(layer, "_is_quantized", False))


# torch.compile follows this function, and no getter of `super` (torch 2.13).
_mode_of = keras.layers.Layer.quantization_mode.fget


def other_mode(layer: keras.Layer) -> str | None:
    """Return the mode in which Keras quantized a layer; None if float8."""
    # Keras's property, since that of a float8 layer may call this function.
    mode: str | None = _mode_of(layer)
    # A map may have Keras's own float8 for a layer that does not follow it.
    return None if mode == "float8" else mode


def stock_float8(layer: keras.Layer) -> dict[str, keras.Variable]:
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
    variables = {name: getattr(layer, name, None) for name in names}
    # A float8 layer of this package has these names too, but no variables.
    own = all(isinstance(v, keras.Variable) for v in variables.values())
    return variables if own else {}


def remove_stock_float8(layer: keras.Layer) -> None:
    """Remove the variables that Keras's `quantize("float8")` added."""
    for name, variable in stock_float8(layer).items():
        built_layers.untrack(layer, variable)
        # `delattr` would run the garbage collector for each (keras 3.15).
        vars(layer).pop(name)
        layer._is_quantized = False


class TakesAdapters:
    """A float8 layer that accepts LoRA adapters, which Keras would refuse.

    The call of Keras's own float8 layers ignores them
    (`_check_lora_supported`, from keras 3.16 on; before, there is no check).
    Expires when a layer can say that its call uses them.
    """

    float8_policy: Any

    def _check_lora_supported(self, mode: str | None) -> None:
        parent: Any = super()
        if self.float8_policy is None:
            parent._check_lora_supported(mode)


def refuse_quantization(text: str) -> NoReturn:
    """Raise NotImplementedError; the text tells users why."""
    # `Model.quantize` continues after it, and warns with the text (keras 3.12
    # to 3.15). If it makes a report (3.16), it only counts the layer, so the
    # text is a warning of its own. Expires when the report has the text.
    if hasattr(keras.quantizers, "QuantizationReport"):
        user_code.warn(text)
    raise NotImplementedError(text)
