"""Backbones of KerasHub, which is not imported here."""

import sys

import keras


def count_adapted_layers_again(model: keras.Model) -> None:
    """Let a KerasHub backbone find its LoRA layers where they now are.

    It remembers them by their number among all layers with weights, for its
    files of adapters (keras_hub 0.32); a float8 state is one more of those.
    Nothing happens where LoRA was not enabled, or that list is gone. Expires
    when KerasHub goes by path.
    """
    if not writes_map_of_quantized_layers(model):
        return
    if getattr(model, "_lora_enabled_layers", None):
        # In KerasHub's order, which is not that of `layers_within`.
        layers = model._flatten_layers(include_self=False)
        layers = [x for x in layers if x.weights]
        model._lora_enabled_layers = [
            number
            for number, layer in enumerate(layers)
            if getattr(layer, "lora_enabled", False)
        ]


def writes_map_of_quantized_layers(model: keras.Model) -> bool:
    """Return True if a model's config names a policy for each quantized layer.

    KerasHub's backbones do (keras_hub 0.32): once a layer reports a
    `quantization_mode`, the config has a map of those layers in place of the
    backbone's policy, and no word about the others, which come back in the
    global policy. A policy that is itself a map is written as it is. Expires
    when KerasHub gives that map a default.
    """
    hub = sys.modules.get("keras_hub")
    return hub is not None and isinstance(model, hub.models.Backbone)
