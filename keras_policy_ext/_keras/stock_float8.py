"""What Keras's own quantization puts into a layer."""

from typing import Any, NoReturn

import keras

from keras_policy_ext import _user_code
from keras_policy_ext._keras import built_layers


def is_quantized(layer: keras.Layer) -> bool:
    """Return True if Keras has quantized a layer, in whatever mode.

    `quantization_mode` also says so of a layer that follows a policy with a
    mode, as float8 layers of this package do (`_is_quantized`, keras 3.5 to
    3.15). Where that is gone, False.
    """
    return bool(getattr(layer, "_is_quantized", False))


# torch.compile follows this function, and no getter of `super` (torch 2.13).
_mode_of = keras.layers.Layer.quantization_mode.fget


def other_mode(layer: keras.Layer) -> str | None:
    """The mode of Keras's quantization that a layer has; None for float8.

    A policy in a map may be Keras's own float8 for a layer of this package
    that does not follow it. Not asked of the layer, which may ask here.
    """
    mode: str | None = _mode_of(layer)
    return None if mode == "float8" else mode


def stock_float8(layer: keras.Layer) -> dict[str, keras.Variable]:
    """What Keras's `quantize("float8")` has put into a layer, by attribute.

    Scales and amax histories of three operands, as trainable weights of the
    layer itself (keras 3.5 to 3.15); none if this is no such layer.
    """
    if layer.quantization_mode != "float8":
        return {}
    names = [
        f"{operand}_{kind}"
        for operand in ("inputs", "kernel", "outputs_grad")
        for kind in ("scale", "amax_history")
    ]
    found = {name: getattr(layer, name, None) for name in names}
    # A float8 layer of this package has these names too, but no variables.
    own = all(isinstance(v, keras.Variable) for v in found.values())
    return found if own else {}


def remove_stock_float8(layer: keras.Layer) -> None:
    """Take that out of an unlocked layer, if it is there.

    Deleting the attributes would collect garbage once for each (3.15).
    """
    for name, variable in stock_float8(layer).items():
        built_layers.untrack(layer, variable)
        vars(layer).pop(name)
        layer._is_quantized = False


class TakesAdapters:
    """A layer that takes adapters of LoRA, though its mode is "float8".

    Keras refuses them by the mode, since the call of its own float8 layers
    leaves them out (`_check_lora_supported`, from keras 3.16 on; before, it
    asks nothing). Float8 layers of this package add them. Expires when a layer
    can say that its call adds them.
    """

    float8_policy: Any

    def _check_lora_supported(self, mode: str | None) -> None:
        parent: Any = super()
        if self.float8_policy is None:
            parent._check_lora_supported(mode)


def refuse_quantization(text: str) -> NoReturn:
    """Raise that a layer stays as it is, so that users see why.

    `Model.quantize` goes on after a NotImplementedError. It warns with the
    text (keras 3.12 to 3.15), or, where it makes a report (3.16), counts the
    layer only: the text is then a warning of its own. Expires when the report
    has the text.

    Raises:
        NotImplementedError: Always.
    """
    if hasattr(keras.quantizers, "QuantizationReport"):
        _user_code.warn(text)
    raise NotImplementedError(text)
