"""Layers that Keras's own quantization has changed."""

from typing import Any, NoReturn

import keras

from keras_policy_ext import user_code


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


def is_in_float8(layer: keras.Layer) -> bool:
    """Return True if a layer computes in Keras's own float8."""
    # The layer itself then has scales and histories, as trainable weights
    # (keras 3.5 to 3.15). In layers of this package they are no variables.
    scale = vars(layer).get("inputs_scale")
    is_float8 = layer.quantization_mode == "float8"
    return is_float8 and isinstance(scale, keras.Variable)


class TakesAdapters:
    """A float8 layer that accepts LoRA adapters, which Keras would refuse.

    The call of Keras's own float8 layers ignores them
    (`_check_lora_supported`, from keras 3.16 on; before, there is no check).
    Expires when a layer can say that its call uses them.
    """

    float8_policy: Any

    def _check_lora_supported(self, mode: str | None) -> None:
        """Check as Keras does, but not in our float8."""
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
